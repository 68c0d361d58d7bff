"""Tenants below memory: whose segments stay, who writes, and whose blocks are read first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvtier.core import events as ev
from kvtier.core.settings import LowerSettings
from kvtier.core.tenancy import TenantBudget
from kvtier.types import BlockHash, NamespaceId, TierName
from tests.support.fake_disk import FakeDisk
from tests.support.world import HASH_BYTES, World
from tests.unit.core.test_tenant_shares import CONFIG, MEEK, SLAB_SLOTS, SLOT_BYTES, Node

SEGMENTS = 8
PLENTY = 1e15


class TieredNode(Node):
    """With a pool of eight segments of four slots below memory."""

    def __init__(self, budgets: dict[str, TenantBudget], lower: LowerSettings) -> None:
        self.world = World(replace(CONFIG, tenants=budgets, lower={TierName.NVME: lower}))
        self.disk = FakeDisk(SLOT_BYTES * SLAB_SLOTS, SEGMENTS, row_count_max=SLAB_SLOTS)
        self.world.open_nvme(self.disk)
        self.populate()

    def empty_memory(self) -> None:
        """Every slab is given up, and comes back empty."""
        for slab_set in list(self.world.sets):
            self.world.run_quietly(ev.WithdrawSlabSet(slab_set))
            self.world.finish_work()
            self.populate()

    def below(self, namespace: NamespaceId) -> set[int]:
        """Numbers of the namespace's blocks that have a copy there."""
        found = self.disk.blocks_of(self.world.namespaces[namespace])
        return {int.from_bytes(block, "big") for block in found}


def beside_a_flood(budgets: dict[str, TenantBudget]) -> TieredNode:
    """The meek tenant has written eight blocks, then the greedy one writes the pool over."""
    node = TieredNode(budgets, LowerSettings(write_bytes_per_hour=PLENTY))
    meek, greedy = node.open(MEEK, "meek"), node.open(1, "greedy")
    node.put(meek, 0, 8)
    assert node.below(meek) == set(range(8))
    node.put(greedy, 1000, 5 * SEGMENTS * SLAB_SLOTS)
    assert len(node.below(greedy)) >= SLAB_SLOTS * (SEGMENTS // 2)
    assert node.world.manager.check_invariants() == []
    return node


def test_nobodys_flood_reaches_the_segments_that_a_tenant_is_guaranteed() -> None:
    node = beside_a_flood({"meek": TenantBudget(0.25)})
    assert node.below(MEEK) == set(range(8))


def test_a_tenant_has_no_more_segments_than_its_maximum() -> None:
    budgets = {"greedy": TenantBudget(maximum=0.5)}
    node = TieredNode(budgets, LowerSettings(write_bytes_per_hour=PLENTY))
    greedy = node.open(1, "greedy")
    node.put(greedy, 0, 5 * SEGMENTS * SLAB_SLOTS)
    assert 0 < len(node.below(greedy)) <= SLAB_SLOTS * SEGMENTS // 2


def test_what_may_be_written_is_left_for_whom_it_is_guaranteed() -> None:
    hour_bytes = 24.0 * SLOT_BYTES
    lower = LowerSettings(write_bytes_per_hour=hour_bytes)
    node = TieredNode({"meek": TenantBudget(0.5)}, lower)
    node.world.manager._ladder.rungs[TierName.NVME].demotions.budget.fill(0.0)  # Not a new disk.
    greedy, meek = node.open(1, "greedy"), node.open(MEEK, "meek")
    node.put(greedy, 1000, 64)
    spent = len(node.below(greedy))
    assert spent <= 12
    node.put(meek, 100, 1)  # It gets its first slab for this one.
    node.put(meek, 0, 4)
    assert node.below(meek) >= set(range(4))


def test_those_of_a_higher_priority_are_read_first_and_equals_take_turns() -> None:
    budgets = {"first": TenantBudget(priority=0)}
    lower = LowerSettings(
        write_bytes_per_hour=PLENTY, transfer_blocks_max=1, batch_blocks=1, prefetch_fraction_max=1
    )
    node = TieredNode(budgets, lower)
    tenants = {name: node.open(number, name) for number, name in ((1, "b"), (2, "a"), (3, "first"))}
    for namespace in tenants.values():
        node.put(namespace, 0, 4)
        assert node.below(namespace) >= {1, 2, 3}
    node.empty_memory()
    order = read_order(node, tenants)
    assert order[:3].count(tenants["first"]) >= 2, order
    rest = [one for one in order if one != tenants["first"]]
    assert abs(rest[:4].count(tenants["a"]) - rest[:4].count(tenants["b"])) <= 1, order


def test_a_lower_priority_waits_for_a_bounded_number_of_reads() -> None:
    budgets = {"first": TenantBudget(priority=0), "last": TenantBudget(0.125, priority=2)}
    lower = LowerSettings(
        write_bytes_per_hour=PLENTY, transfer_blocks_max=1, batch_blocks=1, prefetch_fraction_max=1
    )
    node = TieredNode(budgets, lower)
    first, last = node.open(1, "first"), node.open(2, "last")
    node.put(last, 0, 1)
    node.put(first, 0, 24)
    node.empty_memory()
    # One is read already while the other tenant asks, and then all the rest come.
    node.world.run(ev.Prefetch(first, [BlockHash((23).to_bytes(HASH_BYTES, "big"))]))
    order = read_order(node, {"last": last, "first": first}, range(23))
    assert order.count(first) > 16, order
    assert 1 < order.index(last) < 16, order


def read_order(
    node: TieredNode, tenants: dict[str, NamespaceId], numbers: Iterable[int] = (1, 2, 3)
) -> list[NamespaceId]:
    """In which order blocks of these are read, that all are asked for at one moment."""
    for namespace in tenants.values():
        for number in numbers:
            block = BlockHash(number.to_bytes(HASH_BYTES, "big"))
            node.world.run(ev.Prefetch(namespace, [block]))
    order = []
    while node.world.under_way:
        one = node.world.under_way[0]
        order.append(one.asked.namespace)
        node.world.lower[TierName.NVME].mover.finish(one)
    return order
