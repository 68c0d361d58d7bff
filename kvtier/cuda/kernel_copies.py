"""Copies of many short runs by our `copy_runs` kernel, which is told its runs by a table.

    up      the table by the copy engine; the kernel reads host memory and writes device blocks
    down    the table; the kernel gathers device blocks into staging; long copies take them down

A kernel never writes to the host: while it did, compute would wait for the link. In staging the
bytes lie as they will on the host, so that runs that are neighbours there leave as one copy.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cuda.copy_paths import CopyPath, PathLimits
from kvtier.cuda.copy_plan import Indices, Piece
from kvtier.cuda.copy_submit import KernelsBusy
from kvtier.cuda.errors import CudaBroken, CudaRefused, CudaUnavailable, RegistrationRefused
from kvtier.cuda.kernel_cache import KernelCache, KernelCompiler, NvrtcCompiler, default_folder
from kvtier.cuda.runtime import (
    Addresses,
    CudaRuntime,
    Direction,
    Event,
    Function,
    KernelLaunch,
    Ranges,
    SourceOrder,
    Stream,
)

log = logging.getLogger(__name__)

KERNELS_VARIABLE = "KVTIER_KERNELS"
"""Set to 0: copies by the copy engines only."""

# A piece's kernel, the next one, and as many of the other direction, four times over.
TABLE_COUNT = 16

# Four blocks of threads have 64 KiB each under way: more than a PCIe 5 link can carry. Running
# blocks are not preempted, so compute goes without their multiprocessors until the piece ends.
GRID_COUNT = 4
_BLOCK_THREADS = 1024
_WARP_LANES = 32
TILE_BYTES = 2048  # As in kernels/kv_core.cuh.
_COLUMN_COUNT = 3
# Staging and the host are aligned alike up to this, so that both copies go by whole words.
_ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class _Table:
    """Room for one piece's table on both sides; free when its event is done."""

    host: npt.NDArray[np.uint64]
    host_address: int
    device_address: int
    is_read: Event  # By the kernel.


@dataclass(frozen=True, slots=True, eq=False)
class _StagedRuns:
    """Where in staging each run lies, and what leaves as one copy."""

    offsets: Addresses  # Of every run, in the piece's order.
    copy_offsets: Addresses
    copy_sizes: Addresses
    first_runs: Indices  # Of each copy.
    bytes_count: int  # Of staging, gaps included.


