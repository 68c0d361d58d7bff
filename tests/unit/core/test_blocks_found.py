"""Blocks that somebody else has put into a tier: taken in behind what is resident."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.policy.admission import Admission
from kvtier.policy.lru import LruPolicy
from kvtier.types import BlockHash, NamespaceId, SlabId, TierName

NS = NamespaceId(1)
EPOCH = 7
SLOT_BYTES = 4096
CONFIG = ManagerConfig(
    slab_bytes=16 * SLOT_BYTES,
    slab_count_max=1,
    stock_divisor=1,
    lower={
        TierName.NVME: LowerSettings(write_bytes_per_hour=2**40),
        TierName.REMOTE: LowerSettings(write_bytes_per_hour=2**40, admission=Admission.REUSED),
    },
)


def name(letter: str) -> BlockHash:
    return BlockHash(letter.encode() * 32)


def names(letters: str) -> list[BlockHash]:
    return [name(letter) for letter in letters]


def opened(config: ManagerConfig = CONFIG, segment_count: int = 4) -> BlockManager:
    manager = BlockManager(config, make_policy=LruPolicy)
    manager.handle(ev.SlabPopulated(SlabId(1)), 0.0)
    manager.handle(
        ev.NamespaceOpened(
            NS, EPOCH, 32, SLOT_BYTES, 1, shard_bytes=SLOT_BYTES, fingerprint=b"f" * 16
        ),
        0.0,
    )
    manager.handle(
        ev.LowerOpened(
            segment_bytes=4 * SLOT_BYTES,
            segment_count=segment_count,
            row_count_max=8,
            lane_count=1,
            sequence_first=1,
            tier=TierName.REMOTE,
        ),
        0.0,
    )
    return manager


def find(
    manager: BlockManager, letters: str, parent: str = "", epoch: int = EPOCH
) -> list[ins.Instruction]:
    event = ev.BlocksFound(
        NS, epoch, names(letters), name(parent) if parent else None, TierName.REMOTE
    )
    found = manager.handle(event, 1.0)
    assert manager.check_invariants() == []
    return found


def matched(manager: BlockManager, letters: str) -> tuple[int, dict[TierName, int]]:
    found = manager.match_packed(NS, b"".join(names(letters)))
    return found.matched_count, dict(found.tiers)


def offload(manager: BlockManager, letters: str, parent: str = "") -> None:
    reserved: list[ins.Instruction] = manager.handle(
        ev.Reserve(DAEMON_SESSION, NS, len(letters)), 1.0
    )
    [slots] = [one.slots for one in reserved if isinstance(one, ins.SlotsReserved)]
    manager.handle(
        ev.Commit(
            session=DAEMON_SESSION,
            namespace=NS,
            hashes=names(letters),
            slots=slots,
            parent=name(parent) if parent else None,
            epoch=EPOCH,
        ),
        1.0,
    )


def test_found_blocks_are_resident_there_and_are_read_when_they_are_wanted() -> None:
    manager = opened()
    told = find(manager, "abc")
    [stored] = [one for one in told if isinstance(one, ins.BlocksStored)]
    assert (stored.tier, list(stored.hashes)) == (TierName.REMOTE, names("abc"))
    assert matched(manager, "abcd") == (3, {TierName.REMOTE: 3})
    asked = manager.handle(ev.Acquire(DAEMON_SESSION, NS, names("abcd"), 50.0, wait_until=9.0), 2.0)
    [promote] = [one for one in asked if isinstance(one, ins.Promote)]
    assert (promote.tier, list(promote.hashes)) == (TierName.REMOTE, names("abc"))
    ended = manager.handle(
        ev.Promoted(
            NS,
            promote.lower_slots,
            promote.slots,
            np.full(3, ev.TransferOutcome.DONE, np.uint8),
            np.arange(1, 4, dtype=np.uint64),
            TierName.REMOTE,
        ),
        2.5,
    )
    [ready] = [one.granted for one in ended if isinstance(one, ins.LeaseReady)]
    assert (ready.leased_count, ready.tiers) == (3, ((TierName.REMOTE, 3),))
    assert manager.check_invariants() == []


def test_found_blocks_go_behind_what_is_resident_and_fill_what_is_not() -> None:
    manager = opened()
    offload(manager, "ab")
    find(manager, "abcd")
    assert matched(manager, "abcd") == (4, {TierName.DRAM: 2, TierName.REMOTE: 2})
    assert manager.stats().lower[TierName.REMOTE].block_count == 4, "those in memory too"
    find(manager, "ef", parent="d")
    assert matched(manager, "abcdef")[0] == 6


def test_what_was_found_before_is_no_news() -> None:
    manager = opened()
    find(manager, "abc")
    assert not [one for one in find(manager, "abc") if isinstance(one, ins.WriteLowerReady)]
    find(manager, "abcd")
    assert manager.stats().lower[TierName.REMOTE].block_count == 4


@pytest.mark.parametrize(("parent", "epoch"), [("z", EPOCH), ("", EPOCH + 1)])
def test_blocks_without_their_parent_or_of_another_epoch_are_left_out(
    parent: str, epoch: int
) -> None:
    manager = opened()
    assert find(manager, "abc", parent=parent, epoch=epoch) == []
    assert matched(manager, "abc") == (0, {})


def test_more_blocks_than_slots_end_the_chain_and_make_room() -> None:
    manager = opened(segment_count=2)
    find(manager, "abcdefghij")
    assert matched(manager, "abcdefghij")[0] == 8
    for _ in range(20):  # Until the oldest segment has retired.
        manager.handle(ev.SweepVoid(), 60.0)
        manager.handle(ev.Tick(), 60.0)
    assert manager.stats().lower[TierName.REMOTE].free_segment_count >= 1
    assert manager.check_invariants() == []


def test_only_what_was_used_twice_goes_there() -> None:
    manager = opened(replace(CONFIG))
    offload(manager, "ab")
    told: list[ins.Instruction] = []
    told += _summed(manager)
    assert not [one for one in told if isinstance(one, ins.Demote)]
    lease = manager.handle(ev.Acquire(DAEMON_SESSION, NS, names("ab"), 50.0), 2.0)
    told = [*lease, *manager.handle(ev.Tick(), 2.1)]
    [demote] = [one for one in told if isinstance(one, ins.Demote)]
    assert (demote.tier, list(demote.hashes)) == (TierName.REMOTE, names("ab"))


def _summed(manager: BlockManager) -> list[ins.Instruction]:
    slots = np.array([0, 1], np.uint32)
    return manager.handle(ev.ChecksumsComputed(NS, slots, np.array([5, 6], np.uint64)), 1.5)
