"""Blocks with known bytes over any remote engine, as the daemon would send and ask for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.clock import Clock, SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.io.checksum import block_checksum
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.pools.key_file import Key
from kvtier.pools.remote.blocks import (
    CodecChooser,
    Ending,
    FixedCodec,
    RemoteBlocks,
    RemoteLayout,
)
from kvtier.pools.remote.breaker import BreakerSettings
from kvtier.pools.remote.breaking import BreakingEngine
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import RemoteEngine, RemoteKey, RemoteOutcome
from kvtier.pools.remote.framing import BlockViews
from kvtier.pools.remote.keys import block_key
from kvtier.pools.remote.sealing import ValueSealer
from kvtier.types import BlockHash
from tests.support.kv_bytes import bf16_block

FINGERPRINT = bytes(range(16))
EPOCH = 0x11223344
BREAKER = BreakerSettings(
    trouble_count=3, window_count=6, open_seconds_min=0.2, open_seconds_max=0.5
)


class WrongBytes(AssertionError):
    """The one thing that may never happen."""


@dataclass(slots=True)
class SetEpoch:
    """An EpochSource that a test sets."""

    epoch: int | None = EPOCH

    def current_epoch(self) -> int | None:
        return self.epoch


@dataclass
class RemoteRig:
    """One daemon's view: `put` and `get` by numbers. `wrong_count` must stay 0."""

    engine: RemoteEngine
    codec: CodecId = CodecId.NONE
    shard_count: int = 2
    payload_bytes: int = 100_000
    clock: Clock = field(default_factory=SystemClock)
    chooser: CodecChooser | None = None
    settings: BreakerSettings = BREAKER
    buffers: Buffers = field(default_factory=Buffers)
    keys: Sequence[Key] = ()  # None: in the clear.

    def __post_init__(self) -> None:
        self.epochs = SetEpoch()
        self.breaking = BreakingEngine(
            self.engine, clock=self.clock, jitter=lambda: 0.0, settings=self.settings
        )
        self.threads = IoThreads("test-codec", count=2)
        sealer = ValueSealer(self.keys, FINGERPRINT) if self.keys else None
        self.blocks = RemoteBlocks(
            self.breaking,
            RemoteLayout(FINGERPRINT, self.shard_count, self.payload_bytes, 2, sealer),
            self.epochs,
            chooser=self.chooser or FixedCodec(self.codec),
            threads=self.threads,
            clock=self.clock,
            buffers=self.buffers,
        )

    def views_of(self, number: int) -> BlockViews:
        payload = bf16_block(self.payload_bytes, number)
        shards = self._split(payload)
        return BlockViews(hash_of(number), shards, block_checksum(shards))

    def key_of(self, number: int) -> RemoteKey:
        return block_key(FINGERPRINT, EPOCH, hash_of(number))

    async def put(self, numbers: Sequence[int], *, timeout_seconds: float = 10.0) -> list[Ending]:
        blocks = [self.views_of(number) for number in numbers]
        return await self.blocks.put(blocks, timeout_seconds=timeout_seconds)

    async def get(self, numbers: Sequence[int], *, timeout_seconds: float = 10.0) -> list[Ending]:
        """Each ends as it ends; one that is DONE has the bytes of its number, or WrongBytes."""
        places = [np.full(self.payload_bytes, 0xEE, np.uint8) for _ in numbers]
        blocks = [
            BlockViews(hash_of(number), self._split(place))
            for number, place in zip(numbers, places, strict=True)
        ]
        got = await self.blocks.get(blocks, timeout_seconds=timeout_seconds)
        found = zip(numbers, places, got.endings, got.checksums, strict=True)
        for number, place, ending, checksum in found:
            if ending is not RemoteOutcome.DONE:
                assert checksum == 0, f"block {number} did not come, and has a checksum"
                continue
            if not np.array_equal(place, bf16_block(self.payload_bytes, number)):
                raise WrongBytes(f"block {number}")
            assert checksum == block_checksum(self._split(place)), f"block {number}"
        return got.endings

    async def close(self) -> None:
        await self.breaking.close()
        self.threads.shutdown(wait=False)

    def _split(self, payload: Bytes) -> list[Bytes]:
        return list(payload.reshape(self.shard_count, -1))


def hash_of(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"remote %d" % number).digest())
