"""Sides of `kvtier bench tiers` in memory and on a disk: the pools' own copies, and bare ones.

Memory that emulates CXL is not held back here: the copies are what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvtier.cli.bench_tiers_rounds import Side
from kvtier.cli.pool_book import book_of, reserve
from kvtier.errors import KVTierError
from kvtier.io.alignment import open_direct
from kvtier.io.checksum import Checksums, block_checksums
from kvtier.io.copy import copy_batch
from kvtier.io.driver import Batch, Outcome
from kvtier.io.file import DEPTH, FileDriver
from kvtier.layout import SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.cxl import CopyBatch
from kvtier.pools.nvme import NvmePool
from kvtier.pools.slot_table import Slots
from kvtier.server.cxl_tier import COPY_THREADS
from kvtier.types import BlockHash

_FINGERPRINT = b"bench-tiers-----"
# Blocks a call: as a batch of the daemon's, cut so that all threads have some.
_BATCH_COUNT = 4

Blocks = Sequence[Bytes]
Copy = Callable[[Sequence[Bytes], Sequence[Bytes], Sequence[int]], None]


class MemorySide:
    """Copies between two memories in `thread_count` threads; implements `Side`."""

    def __init__(
        self, copy: Copy, *, sources: Blocks, slots: Blocks, targets: Blocks, thread_count: int
    ) -> None:
        self._copy, self._thread_count = copy, thread_count
        self._sources, self._slots, self._targets = sources, slots, targets
        self._threads = ThreadPoolExecutor(thread_count, "bench")

    def put(self, numbers: Sequence[int]) -> None:
        self._run(self._slots, self._sources, numbers)

    def get(self, numbers: Sequence[int]) -> None:
        self._run(self._targets, self._slots, numbers)

    def forget(self, numbers: Sequence[int]) -> None:
        """Put over."""

    def _run(self, targets: Blocks, sources: Blocks, numbers: Sequence[int]) -> None:
        def work(part: Sequence[int]) -> None:
            self._copy([targets[one] for one in part], [sources[one] for one in part], part)

        parts = [
            numbers[first : first + _BATCH_COUNT] for first in range(0, len(numbers), _BATCH_COUNT)
        ]
        list(self._threads.map(work, parts))


def plain_copy(targets: Blocks, sources: Blocks, numbers: Sequence[int]) -> None:
    """What an engine does with a slot of DRAM."""
    copy_batch(targets, sources)


def bare_copy(targets: Blocks, sources: Blocks, numbers: Sequence[int]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def cxl_sides(
    copy_batch: CopyBatch, *, sources: Blocks, slots: Blocks, targets: Blocks
) -> tuple[Side, Side]:
    """The tier's own and bare copies, in as many threads."""

    def own_copy(targets: Blocks, sources: Blocks, numbers: Sequence[int]) -> None:
        copy_batch(targets, sources)

    ours, raw = (
        MemorySide(copy, sources=sources, slots=slots, targets=targets, thread_count=COPY_THREADS)
        for copy in (own_copy, bare_copy)
    )
    return ours, raw


class NvmeSide:
    """The pool, with its checksums; implements `Side`."""

    def __init__(self, path: Path, *, sources: Blocks, targets: Blocks) -> None:
        """`path`: a pool that was just formatted."""
        self.pool = NvmePool([FileDriver(path)])
        self.pool.recover({})
        self._book = book_of(self.pool)
        self._layout = SlotLayout(sources[0].nbytes, 1)
        self._sources, self._targets = sources, targets
        self._checksums = block_checksums([[one] for one in sources])
        self._slots: dict[int, int] = {}

    def put(self, numbers: Sequence[int]) -> None:
        under_way: list[tuple[Batch, Slots, Checksums]] = []
        for first in range(0, len(numbers), _BATCH_COUNT):
            part = list(numbers[first : first + _BATCH_COUNT])
            slots = reserve(self.pool, self._book, _FINGERPRINT, self._layout, len(part)).slots
            checksums = self._checksums[part]
            blocks = [[self._sources[one]] for one in part]
            under_way.append((self.pool.write_blocks(slots, blocks, checksums), slots, checksums))
            self._slots.update(zip(part, slots.tolist(), strict=True))
        for batch, slots, checksums in under_way:
            _assert_done(batch)
            hashes = [BlockHash(b"%032d" % slot) for slot in slots.tolist()]
            sequence = self._book.take_sequences(len(slots))
            parents = [None] * len(slots)
            self.pool.write_ready(slots, hashes, parents, checksums, epoch=1, sequence=sequence)
            self._book.commit(slots)

    def get(self, numbers: Sequence[int]) -> None:
        batches = []
        for first in range(0, len(numbers), _BATCH_COUNT):
            part = numbers[first : first + _BATCH_COUNT]
            slots = np.array([self._slots[one] for one in part], np.uint32)
            batches.append(self.pool.read_blocks(slots, [[self._targets[one]] for one in part]))
        for batch in batches:
            _assert_done(batch)

    def forget(self, numbers: Sequence[int]) -> None:
        """Segments are written over in turn."""


class RawFileSide:
    """One file, direct where that works, as many calls at once; implements `Side`."""

    def __init__(self, path: Path, *, sources: Blocks, targets: Blocks) -> None:
        self._fd, self.direct = open_direct(path, os.O_RDWR)
        self._sources, self._targets = sources, targets
        self._threads = ThreadPoolExecutor(DEPTH, "bench-file")

    def put(self, numbers: Sequence[int]) -> None:
        self._run(os.pwritev, self._sources, numbers)

    def get(self, numbers: Sequence[int]) -> None:
        self._run(os.preadv, self._targets, numbers)

    def forget(self, numbers: Sequence[int]) -> None:
        """Written over."""

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)

    def _run(
        self,
        call: Callable[[int, list[Bytes], int], int],
        blocks: Blocks,
        numbers: Sequence[int],
    ) -> None:
        def work(number: int) -> int:
            view = blocks[number]
            return call(self._fd, [view], number * view.nbytes) - view.nbytes

        if any(self._threads.map(work, numbers)):
            raise KVTierError("the disk moved less than it was asked for")


def _assert_done(batch: Batch) -> None:
    outcomes = set(batch.wait())
    if outcomes != {Outcome.DONE}:
        raise KVTierError(f"the disk answered {sorted(map(str, outcomes))}")
