"""What the NVMe tier may cost the event loop: no event takes longer than a slice, however small the
blocks and however many wait. Processor time of this thread, with room for a slow machine."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.policy.lru import LruPolicy
from kvtier.types import (
    EngineId,
    LeaseId,
    NamespaceId,
    PackedHashes,
    Role,
    SessionId,
    SlabId,
    TierName,
)
from tests.support.forms import is_torture

NS, MINE = NamespaceId(1), SessionId(1)
BLOCK_BYTES = 4096  # So small that everything is about counts.
CHAIN_BLOCKS = 4096
CHAINS = 8
MEMORY_BLOCKS = 2 * CHAIN_BLOCKS + CHAIN_BLOCKS // 4
SEGMENT_BLOCKS = 4096
SEGMENTS = 5  # Fewer than there are chains: they are reused.
# Processor time, but of a core that `make test` shares between two runs: its caches are not ours.
SLICE_SECONDS_MAX = 0.005 if is_torture() else 0.010
SETTINGS = LowerSettings(write_bytes_per_hour=1e12)


@dataclass
class Shell:
    """Answers transfers at once, one event after the other."""

    manager: BlockManager
    seconds: dict[str, list[float]] = field(default_factory=dict)
    events: deque[ev.Event] = field(default_factory=deque)
    largest_moves: dict[type, int] = field(default_factory=dict)
    now: float = 0.0

    def run(self, event: ev.Event) -> list[ins.Instruction]:
        """All slices, and all that follows from them; the replies."""
        self.events.append(event)
        replies: list[ins.Instruction] = []
        while self.events:
            one = self.events.popleft()
            start = time.thread_time()
            done = self.manager.handle(one, self.now)
            seconds = time.thread_time() - start
            self.seconds.setdefault(type(one).__name__, []).append(seconds)
            moved = dict.fromkeys((ins.Demote, ins.Promote), 0)
            for two in done:
                if isinstance(two, ins.Continue):
                    self.events.append(two.event)
                elif isinstance(two, ins.Demote | ins.Promote):
                    moved[type(two)] += len(two.slots)
                    self.events.append(self.answer(two))
                elif isinstance(two, ins.Reply | ins.LeaseReady):
                    replies.append(two)
            for kind, count in moved.items():
                self.largest_moves[kind] = max(self.largest_moves.get(kind, 0), count)
        return replies

    def answer(self, asked: ins.Demote | ins.Promote) -> ev.Event:
        count = len(asked.slots)
        kind = ev.Demoted if isinstance(asked, ins.Demote) else ev.Promoted
        return kind(
            namespace=asked.namespace,
            slots=asked.slots,
            lower_slots=asked.lower_slots,
            outcomes=np.zeros(count, dtype=np.uint8),
            checksums=np.ones(count, dtype=np.uint64),
        )

    def commit(self, packed: bytes) -> None:
        [reserved] = self.run(ev.Reserve(MINE, NS, CHAIN_BLOCKS))
        assert isinstance(reserved, ins.SlotsReserved)
        checksums = np.ones(CHAIN_BLOCKS, dtype=np.uint64)
        hashes = PackedHashes(packed, 32)
        self.run(ev.Commit(MINE, NS, hashes, reserved.slots, None, 1, checksums=checksums))

    def onboard(self, packed: bytes) -> int:
        hashes = PackedHashes(packed, 32)
        replies = self.run(ev.Acquire(MINE, NS, hashes, self.now + 10, wait_until=self.now + 5))
        granted = [
            one.granted if isinstance(one, ins.LeaseReady) else one
            for one in replies
            if isinstance(one, ins.LeaseReady | ins.LeaseGranted)
        ]
        assert len(granted) == 1, "a lease was not answered"
        assert isinstance(granted[0], ins.LeaseGranted)
        if granted[0].lease is not None:
            self.run(ev.Release(MINE, (LeaseId(granted[0].lease),)))
        return granted[0].leased_count

    def slow(self) -> dict[str, list[float]]:
        """By event: what took longer than a slice and four times as long as usual, but for the
        worst one; the machine may have had something else to do once, and be slow altogether."""
        found = {}
        for name, all_seconds in self.seconds.items():
            ordered = sorted(all_seconds)
            limit = max(SLICE_SECONDS_MAX, 4 * ordered[len(ordered) // 2])
            if long := [one for one in ordered[:-1] if one > limit]:
                found[name] = long
        return found


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    gc.collect()
    gc.freeze()
    yield loaded()
    gc.unfreeze()


def loaded() -> Shell:
    """Every chain was offloaded and has gone down; segments have been reused."""
    config = ManagerConfig(
        slab_bytes=BLOCK_BYTES * MEMORY_BLOCKS,
        slab_count_max=1,
        stock_divisor=1,
        lower={TierName.NVME: SETTINGS},
    )
    shell = Shell(BlockManager(config, make_policy=LruPolicy))
    for event in (
        ev.SlabPopulated(SlabId(1)),
        ev.NamespaceOpened(
            NS, 1, 32, BLOCK_BYTES, 1, shard_bytes=BLOCK_BYTES, fingerprint=b"f" * 16
        ),
        ev.SessionOpened(MINE, EngineId(b"e" * 16), Role.BOTH, (0,)),
        ev.NamespaceJoined(MINE, NS),
        ev.SlabMapped(MINE, SlabId(1)),
        ev.LowerOpened(SEGMENT_BLOCKS * BLOCK_BYTES, SEGMENTS, SEGMENT_BLOCKS, 1, 1),
    ):
        shell.run(event)
    chance = random.Random(3)
    chains = [chance.randbytes(32 * CHAIN_BLOCKS) for _ in range(CHAINS)]
    for packed in chains:
        shell.now += 1.0
        shell.commit(packed)
        shell.run(ev.Tick())
        shell.run(ev.Tick())
    for packed in chains[-3:]:
        shell.now += 1.0
        assert shell.onboard(packed) == CHAIN_BLOCKS
    shell.run(ev.HintPaused(NS, PackedHashes(chains[-1], 32)))
    shell.run(ev.Prefetch(NS, PackedHashes(chains[-2], 32)))
    return shell


@pytest.mark.full_form
@pytest.mark.slow
def test_no_event_holds_the_loop_for_longer_than_a_slice(shell: Shell) -> None:
    assert not shell.slow()


@pytest.mark.slow
def test_no_event_begins_to_move_more_blocks_than_the_limit(shell: Shell) -> None:
    limit = SETTINGS.transfer_blocks_max + SETTINGS.batch_blocks
    assert 0 < shell.largest_moves[ins.Demote] <= limit
    assert 0 < shell.largest_moves[ins.Promote] <= limit


@pytest.mark.slow
def test_all_of_it_was_for_something(shell: Shell) -> None:
    counts = shell.manager.stats().nvme
    assert counts is not None
    assert counts.reused_segment_count > 0
    assert counts.block_count > 3 * CHAIN_BLOCKS
    assert shell.manager.check_invariants() == []