class RunKernels:
    """The real `KernelCopies`: one copying thread at a time, any number of streams."""

    def __init__(
        self,
        runtime: CudaRuntime,
        cubin: bytes,
        *,
        limits: PathLimits = PathLimits(),
        grid_count: int = GRID_COUNT,
    ) -> None:
        """Raises CudaRefused or RegistrationRefused, and then has kept nothing."""
        self._runtime = runtime
        self._grid_count = grid_count
        self._runs_max = limits.piece_runs_max
        self._function: Function = runtime.load_function(cubin, "copy_runs")
        # Each copy of a piece may begin and end within an alignment of its own.
        self._staging_bytes = limits.piece_bytes_max + 2 * _ALIGNMENT * self._runs_max
        self._memory = mmap.mmap(-1, self._table_bytes * TABLE_COUNT)
        self._host_address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        with ExitStack() as held:
            runtime.register_host(self._host_address, len(self._memory))
            held.callback(runtime.unregister_host, self._host_address)
            self._device_address = runtime.allocate_device(len(self._memory))
            held.callback(runtime.free_device, self._device_address)
            self._staging = runtime.allocate_device(self._staging_bytes)
            held.callback(runtime.free_device, self._staging)
            self._staging_is_free = runtime.create_event()
            held.callback(runtime.destroy_event, self._staging_is_free)
            self._tables: list[_Table] = []
            for index in range(TABLE_COUNT):
                self._tables.append(self._make_table(index))
                held.callback(runtime.destroy_event, self._tables[-1].is_read)
            self._held = held.pop_all()

    def submit(self, piece: Piece, stream: Stream) -> None:
        """Raises KernelsBusy or CudaRefused; all of the piece may then go another way.

        If copies one by one were refused on the way down, some of them are queued.
        """
        if len(piece.sizes) > self._runs_max:
            raise KernelsBusy(f"{len(piece.sizes)} runs, and a table holds {self._runs_max}")
        table = self._free_table()
        if piece.path is CopyPath.KERNEL:
            assert piece.direction is Direction.HOST_TO_DEVICE, (
                "a kernel must not write to the host"
            )
            self._launch(table, (piece.device, piece.seen, piece.sizes), stream)
            return
        assert piece.direction is Direction.DEVICE_TO_HOST, "staging is for stores"
        staged = _stage(piece)
        if staged.bytes_count > self._staging_bytes:
            raise KernelsBusy(
                f"staging holds {self._staging_bytes} bytes, not {staged.bytes_count}"
            )
        # On the stream of the piece before there is nothing to wait for.
        self._runtime.wait_event(stream, self._staging_is_free)
        gathered = staged.offsets + np.uint64(self._staging)
        self._launch(table, (gathered, piece.device, piece.sizes), stream)
        try:
            self._take_down(piece, staged, stream)
        finally:
            self._runtime.record_event(self._staging_is_free, stream)

    def close(self) -> None:
        """When all that was submitted has ended."""
        self._held.close()

    # ----------------------------------------------------------------------------------- helpers

    @property
    def _table_bytes(self) -> int:
        return -(-8 * _COLUMN_COUNT * self._runs_max // _ALIGNMENT) * _ALIGNMENT

    def _make_table(self, index: int) -> _Table:
        offset = index * self._table_bytes
        count = _COLUMN_COUNT * self._runs_max
        return _Table(
            np.frombuffer(self._memory, np.uint64, count, offset),
            self._host_address + offset,
            self._device_address + offset,
            self._runtime.create_event(),
        )

    def _free_table(self) -> _Table:
        """The one used longest ago, most often."""
        for index, table in enumerate(self._tables):
            if self._runtime.is_event_done(table.is_read):
                self._tables.append(self._tables.pop(index))
                return table
        raise KernelsBusy(f"{TABLE_COUNT} pieces are under way")

    def _launch(
        self, table: _Table, columns: tuple[Addresses, Addresses, Addresses], stream: Stream
    ) -> None:
        """`columns` are targets, sources and sizes."""
        targets, sources, sizes = columns
        run_count = len(sizes)
        length_bytes = 8 * _COLUMN_COUNT * run_count
        np.concatenate(columns, out=table.host[: _COLUMN_COUNT * run_count])
        self._runtime.copy(
            table.device_address,
            table.host_address,
            length_bytes,
            Direction.HOST_TO_DEVICE,
            stream,
        )
        tiles_per_run = -(-int(sizes.max()) // TILE_BYTES)
        blocks_wanted = -(-run_count * tiles_per_run * _WARP_LANES // _BLOCK_THREADS)
        try:
            self._runtime.launch(
                KernelLaunch(
                    self._function,
                    min(self._grid_count, blocks_wanted),
                    _BLOCK_THREADS,
                    [table.device_address, run_count, tiles_per_run],
                    reads=Ranges(
                        np.append(sources, np.uint64(table.device_address)),
                        np.append(sizes, np.uint64(length_bytes)),
                    ),
                    writes=Ranges(targets, sizes),
                ),
                stream,
            )
        finally:
            self._runtime.record_event(table.is_read, stream)

    def _take_down(self, piece: Piece, staged: _StagedRuns, stream: Stream) -> None:
        sources = staged.copy_offsets + np.uint64(self._staging)
        firsts = staged.first_runs
        if self._runtime.has_batches:
            self._runtime.copy_batch(
                piece.seen[firsts], sources, staged.copy_sizes, SourceOrder.STREAM, stream
            )
            return
        for target, source, size in zip(
            piece.host[firsts].tolist(), sources.tolist(), staged.copy_sizes.tolist(), strict=True
        ):
            self._runtime.copy(target, source, size, Direction.DEVICE_TO_HOST, stream)


def load_run_kernels(
    runtime: CudaRuntime,
    cache: KernelCache,
    device: int,
    *,
    limits: PathLimits = PathLimits(),
) -> RunKernels:
    """Compiled for the device, which the calling thread uses from now on.

    Raises CudaUnavailable, CudaRefused or RegistrationRefused: go on without kernels.
    """
    runtime.use_device(device)
    capability = runtime.attributes(device).compute_capability
    return RunKernels(runtime, cache.cubin("kv_copy", capability), limits=limits)


def find_run_kernels(
    runtime: CudaRuntime, device: int, make_compiler: Callable[[], KernelCompiler] = NvrtcCompiler
) -> RunKernels | None:
    """What an engine starts with: None, with the reason in the log, where kernels are not to be
    had. All they bring is speed for short runs."""
    if os.environ.get(KERNELS_VARIABLE) == "0":
        return None
    try:
        return load_run_kernels(runtime, KernelCache(default_folder(), make_compiler()), device)
    except CudaBroken:
        raise
    except (CudaUnavailable, CudaRefused, RegistrationRefused) as error:
        log.info("copies go without kernels", extra={"reason": str(error)})
        return None


def _stage(piece: Piece) -> _StagedRuns:
    """Runs by their place on the host; neighbours in one slab leave as one copy."""
    order = np.argsort(piece.seen, kind="stable")
    seen, sizes = piece.seen[order], piece.sizes[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = seen[1:] != seen[:-1] + sizes[:-1]
    if piece.slabs is not None:
        slabs = piece.slabs[order]
        is_first[1:] |= slabs[1:] != slabs[:-1]
    firsts = np.flatnonzero(is_first)
    copy_sizes = np.add.reduceat(sizes, firsts)
    # Each copy starts as far beyond a multiple of the alignment as it does on the host.
    leads = seen[firsts] % np.uint64(_ALIGNMENT)
    rooms = -(-(leads + copy_sizes).astype(np.int64) // _ALIGNMENT) * _ALIGNMENT
    copy_offsets = (np.cumsum(rooms) - rooms).astype(np.uint64) + leads
    ranks = np.cumsum(is_first) - 1
    offsets = np.empty_like(seen)
    offsets[order] = copy_offsets[ranks] + (seen - seen[firsts][ranks])
    return _StagedRuns(offsets, copy_offsets, copy_sizes, order[firsts], int(rooms.sum()))
