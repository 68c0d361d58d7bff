"""Blocks over a remote engine that may do anything: the right bytes, or a miss with its reason."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvtier.codec.codecs import CodecId
from kvtier.memory import Bytes
from kvtier.policy.codec_choice import CodecChoice
from kvtier.pools.remote.blocks import FixedCodec
from kvtier.pools.remote.breaker import BreakerState
from kvtier.pools.remote.engine import Pace, RemoteKey, RemoteOutcome, Reply, Value
from kvtier.pools.remote.frame import HEADER_BYTES, FrameFault
from kvtier.pools.remote.framing import BlockViews
from tests.support.clock import ManualClock
from tests.support.fake_remote import PACE, FakeRemote, Shelf
from tests.support.remote_rig import EPOCH, RemoteRig, hash_of

DONE, ABSENT = RemoteOutcome.DONE, RemoteOutcome.ABSENT
COPIED = Pace(call_bytes=8 << 20, calls_at_once=2)  # Not sent from the blocks' own memory.


def play(
    work: Callable[[RemoteRig, Shelf], Awaitable[None]], pace: Pace = PACE, **more: object
) -> None:
    async def main() -> None:
        shelf = Shelf()
        rig = RemoteRig(FakeRemote(shelf, pace=pace), **more)  # type: ignore[arg-type]
        try:
            await work(rig, shelf)
        finally:
            await rig.close()

    asyncio.run(main())


@pytest.mark.parametrize("codec", CodecId)
@pytest.mark.parametrize("shard_count", [1, 4])
def test_blocks_come_back_as_they_went(codec: CodecId, shard_count: int) -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        numbers = list(range(7))
        assert await rig.put(numbers) == [DONE] * 7
        assert await rig.get([*numbers, 99]) == [DONE] * 7 + [ABSENT]
        assert rig.blocks.gets == {"done": 7, "absent": 1}
        if codec is CodecId.PLANES_ZSTD:
            assert shelf.used_bytes < 0.8 * 7 * rig.payload_bytes

    for pace in (PACE, COPIED):
        play(work, pace, codec=codec, shard_count=shard_count)


@pytest.mark.parametrize(("pace", "put_count"), [(COPIED, 2), (PACE, 1)])
def test_large_batches_go_in_groups_and_keep_their_order(pace: Pace, put_count: int) -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        numbers = list(range(20))
        assert await rig.put([*numbers[:10], *numbers[15:]]) == [DONE] * 15
        wanted = [ABSENT if 10 <= number < 15 else DONE for number in numbers]
        assert await rig.get(numbers) == wanted
        assert shelf.call_count == put_count + 3, "8 MiB each, but what is sent from where it is"

    play(work, pace, payload_bytes=1 << 20)


class PacedRemote(FakeRemote):
    """Tells what its calls carry, and how many there are at once."""

    def __init__(self, shelf: Shelf, pace: Pace) -> None:
        super().__init__(shelf, pace=pace)
        self.call_counts: list[int] = []  # Values of each call.
        self.at_once, self.most_at_once = 0, 0

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        with self._counted(len(values)):
            return await super().put(values, timeout_seconds=timeout_seconds)

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        with self._counted(len(keys)):
            return await super().get(
                keys, value_bytes_max=value_bytes_max, timeout_seconds=timeout_seconds
            )

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        self.call_counts.append(count)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            self.at_once -= 1


@pytest.mark.parametrize(
    ("codec", "call_counts"),
    [(CodecId.NONE, [6, 4]), (CodecId.PLANES_LZ4, [4, 4, 2])],
    ids=["plain: as the engine likes it", "coded: 8 MiB"],
)
def test_calls_carry_as_much_as_is_of_use_and_no_more_are_made_at_once(
    codec: CodecId, call_counts: list[int]
) -> None:
    async def main() -> None:
        engine = PacedRemote(Shelf(delay_seconds=0.001), Pace(12 << 20, calls_at_once=2))
        rig = RemoteRig(engine, codec=codec, payload_bytes=2 << 20)
        assert set(await rig.put(range(10))) == {DONE}
        assert engine.call_counts == call_counts
        assert engine.most_at_once <= 2
        assert set(await rig.get([1, 2])) == {DONE}
        engine.call_counts.clear()
        assert set(await rig.get(range(10), timeout_seconds=30.0)) == {DONE}
        assert engine.most_at_once == 2
        assert engine.call_counts == call_counts, "by the codec of what came last"
        await rig.close()

    asyncio.run(main())


class LinkTimes(FixedCodec):
    """Adds up what is said of the link."""

    def __init__(self) -> None:
        super().__init__(CodecId.NONE)
        self.sent_seconds, self.received_seconds = 0.0, 0.0

    def note_sent(self, *, sent_bytes: int, seconds: float) -> None:
        self.sent_seconds += seconds

    def note_received(self, *, received_bytes: int, seconds: float) -> None:
        self.received_seconds += seconds


def test_calls_at_once_share_the_time_on_the_link() -> None:
    async def main() -> None:
        shelf, times = Shelf(byte_seconds=1 / 50e6), LinkTimes()
        engine = PacedRemote(shelf, Pace(1 << 20, calls_at_once=2))
        rig = RemoteRig(engine, payload_bytes=1 << 20, chooser=times)
        blocks = [rig.views_of(number) for number in range(6)]
        places = [BlockViews(one.block, list(map(np.empty_like, one.shards))) for one in blocks]
        began = time.monotonic()
        assert set(await rig.blocks.put(blocks, timeout_seconds=10.0)) == {DONE}
        middle = time.monotonic()
        assert set((await rig.blocks.get(places, timeout_seconds=10.0)).endings) == {DONE}
        ended = time.monotonic()
        least = 6 * (1 << 20) / 50e6
        assert least <= times.sent_seconds <= middle - began
        assert least <= times.received_seconds <= ended - middle
        await rig.close()

    asyncio.run(main())


def test_what_a_daemon_put_another_one_gets_whatever_codec_it_uses() -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1, 2])
        other = RemoteRig(FakeRemote(shelf), codec=CodecId.NONE)
        assert await other.get([1, 2]) == [DONE, DONE]
        await other.close()

    play(work, codec=CodecId.PLANES_ZSTD)


def flipped(place: int) -> Callable[[RemoteRig, Shelf], None]:
    def spoil(rig: RemoteRig, shelf: Shelf) -> None:
        value = bytearray(shelf.values[rig.key_of(1)])
        value[place] ^= 1
        shelf.values[rig.key_of(1)] = bytes(value)

    return spoil


def of_another_key(rig: RemoteRig, shelf: Shelf) -> None:
    shelf.values[rig.key_of(1)] = shelf.values[rig.key_of(2)]


def cut_short(rig: RemoteRig, shelf: Shelf) -> None:
    shelf.values[rig.key_of(1)] = shelf.values[rig.key_of(1)][:-1]


def foreign(rig: RemoteRig, shelf: Shelf) -> None:
    shelf.values[rig.key_of(1)] = b"another user's value" * 100


def of_another_epoch(rig: RemoteRig, shelf: Shelf) -> None:
    """As if an old value lay under a new key."""
    other = bytearray(shelf.values[rig.key_of(1)])
    struct.pack_into("<I", other, 24, EPOCH - 1)
    struct.pack_into("<I", other, 124, zlib.crc32(other[:124]))
    shelf.values[rig.key_of(1)] = bytes(other)


@pytest.mark.parametrize("codec", CodecId)
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (flipped(HEADER_BYTES + 5000), FrameFault.TORN),
        (flipped(60), FrameFault.TORN_HEADER),
        (of_another_key, FrameFault.HASH),
        (cut_short, FrameFault.LENGTH),
        (foreign, FrameFault.MAGIC),
        (of_another_epoch, FrameFault.EPOCH),
    ],
)
def test_a_lying_engine_is_a_miss_with_its_reason(
    codec: CodecId, spoil: Callable[[RemoteRig, Shelf], None], fault: FrameFault
) -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1, 2, 3])
        spoil(rig, shelf)
        assert await rig.get([1, 2, 3]) == [fault, DONE, DONE]
        assert rig.blocks.gets == {fault.value: 1, "done": 2}

    play(work, codec=codec)


def test_an_engine_that_lies_again_and_again_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1, 2])
        of_another_key(rig, shelf)
        for _ in range(3):
            await rig.get([1])
        assert rig.breaking.reading_state is BreakerState.OPEN
        assert await rig.get([2]) == [RemoteOutcome.OFF]
        assert await rig.put([3]) == [DONE], "writing goes on"

    with caplog.at_level(logging.INFO):
        play(work)
    lines = [record for record in caplog.records if "breaker" in record.message]
    assert len(lines) == 1
    assert (lines[0].__dict__["after"], lines[0].__dict__["reason"]) == ("open", "hash")


def test_a_block_scribbled_over_since_its_checksum_is_not_put() -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        good, bad = rig.views_of(1), rig.views_of(2)
        bad.shards[1][7] ^= 1
        endings = await rig.blocks.put([good, bad], timeout_seconds=5.0)
        assert endings == [DONE, FrameFault.CHECKSUM]
        assert list(shelf.values) == [rig.key_of(1)]

    play(work)
    play(work, COPIED)
    play(work, codec=CodecId.PLANES_LZ4)


def test_a_block_is_sent_from_its_own_memory_where_that_is_safe() -> None:
    async def main() -> None:
        for pace, is_own in ((PACE, True), (COPIED, False)):
            engine = PartsRemote(Shelf(), pace=pace)
            rig = RemoteRig(engine)
            block = rig.views_of(1)
            assert await rig.blocks.put([block], timeout_seconds=5.0) == [DONE]
            sent = [any(np.shares_memory(p, shard) for p in engine.parts) for shard in block.shards]
            assert sent == [is_own] * 2
            await rig.close()

    asyncio.run(main())


class PartsRemote(FakeRemote):
    """Remembers what it was given."""

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        outcomes = await super().put(values, timeout_seconds=timeout_seconds)
        self.parts = [part for _, value in values for part in value]
        return outcomes


def test_without_an_epoch_the_tier_is_off_and_the_engine_is_not_asked() -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1])
        calls, rig.epochs.epoch = shelf.call_count, None
        assert await rig.put([2]) == await rig.get([1]) == [RemoteOutcome.OFF]
        assert await rig.blocks.exists([hash_of(1)], timeout_seconds=1.0) == [RemoteOutcome.OFF]
        assert shelf.call_count == calls

    play(work)


@pytest.mark.parametrize("epoch", [None, EPOCH + 1])
def test_a_block_that_arrives_after_a_clear_is_a_miss(epoch: int | None) -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1])
        shelf.delay_seconds = 0.05
        getting = asyncio.ensure_future(rig.get([1, 2]))
        await asyncio.sleep(0.01)
        rig.epochs.epoch = epoch
        assert await getting == [FrameFault.EPOCH, ABSENT]

    play(work)


def test_a_slow_engine_costs_no_more_than_the_deadline() -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1, 2, 3])
        shelf.slow_keys.add(rig.key_of(2))
        began = time.monotonic()
        endings = await rig.get([1, 2, 3], timeout_seconds=0.1)
        assert time.monotonic() - began < 1.0
        assert endings[:2] == [DONE, RemoteOutcome.TIMED_OUT]

    play(work)


def test_a_full_engine_goes_on_serving_what_it_has() -> None:
    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1])
        shelf.capacity_bytes = shelf.used_bytes
        for number in (2, 3, 4, 5):
            await rig.put([number])
        assert rig.breaking.writing_state is BreakerState.OPEN
        assert rig.blocks.puts == {"done": 1, "full": 3, "off": 1}
        assert await rig.get([1]) == [DONE]

    play(work)


@pytest.mark.parametrize("leaves", [True, False])
def test_what_was_not_taken_has_its_buffer_used_again_where_nobody_reads_it(leaves: bool) -> None:
    async def main() -> None:
        shelf, pace = Shelf(), Pace(1 << 20, leaves_what_failed=leaves)
        rig = RemoteRig(
            FakeRemote(shelf, pace=pace), payload_bytes=200_000
        )  # Small ones are not kept.
        shelf.capacity_bytes = 0
        assert await rig.put([1]) == [RemoteOutcome.FULL]
        assert bool(rig.buffers.kept_bytes) == leaves
        shelf.slow_keys.add(rig.key_of(2))
        shelf.capacity_bytes = 1 << 40
        kept_bytes = rig.buffers.kept_bytes
        assert await rig.put([2], timeout_seconds=0.1) == [RemoteOutcome.TIMED_OUT]
        assert rig.buffers.kept_bytes < max(kept_bytes, 1)
        await rig.close()

    asyncio.run(main())


def test_an_engine_that_comes_back_is_used_again() -> None:
    clock = ManualClock()

    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put([1])
        shelf.trouble = RemoteOutcome.UNREACHABLE
        for _ in range(5):
            await rig.get([1])
        assert rig.blocks.gets == {"unreachable": 3, "off": 2}
        shelf.trouble = None
        assert await rig.get([1]) == [RemoteOutcome.OFF], "not before its time"
        clock.advance(1.0)
        assert await rig.get([1]) == [DONE]
        assert rig.breaking.reading_state is BreakerState.CLOSED

    play(work, clock=clock)


@pytest.mark.slow
def test_a_caller_that_is_cancelled_gets_its_views_back_untouched_from_then_on() -> None:
    """Threads that decode cannot be cancelled, whenever it happens."""

    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        await rig.put(range(4))
        cancelled_count = 0
        for moment in range(16):
            # Now and then one group is under way while another is decoded.
            shelf.delay_seconds = 0.005 * (moment % 2)
            place = np.zeros((4, rig.payload_bytes), np.uint8)
            blocks = [BlockViews(hash_of(n), shards_of(place[n])) for n in range(4)]
            getting = asyncio.ensure_future(rig.blocks.get(blocks, timeout_seconds=5.0))
            await asyncio.sleep(0.001 * moment)
            if not getting.cancel():  # A busy machine woke us when it was over.
                continue
            cancelled_count += 1
            with pytest.raises(asyncio.CancelledError):
                await getting
            before = place.copy()
            await asyncio.sleep(0.04)
            assert np.array_equal(place, before)
        assert cancelled_count >= 4

    play(work, codec=CodecId.PLANES_ZSTD, payload_bytes=4 << 20)


def shards_of(place: Bytes) -> list[Bytes]:
    return list(place.reshape(2, -1))


def test_the_choice_is_fed_by_what_happens_and_obeyed() -> None:
    choice = CodecChoice([int(codec) for codec in CodecId])

    async def work(rig: RemoteRig, shelf: Shelf) -> None:
        shelf.byte_seconds = 1 / 5e6  # 0.005 GB/s
        for _ in range(4):
            assert set(await rig.put(range(6), timeout_seconds=30.0)) == {DONE}
        assert choice.chosen == CodecId.PLANES_ZSTD
        assert rig.blocks.codecs["planes_zstd"] > 0
        assert set(await rig.get(range(6), timeout_seconds=30.0)) == {DONE}

    play(work, chooser=choice, payload_bytes=200_000)
