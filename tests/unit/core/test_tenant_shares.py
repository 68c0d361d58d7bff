"""Tenants in one block manager: who keeps how many slabs and segments, whoever is greedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.settings import ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.types import BlockHash, NamespaceId
from tests.support.world import HASH_BYTES, World

SLOT_BYTES = 4096
SLAB_SLOTS = 4
SLABS = 8
CONFIG = ManagerConfig(slab_bytes=SLOT_BYTES * SLAB_SLOTS, slab_count_max=SLABS)
MEEK = NamespaceId(100)


class Node:
    """Memory that is populated at once, and namespaces that put blocks."""

    def __init__(self, budgets: dict[str, TenantBudget]) -> None:
        self.world = World(replace(CONFIG, tenants=budgets))
        self.populate()

    def open(self, namespace: int, tenant: str) -> NamespaceId:
        self.world.open_namespace(NamespaceId(namespace), slot_bytes=SLOT_BYTES, tenant=tenant)
        return NamespaceId(namespace)

    def populate(self) -> None:
        for _ in range(SLABS):
            stats = self.world.manager.stats()
            if stats.slab_bound_count + stats.slab_stock_count == stats.slab_count_max:
                return
            self.world.populate_slab()

    def put(self, namespace: NamespaceId, first: int, count: int) -> int:
        """Blocks without parents, one after the other; how many found a slot."""
        done = 0
        for number in range(first, first + count):
            self.world.now += 0.01
            found = self.world.run(ev.Reserve(DAEMON_SESSION, namespace, 1))
            assert isinstance(found, ins.SlotsReserved)
            self.populate()
            if not len(found.slots):
                continue
            block = BlockHash(number.to_bytes(HASH_BYTES, "big"))
            for slot in found.slots.tolist():
                self.world.write(slot, 0, block)
            commit = ev.Commit(
                DAEMON_SESSION, namespace, [block], found.slots, None, found.epoch, None
            )
            assert isinstance(self.world.run(commit), ins.Committed)
            self.world.finish_work()
            done += 1
        return done

    def slabs(self, namespace: NamespaceId) -> int:
        return sum(one.namespace == namespace for one in self.world.sets.values())

    def hits(self, namespace: NamespaceId, first: int, count: int) -> int:
        """Of these blocks, those that are there."""
        blocks = [BlockHash(one.to_bytes(HASH_BYTES, "big")) for one in range(first, first + count)]
        return sum(self.world.match(namespace, [one]).matched_count for one in blocks)


def greedy_beside_meek(budgets: dict[str, TenantBudget], namespaces: int) -> tuple[Node, int]:
    """A greedy tenant has filled everything; then the meek one puts. Its slabs at the end."""
    node = Node(budgets)
    greedy = [node.open(number, "greedy") for number in range(1, 1 + namespaces)]
    meek = node.open(MEEK, "meek")
    for number, namespace in enumerate(greedy):
        node.put(namespace, 1000 * number, 12 * SLAB_SLOTS)
    for turn in range(2 * SLABS):
        node.put(meek, 100_000 + 4 * turn, 4)
        for number, namespace in enumerate(greedy):
            node.put(namespace, 1000 * number + 500 + 4 * turn, 4)
    return node, node.slabs(meek)


def test_without_budgets_two_tenants_share_alike_however_many_namespaces_one_has() -> None:
    _, slabs = greedy_beside_meek({}, namespaces=3)
    assert slabs == SLABS // 2


def test_a_minimum_is_given_and_kept_whatever_weight_the_others_have() -> None:
    budgets = {"greedy": TenantBudget(weight=50), "meek": TenantBudget(0.25, weight=1)}
    node, slabs = greedy_beside_meek(budgets, namespaces=3)
    assert slabs == SLABS // 4
    before = node.hits(MEEK, 100_000 + 8 * SLABS - 8, 8)
    assert before == 8
    for number in (1, 2, 3):
        node.put(NamespaceId(number), 10_000 * number, 12 * SLAB_SLOTS)
    assert node.hits(MEEK, 100_000 + 8 * SLABS - 8, 8) == 8
    node.world.now += 10 * CONFIG.idle_seconds  # Idle, it keeps its minimum.
    for number in (1, 2, 3):
        node.put(NamespaceId(number), 20_000 * number, 12 * SLAB_SLOTS)
    assert node.hits(MEEK, 100_000 + 8 * SLABS - 8, 8) == 8
    assert node.world.manager.check_invariants() == []


def test_nobody_has_more_than_its_maximum_and_others_have_the_rest() -> None:
    node = Node({"greedy": TenantBudget(maximum=0.5)})
    greedy = node.open(1, "greedy")
    node.put(greedy, 0, 12 * SLAB_SLOTS)
    assert node.slabs(greedy) == SLABS // 2
    other = node.open(2, "")
    node.put(other, 0, 12 * SLAB_SLOTS)
    assert node.slabs(other) == SLABS // 2


def test_what_nobody_else_wants_one_may_have_and_gives_back() -> None:
    node = Node({"a": TenantBudget(0.5), "b": TenantBudget(0.5)})
    a, b = node.open(1, "a"), node.open(2, "b")
    node.put(a, 0, 12 * SLAB_SLOTS)
    assert node.slabs(a) == SLABS
    node.put(b, 0, 12 * SLAB_SLOTS)
    assert (node.slabs(a), node.slabs(b)) == (SLABS // 2, SLABS // 2)


def test_a_tenant_pins_at_most_half_of_what_it_may_have() -> None:
    node = Node({"a": TenantBudget(0.5), "b": TenantBudget(0.5)})
    a, b = node.open(1, "a"), node.open(2, "b")
    for turn in range(SLABS):
        node.put(a, 4 * turn, 4)
        node.put(b, 4 * turn, 4)
    block_count = SLABS * SLAB_SLOTS // 2
    leased = 0
    for number in range(4 * SLABS - block_count, 4 * SLABS):
        block = BlockHash(number.to_bytes(HASH_BYTES, "big"))
        event = ev.Acquire(DAEMON_SESSION, a, [block], node.world.now + 50.0)
        found = node.world.run(event)
        assert isinstance(found, ins.LeaseGranted)
        leased += found.leased_count
    assert leased == block_count // 2
    block = BlockHash((4 * SLABS - 1).to_bytes(HASH_BYTES, "big"))
    found = node.world.run(ev.Acquire(DAEMON_SESSION, b, [block], node.world.now + 50.0))
    assert isinstance(found, ins.LeaseGranted)
    assert found.leased_count == 1, "the other one's half is untouched"
    assert isinstance(found.slots, np.ndarray)
