"""Blocks of one namespace in a remote engine: framed, encoded, compared, counted.

This is what the daemon uses. A block goes out as a copy that is ours, so that a call that hangs
reads no slot; or from its slot, summed, where the engine has ended reading when its call returns.
It comes in through the frame's comparisons, the codec and the checksum of its payload. What differs
anywhere is a miss with its reason, counted; the destination then holds rubbish, and must not be
committed.

Batches go in groups, as large as the engine likes them (`Pace`), or of 8 MiB where a codec works:
while one is on the link the next is encoded, or the last is decoded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvtier.clock import Clock
from kvtier.codec.codecs import CodecId
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.pools.remote.breaking import BreakingEngine
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.calls import finished
from kvtier.pools.remote.engine import RemoteOutcome, Value
from kvtier.pools.remote.frame import (
    HEADER_BYTES,
    KEY_FAULTS,
    BlockShape,
    FrameFault,
    FrameHeader,
)
from kvtier.pools.remote.framing import (
    BlockViews,
    InPlace,
    bytes_of,
    framed,
    np_empty,
    sealed,
    unframed,
    unsealed,
)
from kvtier.pools.remote.keys import block_key
from kvtier.pools.remote.sealed_header import SEAL_BYTES
from kvtier.types import BlockHash

if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.remote.sealing import ValueSealer

# A codec may take as long as the link: what nothing hides, the first or the last group, is small.
CODED_GROUP_BYTES = 8 << 20
# No encoding is longer than the payload by more than this.
ENCODED_SLACK_BYTES = 4096
_HEADERS_BYTES = HEADER_BYTES + SEAL_BYTES

Ending = RemoteOutcome | FrameFault
"""DONE, or why not."""

T = TypeVar("T")


class EpochSource(Protocol):
    def current_epoch(self) -> int | None:
        """None: the tier is off for the namespace."""
        ...


class CodecChooser(Protocol):
    """`policy.codec_choice.CodecChoice`, or a fixed one."""

    def choose(self, payload_bytes: int) -> int: ...

    def take_trial(self) -> int | None: ...

    def note_encoded(
        self, codec: int, *, payload_bytes: int, encoded_bytes: int, seconds: float
    ) -> None: ...

    def note_decoded(self, codec: int, *, payload_bytes: int, seconds: float) -> None: ...

    def note_sent(self, *, sent_bytes: int, seconds: float) -> None: ...

    def note_received(self, *, received_bytes: int, seconds: float) -> None: ...


class FixedCodec:
    """A codec that the configuration names."""

    def __init__(self, codec: CodecId) -> None:
        self._codec = codec

    def choose(self, payload_bytes: int) -> int:
        return self._codec

    def take_trial(self) -> int | None:
        return None

    def note_encoded(
        self, codec: int, *, payload_bytes: int, encoded_bytes: int, seconds: float
    ) -> None: ...

    def note_decoded(self, codec: int, *, payload_bytes: int, seconds: float) -> None: ...

    def note_sent(self, *, sent_bytes: int, seconds: float) -> None: ...

    def note_received(self, *, received_bytes: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteLayout:
    """What the namespace says of its blocks. `width`: bytes of one element of the KV's dtype.
    `sealer`: what its values are encrypted with; None: nothing."""

    fingerprint: bytes
    shard_count: int
    payload_bytes: int
    width: int
    sealer: ValueSealer | None = None


@dataclass(frozen=True, slots=True)
class Got:
    """One of each a block. `checksums` of the payloads as they have arrived; 0 of one not DONE."""

    endings: list[Ending]
    checksums: list[int]


class RemoteBlocks:
    """All methods belong to one event loop; long work goes to the threads."""

    def __init__(
        self,
        engine: BreakingEngine,
        layout: RemoteLayout,
        epochs: EpochSource,
        *,
        chooser: CodecChooser,
        threads: IoThreads,
        clock: Clock,
        buffers: Buffers | None = None,
    ) -> None:
        """`buffers`: those that the engine takes its values from, to be given back there."""
        self._engine = engine
        self._layout = layout
        self._epochs = epochs
        self._chooser = chooser
        self._threads = threads
        self._clock = clock
        self._buffers = buffers or Buffers()
        self._pace = engine.pace
        self._codec_got = CodecId.NONE  # Of the values that came last.
        # When a call ended last, each way: several at once share the link.
        self._sent_at, self._received_at = 0.0, 0.0
        self.puts: Counter[str] = Counter()  # By how they ended.
        self.gets: Counter[str] = Counter()
        self.codecs: Counter[str] = Counter()  # Blocks put, by codec.
        self.payload_bytes, self.encoded_bytes = 0, 0  # Put.

    async def put(self, blocks: Sequence[BlockViews], *, timeout_seconds: float) -> list[Ending]:
        """Copy these blocks out. The views are read until this returns, and no longer."""
        endings = await self._put(blocks, timeout_seconds)
        self.puts.update(ending.value for ending in endings)
        return endings

    async def get(self, blocks: Sequence[BlockViews], *, timeout_seconds: float) -> Got:
        """Fill the views; those of a block that did not end DONE hold rubbish. They are written to
        until this returns, and no longer."""
        found = await self._get(blocks, timeout_seconds)
        endings: list[Ending] = [
            RemoteOutcome.DONE if isinstance(one, FrameHeader) else one for one in found
        ]
        self.gets.update(ending.value for ending in endings)
        checksums = [one.checksum if isinstance(one, FrameHeader) else 0 for one in found]
        return Got(endings, checksums)

    async def exists(
        self, blocks: Sequence[BlockHash], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """Whether there is a value under each block's key; only `get` tells what it is."""
        shape = self._shape()
        if shape is None:
            return [RemoteOutcome.OFF] * len(blocks)
        keys = [block_key(shape.fingerprint, shape.epoch, block) for block in blocks]
        return await self._engine.exists(keys, timeout_seconds=timeout_seconds)

    async def delete(
        self, blocks: Sequence[BlockHash], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """Forget these for all nodes: a block that was found corrupt."""
        shape = self._shape()
        if shape is None:
            return [RemoteOutcome.OFF] * len(blocks)
        keys = [block_key(shape.fingerprint, shape.epoch, block) for block in blocks]
        return await self._engine.delete(keys, timeout_seconds=timeout_seconds)

    async def _put(self, blocks: Sequence[BlockViews], timeout_seconds: float) -> list[Ending]:
        shape = self._shape()
        if shape is None:
            return [RemoteOutcome.OFF] * len(blocks)
        deadline = self._clock.now() + timeout_seconds
        codec = CodecId(self._chooser.choose(len(blocks) * shape.payload_bytes))
        if codec is CodecId.NONE and self._pace.reads_in_place and self._layout.sealer is None:
            return await self._put_in_place(blocks, shape, deadline)
        # One group after the other: what a codec takes is measured.
        encoding, link = asyncio.Lock(), asyncio.Semaphore(self._pace.calls_at_once)

        async def put(group: Sequence[BlockViews]) -> list[Ending]:
            async with encoding:
                await self._run_trial(group, shape)
                frames = await self._encode_group(group, shape, codec)
            async with link:
                return await self._send(group, frames, shape, deadline)

        return _flattened(await self._overlapped(put, blocks, codec))

    async def _put_in_place(
        self, blocks: Sequence[BlockViews], shape: BlockShape, deadline: float
    ) -> list[Ending]:
        """In one call: no buffers are taken, and whoever sends a block sums it."""
        await self._run_trial(blocks[: max(1, CODED_GROUP_BYTES // shape.payload_bytes)], shape)
        values = [InPlace(one, shape) for one in blocks]
        self._note_encoded(CodecId.NONE, shape, values, seconds=0.0)
        return await self._send(blocks, values, shape, deadline)

    async def _get(
        self, blocks: Sequence[BlockViews], timeout_seconds: float
    ) -> list[FrameHeader | Ending]:
        shape = self._shape()
        if shape is None:
            return [RemoteOutcome.OFF] * len(blocks)
        deadline = self._clock.now() + timeout_seconds
        decoding, link = asyncio.Lock(), asyncio.Semaphore(self._pace.calls_at_once)

        async def get(group: Sequence[BlockViews]) -> list[FrameHeader | Ending]:
            async with link:
                values = await self._receive(group, shape, deadline)
            async with decoding:
                return await self._decode_group(group, values, shape)

        found = _flattened(await self._overlapped(get, blocks, self._codec_got))
        if self._epochs.current_epoch() != shape.epoch:
            # Cleared meanwhile, or nobody can tell: law 1.
            return [FrameFault.EPOCH if isinstance(one, FrameHeader) else one for one in found]
        return found

    async def _overlapped(
        self,
        work: Callable[[Sequence[BlockViews]], Awaitable[T]],
        blocks: Sequence[BlockViews],
        codec: CodecId,
    ) -> list[T]:
        """What the work gives for each group. As many are begun as can be on the link, and one."""
        places = asyncio.Semaphore(self._pace.calls_at_once + 1)

        async def run(group: Sequence[BlockViews]) -> T:
            async with places:
                return await work(group)

        group_bytes = self._pace.call_bytes
        if codec is not CodecId.NONE:
            group_bytes = min(group_bytes, CODED_GROUP_BYTES)
        size = max(1, group_bytes // self._layout.payload_bytes)
        starts = range(0, len(blocks), size)
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(run(blocks[start : start + size])) for start in starts]
        return [done.result() for done in runs]

    async def _encode_group(
        self, group: Sequence[BlockViews], shape: BlockShape, codec: CodecId
    ) -> list[Value | FrameFault]:
        began = self._clock.now()
        frames = await self._in_threads([self._framing(one, shape, codec) for one in group])
        self._note_encoded(codec, shape, frames, seconds=self._clock.now() - began)
        return frames

    def _note_encoded(
        self,
        codec: CodecId,
        shape: BlockShape,
        frames: Sequence[Value | FrameFault],
        *,
        seconds: float,
    ) -> None:
        encoded = sum(bytes_of(frame) for frame in frames if not isinstance(frame, FrameFault))
        payload = len(frames) * shape.payload_bytes
        self._chooser.note_encoded(
            codec, payload_bytes=payload, encoded_bytes=encoded, seconds=seconds
        )
        self.codecs[codec.name.lower()] += len(frames)
        self.payload_bytes += payload
        self.encoded_bytes += encoded

    def _framing(
        self, one: BlockViews, shape: BlockShape, codec: CodecId
    ) -> Callable[[], Value | FrameFault]:
        take, sealer = self._buffers.take, self._layout.sealer
        frame = partial(framed, one, shape, codec, width=self._layout.width, take=take)
        return (
            frame if sealer is None else partial(sealed, sealer, one, shape, frame, self._buffers)
        )

    async def _send(
        self,
        group: Sequence[BlockViews],
        frames: Sequence[Value | FrameFault],
        shape: BlockShape,
        deadline: float,
    ) -> list[Ending]:
        values = [
            (block_key(shape.fingerprint, shape.epoch, one.block), frame)
            for one, frame in zip(group, frames, strict=True)
            if not isinstance(frame, FrameFault)
        ]
        began = self._clock.now()
        if began >= deadline:  # Not asked at all: a batch that is late is one trouble, not many.
            return [RemoteOutcome.TIMED_OUT] * len(group)
        outcomes = iter(await self._engine.put(values, timeout_seconds=deadline - began))
        endings: list[Ending] = [
            frame if isinstance(frame, FrameFault) else next(outcomes) for frame in frames
        ]
        for place, (frame, ending) in enumerate(zip(frames, endings, strict=True)):
            if isinstance(frame, InPlace):  # Most of it is the slot.
                endings[place] = frame.fault or ending
                continue
            # Of one that did not arrive one may not know whether a call still reads it.
            is_over = self._pace.leaves_what_failed and ending is not RemoteOutcome.TIMED_OUT
            if isinstance(frame, FrameFault) or not (is_over or ending is RemoteOutcome.DONE):
                continue
            self._buffers.give_back(frame[0])
        began, self._sent_at = max(began, self._sent_at), self._clock.now()
        if values and all(ending is RemoteOutcome.DONE for ending in endings):
            sent = sum(bytes_of(frame) for _, frame in values)
            self._chooser.note_sent(sent_bytes=sent, seconds=self._sent_at - began)
        return endings

    async def _receive(
        self, group: Sequence[BlockViews], shape: BlockShape, deadline: float
    ) -> list[Bytes | RemoteOutcome]:
        keys = [block_key(shape.fingerprint, shape.epoch, one.block) for one in group]
        began = self._clock.now()
        if began >= deadline:
            return [RemoteOutcome.TIMED_OUT] * len(group)
        replies = await self._engine.get(
            keys,
            value_bytes_max=_HEADERS_BYTES + shape.payload_bytes + ENCODED_SLACK_BYTES,
            timeout_seconds=deadline - began,
        )
        values = [reply.outcome if reply.value is None else reply.value for reply in replies]
        received = sum(value.nbytes for value in values if not isinstance(value, RemoteOutcome))
        began, self._received_at = max(began, self._received_at), self._clock.now()
        if all(reply.value is not None for reply in replies):
            seconds = self._received_at - began
            self._chooser.note_received(received_bytes=received, seconds=seconds)
        return values

    async def _decode_group(
        self,
        group: Sequence[BlockViews],
        values: Sequence[Bytes | RemoteOutcome],
        shape: BlockShape,
    ) -> list[FrameHeader | Ending]:
        here = [
            (one, value)
            for one, value in zip(group, values, strict=True)
            if not isinstance(value, RemoteOutcome)
        ]
        began = self._clock.now()
        sealer, buffers = self._layout.sealer, self._buffers
        opened = await self._in_threads(
            [partial(unsealed, sealer, value, one, shape, buffers) for one, value in here]
        )
        seconds = self._clock.now() - began
        for _, value in here:
            self._buffers.give_back(value)
        codecs = {found.codec for found in opened if isinstance(found, FrameHeader)}
        if len(codecs) == 1 and len(here) == len(group):
            payload = len(group) * shape.payload_bytes
            self._codec_got = CodecId(codecs.pop())
            self._chooser.note_decoded(self._codec_got, payload_bytes=payload, seconds=seconds)
        faults = [found for found in opened if isinstance(found, FrameFault)]
        if faults:  # One call, one trouble.
            worst = next((one for one in faults if one not in KEY_FAULTS), None)
            if worst is None:
                self._engine.note_foreign_value(faults[0].value)
            else:
                self._engine.note_wrong_value(worst.value)
        found = iter(opened)
        return [value if isinstance(value, RemoteOutcome) else next(found) for value in values]

    async def _run_trial(self, group: Sequence[BlockViews], shape: BlockShape) -> None:
        """Measure a codec that is not in use as the others are, both ways, and send nothing."""
        number = self._chooser.take_trial()
        if number is None:
            return
        codec, payload = CodecId(number), len(group) * shape.payload_bytes
        began = self._clock.now()
        frames = await self._in_threads(
            [
                partial(framed, one, shape, codec, width=self._layout.width, take=np_empty)
                for one in group
            ]
        )
        middle = self._clock.now()
        encoded = [
            (BlockViews(one.block, [np.empty_like(view) for view in one.shards]), frame)
            for one, frame in zip(group, frames, strict=True)
            if not isinstance(frame, FrameFault)
        ]
        await self._in_threads([partial(unframed, frame[0], one, shape) for one, frame in encoded])
        if len(encoded) < len(group):
            return
        seconds = self._clock.now() - middle
        sent = sum(bytes_of(frame) for _, frame in encoded)
        self._chooser.note_encoded(
            number, payload_bytes=payload, encoded_bytes=sent, seconds=middle - began
        )
        self._chooser.note_decoded(number, payload_bytes=payload, seconds=seconds)

    def _shape(self) -> BlockShape | None:
        epoch = self._epochs.current_epoch()
        if epoch is None:
            return None
        layout = self._layout
        return BlockShape(layout.fingerprint, epoch, layout.shard_count, layout.payload_bytes)

    async def _in_threads(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """All of them, to their ends, even if we are cancelled: they read or write slots."""
        loop = asyncio.get_running_loop()
        share = -(-len(works) // self._threads.count) or 1  # A hop each would take a tenth more.
        calls: list[asyncio.Future[list[T]]] = [
            loop.run_in_executor(self._threads, _run_all, works[start : start + share])
            for start in range(0, len(works), share)
        ]
        done: asyncio.Future[list[list[T]]] = asyncio.gather(*calls)
        groups = await finished(done)
        return _flattened(groups)


def _run_all(works: Sequence[Callable[[], T]]) -> list[T]:
    return [work() for work in works]


def _flattened(groups: Sequence[Sequence[T]]) -> list[T]:
    return [one for group in groups for one in group]
