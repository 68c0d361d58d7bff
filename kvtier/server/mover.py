"""Moves bytes in threads that let go of the GIL: checksums, and the copies of put and get.

Invariant: bytes are touched only while their slots are pinned or reserved. So a copy that began is
finished, also when the call that wanted it is cancelled (`finish`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvtier.core.events import ChecksumsComputed
from kvtier.core.instructions import ComputeChecksums
from kvtier.errors import CorruptReplica
from kvtier.io.checksum import block_checksum, block_checksums
from kvtier.io.copy import read_pieces, write_piece
from kvtier.memory import Bytes
from kvtier.metrics import Metrics
from kvtier.pools.pool import Pool
from kvtier.server.core_loop import CoreLoop
from kvtier.server.finish import finish

T = TypeVar("T")

# One hop to the thread and back costs as much as summing a small block: many go together.
CHECKSUM_BATCH_SLOTS = 64
# Of large blocks less: what has its checksum can go to a tier below while the next is summed.
CHECKSUM_BATCH_BYTES = 8 << 20
COPY_THREADS = 2
# Checksums can wait: the engines' cores come first.
CHECKSUM_NICENESS = 10
# The answer to the Commit goes out first, and what follows it at once is summed in the same batch.
# Beginning at once made a Commit of 64 MiB last 4.9 instead of 1.4 ms on two cores.
CHECKSUM_DELAY_SECONDS = 0.02


class Mover:
    """Owns its threads; methods belong to the event loop."""

    def __init__(self, pool: Pool, core: CoreLoop, metrics: Metrics) -> None:
        self._pool = pool
        self._core = core
        self._metrics = metrics
        self._waiting: deque[ComputeChecksums] = deque()
        self.waiting_count = 0  # Slots.
        self._is_summing = False
        self._tasks: asyncio.TaskGroup | None = None
        self._copy_threads = ThreadPoolExecutor(COPY_THREADS, "kvtier-copy")
        self._checksum_thread = ThreadPoolExecutor(1, "kvtier-checksum", _be_nice)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        """Wait for what is under way; what waits is dropped."""
        self._waiting.clear()
        self._copy_threads.shutdown(wait=True, cancel_futures=True)
        self._checksum_thread.shutdown(wait=True, cancel_futures=True)

    def on_compute_checksums(self, asked: ComputeChecksums) -> None:
        """Bounded by the pool: every slot waits here at most once."""
        assert self._tasks is not None, "checksums before the start"
        self._waiting.append(asked)
        self.waiting_count += len(asked.slots)
        if not self._is_summing:
            self._is_summing = True
            self._tasks.create_task(self._sum_all())

    async def write(self, slot: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Write pieces (first byte, bytes) of a payload into a slot that is reserved."""
        views = self._pool.views(slot)
        await finish(self._copy(partial(_write_pieces, views, pieces)))

    async def read(self, slot: int) -> tuple[list[bytes], int]:
        """The payload of a pinned slot in pieces, and its checksum.

        Raises CorruptReplica when the bytes are not those that were committed.
        """
        pieces, checksum = await finish(self._copy(partial(_read_block, self._pool.views(slot))))
        if self._pool.stored_checksum(slot) not in (0, checksum):
            raise CorruptReplica(f"the bytes in slot {slot} are not those that were committed")
        return pieces, checksum

    async def _sum_all(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(CHECKSUM_DELAY_SECONDS)
        while self._waiting:
            asked = self._waiting.popleft()
            batch_count = self._batch_count(asked)
            for first in range(0, len(asked.slots), batch_count):
                slots = asked.slots[first : first + batch_count]
                views = [self._pool.views(slot) for slot in slots.tolist()]
                sums = await loop.run_in_executor(self._checksum_thread, block_checksums, views)
                self.waiting_count -= len(slots)
                self._metrics.blocks.checksummed_blocks.inc(len(slots))
                self._core.post(ChecksumsComputed(asked.namespace, slots, sums))
        self._is_summing = False

    def _batch_count(self, asked: ComputeChecksums) -> int:
        """How many of these slots go together; they are of one namespace."""
        if not len(asked.slots):
            return 1
        block_bytes = sum(view.nbytes for view in self._pool.views(int(asked.slots[0])))
        return max(1, min(CHECKSUM_BATCH_SLOTS, CHECKSUM_BATCH_BYTES // block_bytes))

    async def _copy(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._copy_threads, work)


def _write_pieces(views: list[Bytes], pieces: Sequence[tuple[int, bytes]]) -> None:
    for first, piece in pieces:
        write_piece(views, first, piece)


def _read_block(views: list[Bytes]) -> tuple[list[bytes], int]:
    return list(read_pieces(views)), block_checksum(views)


def _be_nice() -> None:
    """Linux: niceness belongs to the thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CHECKSUM_NICENESS)
