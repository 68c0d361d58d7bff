"""Sides of `kvtier bench tiers` in remote engines: frames and checksums, and the bare client."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from kvtier.clock import SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.errors import KVTierError
from kvtier.io.checksum import block_checksum
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.pools.remote.blocks import Ending, FixedCodec, RemoteBlocks, RemoteLayout
from kvtier.pools.remote.breaking import BreakingEngine
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import RemoteEngine, RemoteOutcome
from kvtier.pools.remote.framing import BlockViews
from kvtier.server.remote import CODEC_THREADS_MAX
from kvtier.types import BlockHash

FINGERPRINT = b"bench-tiers-----"
_SECONDS = 60.0
if TYPE_CHECKING:  # It needs cryptography, which only those who encrypt have.
    from kvtier.pools.remote.sealing import ValueSealer

_DONE = {RemoteOutcome.DONE}

Blocks = Sequence[Bytes]
MakeEngine = Callable[[Buffers], RemoteEngine]


class _FixedEpoch:
    def current_epoch(self) -> int | None:
        return 1


class RemoteSide:
    """`RemoteBlocks` as the daemon has it, codec none; implements `Side`."""

    def __init__(
        self,
        make_engine: MakeEngine,
        sealer: ValueSealer | None = None,
        /,
        *,
        sources: Blocks,
        targets: Blocks,
    ) -> None:
        """Raises what `make_engine` raises."""
        self._loop = uvloop.new_event_loop()  # The daemon's. A Runner takes 0.1 ms a call.
        buffers, clock = Buffers(), SystemClock()
        self._threads = IoThreads("bench-codec", count=min(CODEC_THREADS_MAX, os.cpu_count() or 1))

        async def make() -> RemoteBlocks:
            self._engine = BreakingEngine(make_engine(buffers), clock=clock, jitter=lambda: 0.0)
            return RemoteBlocks(
                self._engine,
                RemoteLayout(FINGERPRINT, 1, sources[0].nbytes, 2, sealer),
                _FixedEpoch(),
                chooser=FixedCodec(CodecId.NONE),
                threads=self._threads,
                clock=clock,
                buffers=buffers,
            )

        self._blocks = self._loop.run_until_complete(make())
        hashes = [BlockHash(b"%032d" % number) for number in range(len(sources))]
        self._sources = [
            BlockViews(block, [view], block_checksum([view]))
            for block, view in zip(hashes, sources, strict=True)
        ]
        self._targets = [
            BlockViews(block, [view]) for block, view in zip(hashes, targets, strict=True)
        ]

    def put(self, numbers: Sequence[int]) -> None:
        blocks = [self._sources[one] for one in numbers]
        _assert_done(
            self._loop.run_until_complete(self._blocks.put(blocks, timeout_seconds=_SECONDS))
        )

    def get(self, numbers: Sequence[int]) -> None:
        blocks = [self._targets[one] for one in numbers]
        got = self._loop.run_until_complete(self._blocks.get(blocks, timeout_seconds=_SECONDS))
        _assert_done(got.endings)

    def forget(self, numbers: Sequence[int]) -> None:
        hashes = [self._sources[one].block for one in numbers]
        _assert_done(
            self._loop.run_until_complete(self._blocks.delete(hashes, timeout_seconds=_SECONDS))
        )

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._threads.shutdown(wait=False)
        self._loop.close()


class RedisClientSide:
    """The `redis` package, pipelined; implements `Side`."""

    def __init__(self, port: int, *, sources: Blocks, targets: Blocks) -> None:
        import redis

        self._client: Any = redis.Redis("127.0.0.1", port)
        self._sources, self._targets = sources, targets

    def put(self, numbers: Sequence[int]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for one in numbers:
            pipeline.set(_name(one), memoryview(self._sources[one]))
        if not all(pipeline.execute()):
            raise KVTierError("Redis did not take a value")

    def get(self, numbers: Sequence[int]) -> None:
        """Into the same memory as ours: whoever needs the bytes needs them somewhere."""
        pipeline = self._client.pipeline(transaction=False)
        for one in numbers:
            pipeline.get(_name(one))
        for one, value in zip(numbers, pipeline.execute(), strict=True):
            np.copyto(self._targets[one], np.frombuffer(value, np.uint8))

    def forget(self, numbers: Sequence[int]) -> None:
        self._client.delete(*map(_name, numbers))

    def close(self) -> None:
        self._client.close()


class MooncakeClientSide:
    """Mooncake's store client, without a copy from and to registered memory; implements `Side`."""

    def __init__(self, master: str, *, sources: Blocks, targets: Blocks) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        if code != 0:
            raise KVTierError(f"Mooncake's own client does not connect ({code})")
        self._sources, self._targets = sources, targets
        for view in (*sources, *targets):
            if self._store.register_buffer(view.ctypes.data, view.nbytes) != 0:
                raise KVTierError("Mooncake's own client does not register memory")

    def put(self, numbers: Sequence[int]) -> None:
        views = [self._sources[one] for one in numbers]
        codes = self._store.batch_put_from(*self._arguments(numbers, views))
        if set(codes) != {0}:
            raise KVTierError(f"Mooncake's own client put nothing: {set(codes)}")

    def get(self, numbers: Sequence[int]) -> None:
        views = [self._targets[one] for one in numbers]
        counts = self._store.batch_get_into(*self._arguments(numbers, views))
        if counts != [view.nbytes for view in views]:
            raise KVTierError(f"Mooncake's own client got other lengths: {set(counts)}")

    def forget(self, numbers: Sequence[int]) -> None:
        self._store.batch_remove([_name(one) for one in numbers], True)

    def close(self) -> None:
        for view in (*self._sources, *self._targets):
            self._store.unregister_buffer(view.ctypes.data)
        self._store.close()

    def _arguments(self, numbers: Sequence[int], views: Blocks) -> tuple[list[Any], ...]:
        names = [_name(one) for one in numbers]
        return names, [view.ctypes.data for view in views], [view.nbytes for view in views]


class FolderSide:
    """A file a block, one after the other, written and renamed; implements `Side`."""

    def __init__(self, folder: Path, *, sources: Blocks, targets: Blocks) -> None:
        folder.mkdir()
        self._folder, self._sources, self._targets = folder, sources, targets

    def put(self, numbers: Sequence[int]) -> None:
        for one in numbers:
            path = self._folder / _name(one)
            with path.with_suffix(".new").open("wb", buffering=0) as file:
                file.write(self._sources[one])
            path.with_suffix(".new").rename(path)

    def get(self, numbers: Sequence[int]) -> None:
        for one in numbers:
            with (self._folder / _name(one)).open("rb", buffering=0) as file:
                if file.readinto(self._targets[one]) != self._targets[one].nbytes:
                    raise KVTierError("a file is too short")

    def forget(self, numbers: Sequence[int]) -> None:
        for one in numbers:
            (self._folder / _name(one)).unlink()

    def close(self) -> None:
        """The folder is its maker's."""


def _name(number: int) -> str:
    return f"bench-{number}"


def _assert_done(endings: Sequence[Ending]) -> None:
    if set(endings) != _DONE:
        raise KVTierError(f"the engine answered {sorted(set(endings))}")
