"""Buffers like the pool's slabs: what both processes of `kvtier bench transfer` copy with."""

from __future__ import annotations

import time

import numpy as np

from kvtier.clock import SystemClock
from kvtier.memory import Bytes
from kvtier.namespace import NamespaceSpec
from kvtier.pools.slabs import PageKind, Slab, best_page_kind, populate_slab
from kvtier.types import SlabId

BLOCK_BYTES = 2 << 20
_STAMP_BYTES = 64


class Buffers:
    """Two buffers of `count` blocks each, populated, on the pages the daemon's slabs lie on."""

    def __init__(self, count: int) -> None:
        kind = best_page_kind()
        slabs = [_populated(number, count, kind) for number in (1, 2)]
        self._slabs = slabs  # Held: their mappings end with them.
        self.page_kind = str(slabs[0].page_kind)
        self.source, self.target = ([*_rows(slab, count)] for slab in slabs)

    def fill(self) -> None:
        """Bytes that differ from block to block, and within it."""
        chance = np.random.default_rng(1)
        for view in self.source:
            np.copyto(view, chance.integers(0, 256, BLOCK_BYTES, dtype=np.uint8))

    def stamp(self, turn: int) -> None:
        """Make the source differ from what it was in every other round."""
        for number, view in enumerate(self.source):
            view[:_STAMP_BYTES] = np.frombuffer(
                f"{turn}/{number}".encode().ljust(_STAMP_BYTES), dtype=np.uint8
            )

    def memcpy_seconds(self, count: int) -> float:
        """The bar: as many blocks from the source to the target."""
        started = time.perf_counter()
        for source, target in zip(self.source[:count], self.target, strict=False):
            np.copyto(target, source)
        return time.perf_counter() - started


def spec_of(salt: str) -> NamespaceSpec:
    return NamespaceSpec(
        model="bench-transfer",
        weights="-",
        kv_dtype="bytes",
        layout="none",
        block_tokens=16,
        shard_bytes=BLOCK_BYTES,
        salt=salt,
    )


def _populated(number: int, count: int, kind: PageKind) -> Slab:
    return populate_slab(SlabId(number), count * BLOCK_BYTES, kind, clock=SystemClock())


def _rows(slab: Slab, count: int) -> Bytes:
    rows: Bytes = slab.mapping.array.reshape(count, BLOCK_BYTES)
    return rows
