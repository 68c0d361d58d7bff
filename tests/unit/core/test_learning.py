"""What policies are told of requests, and how the work of one that learns comes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.learning import keys_of
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.policy.eviction import Blocks, Keys, Rows
from kvtier.policy.lru import LruPolicy
from kvtier.types import BlockHash, LeaseId, NamespaceId, PackedHashes, SlabId

NS = NamespaceId(1)
SLICE_BLOCKS = 4


class Listener(LruPolicy):
    """Writes down what it is told, and learns by counting."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.requests: list[tuple[list[int], list[int]]] = []
        self.inserted: list[int] = []
        self.touched: list[int] = []
        self.results: list[object] = []
        self.due = False

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        self.requests.append((self.blocks.keys_of(rows).tolist(), absent.tolist()))
        super().on_touch(rows, now)

    def on_insert(self, rows: Rows, now: float) -> None:
        self.inserted += self.blocks.keys_of(rows).tolist()
        super().on_insert(rows, now)

    def on_touch(self, rows: Rows, now: float) -> None:
        self.touched += rows.tolist()
        super().on_touch(rows, now)

    def begin_refit(self) -> Callable[[], object] | None:
        return (lambda: "learned") if self.due else None

    def end_refit(self, result: object) -> None:
        self.results.append(result)


class Core:
    def __init__(self) -> None:
        self.policies: list[Listener] = []
        self.manager = BlockManager(
            ManagerConfig(
                slab_bytes=4096 * 32,
                slab_count_max=2,
                slice_blocks=SLICE_BLOCKS,
                stock_divisor=1,
            ),
            make_policy=self.make,
        )
        self.run(ev.SlabPopulated(SlabId(1)))
        self.run(ev.NamespaceOpened(NS, 1, 32, 4096, 1, block_tokens=64))

    def make(self, blocks: Blocks) -> Listener:
        self.policies.append(Listener(blocks))
        return self.policies[-1]

    @property
    def policy(self) -> Listener:
        return self.policies[-1]

    def run(self, event: ev.Event, now: float = 0.0) -> list[ins.Instruction]:
        """All slices."""
        found: list[ins.Instruction] = []
        rest: ev.Event | None = event
        while rest is not None:
            done = self.manager.handle(rest, now)
            rest = next((one.event for one in done if isinstance(one, ins.Continue)), None)
            found += [one for one in done if not isinstance(one, ins.Continue)]
        return found

    def store(self, hashes: list[BlockHash], parent: BlockHash | None = None) -> None:
        (reserved,) = (
            one
            for one in self.run(ev.Reserve(DAEMON_SESSION, NS, len(hashes)))
            if isinstance(one, ins.SlotsReserved)
        )
        checksums = np.ones(len(hashes), np.uint64)
        self.run(
            ev.Commit(DAEMON_SESSION, NS, hashes, reserved.slots, parent, 1, checksums=checksums)
        )

    def acquire(self, hashes: list[BlockHash]) -> LeaseId | None:
        packed = PackedHashes(b"".join(hashes), 32)
        found = self.run(ev.Acquire(DAEMON_SESSION, NS, packed, deadline=9.0), 1.0)
        (granted,) = (one for one in found if isinstance(one, ins.LeaseGranted))
        return granted.lease


def chain(count: int) -> list[BlockHash]:
    return [BlockHash(bytes(24) + (one + 1).to_bytes(8, "little")) for one in range(count)]


def test_policy_is_told_of_a_request_once_however_many_slices_it_takes() -> None:
    core = Core()
    hashes = chain(3 * SLICE_BLOCKS)
    core.store(hashes[:10])
    assert core.acquire(hashes) is not None
    assert core.policy.requests == [(list(range(1, 11)), [11, 12])]
    assert not core.policy.touched, "told of the same use twice"


def test_request_of_which_nothing_is_here_is_told_of_and_then_what_is_inserted() -> None:
    core = Core()
    assert core.acquire(chain(3)) is None
    core.store(chain(3))
    assert core.policy.requests == [([], [1, 2, 3])]
    assert core.policy.inserted == [1, 2, 3]


def test_policy_may_ask_for_parents_and_sizes() -> None:
    core = Core()
    core.store(chain(3))
    blocks = core.policy.blocks
    assert (blocks.count_max, blocks.block_tokens) == (64, 64)
    rows = np.array([0, 1, 2], np.int32)
    parents = blocks.parents_of(rows)
    assert parents[0] == -1
    assert blocks.keys_of(parents[1:]).tolist() == blocks.keys_of(rows[:2]).tolist()


def test_work_of_a_learning_policy_goes_out_and_its_result_comes_back() -> None:
    core = Core()
    assert not core.run(ev.Tick())
    core.policy.due = True
    (refit,) = core.run(ev.Tick())
    assert isinstance(refit, ins.Refit)
    core.run(ev.Refitted(refit.namespace, refit.epoch, refit.work()))
    assert core.policy.results == ["learned"]


def test_what_was_learned_before_a_clear_is_not_told_to_the_policy_after_it() -> None:
    core = Core()
    core.policy.due = True
    (refit,) = core.run(ev.Tick())
    assert isinstance(refit, ins.Refit)
    core.run(ev.Clear(NS, 2))
    assert len(core.policies) == 2
    core.run(ev.Refitted(refit.namespace, refit.epoch, refit.work()))
    assert not core.policy.results


def test_keys_are_the_same_however_hashes_come() -> None:
    hashes = chain(5)
    packed = PackedHashes(b"".join(hashes), 32)
    assert keys_of(hashes, 2).tolist() == keys_of(packed, 2).tolist() == [3, 4, 5]
    assert not len(keys_of(packed, 5))
