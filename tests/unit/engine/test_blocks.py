"""The device block pool against the simplest thing that could be right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvtier.engine.blocks import DeviceBlockPool, OutOfBlocks
from kvtier.engine.prefix_index import Prefix
from kvtier.types import BlockHash

HASHES = [BlockHash(bytes([index]) * 32) for index in range(6)]


def publish(pool: DeviceBlockPool, device_block: int, block_hash: BlockHash) -> None:
    pool.publish(device_block, Prefix((), [block_hash]), 0)


def match(pool: DeviceBlockPool, hashes: list[BlockHash]) -> list[int]:
    return pool.index.match(Prefix((), hashes))


def test_tail_of_a_prefix_is_taken_before_its_head() -> None:
    pool = DeviceBlockPool(3)
    blocks = pool.take(3)
    for block, block_hash in zip(blocks, HASHES, strict=False):
        publish(pool, block, block_hash)
    pool.release(blocks)
    assert pool.take(1) == [blocks[2]]
    assert match(pool, HASHES[:3]) == blocks[:2]


def test_blocks_without_a_hash_are_taken_first() -> None:
    pool = DeviceBlockPool(2)
    cached, plain = pool.take(2)
    publish(pool, cached, HASHES[0])
    pool.release([cached])
    pool.release([plain])
    assert pool.take(1) == [plain]


def test_prefix_released_longest_ago_is_taken_first() -> None:
    pool = DeviceBlockPool(3)
    blocks = pool.take(3)
    for block, block_hash in zip(blocks, HASHES, strict=False):
        publish(pool, block, block_hash)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release([block])
    pool.hold([blocks[1]])  # Used again: now the youngest.
    pool.release([blocks[1]])
    assert pool.take(3) == [blocks[0], blocks[2], blocks[1]]


def test_match_ends_at_the_first_gap_and_holds_nothing() -> None:
    pool = DeviceBlockPool(3)
    first, third = pool.take(2)
    publish(pool, first, HASHES[0])
    publish(pool, third, HASHES[2])
    pool.release([first, third])
    assert match(pool, HASHES[:3]) == [first]
    assert pool.free_count == 3


def test_first_home_of_a_hash_stays_its_home() -> None:
    pool = DeviceBlockPool(2)
    first, second = pool.take(2)
    publish(pool, first, HASHES[0])
    publish(pool, second, HASHES[0])
    assert match(pool, HASHES[:1]) == [first]
    assert not pool.is_published(second)


def test_too_many_blocks_changes_nothing() -> None:
    pool = DeviceBlockPool(2)
    held = pool.take(1)
    publish(pool, held[0], HASHES[0])
    with pytest.raises(OutOfBlocks, match="want 2 device blocks, 1 free"):
        pool.take(2)
    assert (pool.free_count, match(pool, HASHES[:1])) == (1, held)


class DeviceBlockPoolMachine(RuleBasedStateMachine):
    """Hold counts as a list, what a hash may lead to as a dict that only ever loses blocks."""

    held = Bundle("held")

    @initialize(block_count=st.integers(1, 6))
    def start(self, block_count: int) -> None:
        self.pool = DeviceBlockPool(block_count)
        self.holds = [0] * block_count
        self.home: dict[BlockHash, int] = {}

    @rule(target=held, count=st.integers(0, 7))
    def take(self, count: int) -> object:
        free = self.holds.count(0)
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.take(count)
            return multiple()
        uncached = [b for b, n in enumerate(self.holds) if n == 0 and b not in self.home.values()]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert all(self.holds[block] == 0 for block in taken), "a held block was given out"
        if len(uncached) >= count:
            assert set(taken) <= set(uncached), "a cached block was given out before need"
        for block in taken:
            self.holds[block] = 1
        self.home = {h: block for h, block in self.home.items() if block not in taken}
        return multiple(*taken)

    @rule(target=held, count=st.integers(1, 6))
    def hold_matched(self, count: int) -> object:
        matched = match(self.pool, HASHES[:count])
        expected = []
        for block_hash in HASHES[:count]:
            if block_hash not in self.home:
                break
            expected.append(self.home[block_hash])
        assert matched == expected
        self.pool.hold(matched)
        for block in matched:
            self.holds[block] += 1
        return multiple(*matched)

    @rule(block=held, block_hash=st.sampled_from(HASHES))
    def publish(self, block: int, block_hash: BlockHash) -> None:
        if self.holds[block] == 0 or block in self.home.values():
            return  # The scheduler publishes a block once, while it holds it.
        publish(self.pool, block, block_hash)
        self.home.setdefault(block_hash, block)

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        self.pool.release([block])
        self.holds[block] -= 1

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.home.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.check_invariants() == []
        assert self.pool.free_count == self.holds.count(0)
        assert self.pool.cached_count == len(self.home)


DeviceBlockPoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestDeviceBlockPool = pytest.mark.slow(DeviceBlockPoolMachine.TestCase)
