"""Blocks that recovery found are taken into the index in slices, while others come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core import lower_tier
from kvtier.core.lower_tier import LowerTier
from kvtier.core.namespace_facts import NamespaceFacts
from kvtier.core.residency import Residency
from kvtier.core.segments import SegmentBook, by_segment
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.policy.lru import LruPolicy
from kvtier.types import BlockHash, NamespaceId, RemovedFor, TierName

NS = NamespaceId(1)
FINGERPRINT = b"f" * 16
EPOCH = 3
SEGMENT_ROWS = 8
SLICE_BLOCKS = 6


@dataclass
class Story:
    """A namespace, blocks that were recovered for it, and what happens between the slices."""

    tier: LowerTier
    residency: Residency
    event: ev.BlocksRecovered
    hashes: list[BlockHash]
    gone_slots: set[int]

    def turn(self) -> bool:
        """One slice; whether there is another one."""
        done = self.tier.on_blocks_recovered(self.event, 0.0)
        for one in done:
            if isinstance(one, ins.WriteLowerGone):
                self.gone_slots.update(one.lower_slots.tolist())
        following = [one.event for one in done if isinstance(one, ins.Continue)]
        if following:
            assert isinstance(following[0], ev.BlocksRecovered)
            self.event = following[0]
        return bool(following)

    def finish(self) -> None:
        while self.turn():
            pass
        self.sweep()

    def commit(self, position: int) -> None:
        """Somebody computes a block that was recovered, which follows what is resident."""
        index = self.residency.index
        block = self.hashes[position]
        parent = int(self.event.parents[position])
        row = None if parent < 0 else index.row_of.get(self.hashes[parent])
        if block not in index.row_of and (parent < 0 or row is not None):
            index.insert_run([block], parent=row, places=np.array([position], np.int32))

    def lose(self, position: int) -> None:
        """The only copy turns out to be corrupt; what depends on the block goes too."""
        index = self.residency.index
        row = index.row_of.get(self.hashes[position])
        if row is not None and index.place[row] < 0:
            slot = int(index.lower[TierName.NVME].slot[row])
            self.gone_slots.add(slot)
            self.tier.lose(self.residency, [slot], RemovedFor.CORRUPT)

    def sweep(self) -> None:
        index = self.residency.index
        while index.sweep_pending:
            rows, _ = index.sweep(2)
            slots = index.lower[TierName.NVME].slot[rows]
            ready = [slot for slot in slots[slots >= 0].tolist() if self.tier.book.is_ready(slot)]
            self.gone_slots.update(ready)
            self.tier.forget_slots(ready)
            index.forget_rows(rows)

    def resident(self) -> dict[BlockHash, tuple[int, int]]:
        index = self.residency.index
        return {
            block: (int(index.place[row]), int(index.lower[TierName.NVME].slot[row]))
            for block, row in index.row_of.entries()
        }

    def check(self) -> None:
        assert self.residency.index.check_invariants() == []
        assert self.tier.check_invariants() == []


def story(parents: list[int]) -> Story:
    """Blocks 0, 1, ... lie in this order in slots 0, 1, ...; `parents` are positions, -1: none."""
    count = len(parents)
    hashes = [BlockHash(b"%032d" % number) for number in range(count)]
    facts = NamespaceFacts(NS, 32, 4096, 1, fingerprint=FINGERPRINT)
    residency = Residency(facts, epoch=EPOCH, set_slot_count=1024, make_policy=LruPolicy)
    tier = LowerTier(TierName.NVME, {NS: residency})
    tier.note_namespace(residency)
    segment_count = -(-count // SEGMENT_ROWS)
    lives = [
        (
            SegmentHeader(number, FINGERPRINT, SlotLayout(4096, 1), SEGMENT_ROWS, 10 + number),
            np.arange(min(SEGMENT_ROWS, count - number * SEGMENT_ROWS)),
        )
        for number in range(segment_count)
    ]
    tier.on_opened(
        ev.LowerOpened(SEGMENT_ROWS * 4096, segment_count, SEGMENT_ROWS, 1, 100, lives), 0.0
    )
    slots = np.arange(count, dtype=np.uint32)
    event = ev.BlocksRecovered(
        namespace=NS,
        epoch=EPOCH,
        packed=b"".join(hashes),
        parents=np.array(parents, dtype=np.int32),
        lower_slots=slots,
        sequences=(slots // SEGMENT_ROWS + 10).astype(np.uint64),
    )
    return Story(tier, residency, event, hashes, set())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_tier, "RECOVERED_SLICE_BLOCKS", SLICE_BLOCKS)


def test_all_of_a_chain_is_taken_in() -> None:
    told = story(list(range(-1, 30)))
    told.finish()
    told.check()
    assert told.resident() == {block: (-1, number) for number, block in enumerate(told.hashes)}
    assert told.gone_slots == set()


def test_a_block_that_was_committed_meanwhile_gets_the_copy() -> None:
    told = story(list(range(-1, 19)))
    told.turn()
    for position in (6, 7, 8):
        told.commit(position)
    told.finish()
    told.check()
    assert told.resident()[told.hashes[7]] == (7, 7)
    assert told.resident()[told.hashes[9]] == (-1, 9)
    assert told.tier.dropped_count == 0


def test_blocks_whose_parent_is_lost_meanwhile_are_dropped() -> None:
    told = story(list(range(-1, 19)))
    told.turn()
    told.lose(3)
    told.finish()
    told.check()
    assert set(told.resident()) == set(told.hashes[:3])
    assert told.gone_slots == set(range(3, 20))


def test_a_slot_that_holds_nothing_any_more_brings_nothing_back() -> None:
    told = story(list(range(-1, 19)))
    told.tier.book.void(np.array([7], np.uint32))
    told.finish()
    told.check()
    assert set(told.resident()) == set(told.hashes[:7])
    assert told.gone_slots == set(range(8, 20))


def test_one_lost_and_one_committed_are_told_apart_from_no_change() -> None:
    """The same number of resident blocks, but one of them is to be recovered yet."""
    told = story([-1] * 20)
    told.turn()
    told.lose(2)
    told.sweep()
    told.commit(15)
    told.finish()
    told.check()
    assert told.resident()[told.hashes[15]] == (15, 15)


def test_what_a_sweep_has_still_to_take_is_told_apart_from_no_change() -> None:
    told = story([-1, 0, 1, *[-1] * 17])
    for position in (0, 1, 2):
        told.commit(position)
    index = told.residency.index
    row = int(index.rows(told.hashes[:1])[0])
    index.leave_memory([row])
    index.doom(row)
    told.residency.void_count += 1
    told.turn()
    index.forget_rows(index.sweep(100)[0])
    told.commit(14)
    told.commit(15)
    told.finish()
    assert told.residency.index.check_invariants() == []
    assert told.resident()[told.hashes[15]] == (15, 15)


@pytest.mark.parametrize("seed", range(60))
def test_whether_blocks_are_there_is_known_without_asking_for_each(seed: int) -> None:
    """The same story twice; once it is said that blocks have gone, so that all are asked for."""
    chance = random.Random(seed)
    parents = [chance.randrange(-1, number) if number else -1 for number in range(60)]
    one, other = story(parents), story(parents)
    other.event = replace(other.event, own_count=None)
    calm = chance.random() < 0.5
    going = True
    while going:
        for _ in range(chance.randrange(3)):
            position, kind = chance.randrange(60), chance.random()
            for told in (one, other):
                if kind < 0.5:
                    told.commit(position)
                elif not calm and kind < 0.7:
                    told.lose(position)
                elif kind < 0.8:
                    told.sweep()
        going = one.turn()
        assert other.turn() == going
        assert one.resident() == other.resident()
    for told in (one, other):
        told.sweep()
        told.check()
    assert one.resident() == other.resident()
    assert one.gone_slots == other.gone_slots


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_ready_in_the_life_they_were_recovered_in(seed: int) -> None:
    chance = random.Random(seed)
    told = story([-1] * 60)
    book: SegmentBook = told.tier.book
    gone = chance.sample(range(60), 25)
    book.void(np.array(gone, np.uint32))
    slots = np.array(chance.sample(range(60), 40), np.uint32)
    sequences = (slots // SEGMENT_ROWS + 10).astype(np.uint64)
    other_life = np.array([chance.random() < 0.2 for _ in slots])
    found = book.are_ready(slots, sequences + other_life, by_segment(slots, book.row_count_max))
    expected = [slot not in gone for slot in slots.tolist()]
    assert found.tolist() == (np.array(expected) & ~other_life).tolist()
