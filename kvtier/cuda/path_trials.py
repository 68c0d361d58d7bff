"""Tries every copy path at the start: does it move the right bytes, and from where on is it faster.

A wrong path (a driver, a platform, a kernel of ours) would write wrong KV into the cache, where it
is read as right: it is given up before the first block is copied. Costs some milliseconds and at
most 32 MiB; waits for the device, which nothing may do later.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvtier.cuda.copy_paths import CopyPath, PathLimits, PathSupport
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.copy_submit import PieceSubmitter
from kvtier.cuda.errors import CudaUnavailable, RegistrationRefused
from kvtier.cuda.runtime import CudaRuntime, Direction, Stream
from kvtier.memory import Bytes

log = logging.getLogger(__name__)

SCRATCH_BYTES = 16 << 20
_FILLER_BYTES = 8 << 20  # 150 us of PCIe 5, twice what a batch of 128 takes to submit.
# Runs with gaps between them, which must stay as they are.
_TRIAL_RUN_COUNT, _TRIAL_RUN_BYTES, _TRIAL_STEP_BYTES = 97, 1008, 1024
_TIMED_RUN_BYTES = tuple(kib << 10 for kib in (4, 8, 16, 28, 40, 64))
_TIMED_RUN_COUNTS = (4, 8, 16, 32, 64, 128)
_REPEAT_COUNT = 5

_UP, _DOWN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


@dataclass(frozen=True, slots=True, eq=False)
class _Scratch:
    """As much host memory as device memory, and a stream."""

    host: Bytes
    host_address: int
    seen_address: int
    device_address: int
    is_registered: bool
    stream: Stream

    def piece(
        self, path: CopyPath, direction: Direction, run_bytes: int, run_count: int, gap: int = 0
    ) -> Piece:
        """Runs in a row on the host, `gap` bytes between them, in another order on the device."""
        places = np.arange(run_count, dtype=np.uint64) * np.uint64(run_bytes + gap)
        shuffled = np.random.default_rng(run_count).permutation(places)
        return Piece(
            path,
            direction,
            shuffled + np.uint64(self.device_address),
            places + np.uint64(self.host_address),
            places + np.uint64(self.seen_address),
            np.full(run_count, run_bytes, np.uint64),
        )


def give_up_wrong_paths(runtime: CudaRuntime, submitter: PieceSubmitter) -> list[str]:
    """What was found wrong; those paths are out of the submitter's support.

    Raises CudaUnavailable if not even plain copies arrive.
    """
    wrong: list[str] = []
    with _scratch(runtime) as scratch:
        for path in (CopyPath.PLAIN, CopyPath.BATCH, CopyPath.KERNEL, CopyPath.STAGED):
            if not _is_supported(path, submitter.support, scratch):
                continue
            for direction in _directions(path):
                if _is_right(runtime, submitter, scratch, path, direction):
                    continue
                wrong.append(f"{path.value} {direction.name}")
                _give_up(path, submitter)
    return wrong


def calibrated(
    runtime: CudaRuntime, submitter: PieceSubmitter, limits: PathLimits = PathLimits()
) -> PathLimits:
    """The limits with the crossing points between batches and kernels as they are here."""
    if not (submitter.support.has_kernels and submitter.support.has_batches):
        return limits
    with _scratch(runtime) as scratch:
        if not scratch.is_registered:
            return limits

        def seconds(path: CopyPath, run_bytes: int, run_count: int) -> float:
            piece = scratch.piece(path, _UP, run_bytes, run_count)
            return _seconds(runtime, scratch, lambda: submitter.submit(piece, scratch.stream))

        def is_kernel_faster(run_bytes: int, run_count: int) -> bool:
            return seconds(CopyPath.KERNEL, run_bytes, run_count) < seconds(
                CopyPath.BATCH, run_bytes, run_count
            )

        slow_sizes = [size for size in _TIMED_RUN_BYTES if is_kernel_faster(size, 128)]
        counts = [count for count in _TIMED_RUN_COUNTS if is_kernel_faster(8 << 10, count)]
    # The first size from which on batches win; none where they always do.
    slowest = max(slow_sizes, default=0)
    return replace(
        limits,
        small_run_bytes=next((size for size in _TIMED_RUN_BYTES if size > slowest), slowest)
        if slow_sizes
        else 0,
        kernel_count_min=min(counts, default=limits.kernel_count_min),
    )


def _directions(path: CopyPath) -> tuple[Direction, ...]:
    if path is CopyPath.KERNEL:
        return (_UP,)
    return (_DOWN,) if path is CopyPath.STAGED else (_UP, _DOWN)


def _is_supported(path: CopyPath, support: PathSupport, scratch: _Scratch) -> bool:
    if path is CopyPath.PLAIN:
        return True
    has_path = support.has_batches if path is CopyPath.BATCH else support.has_kernels
    return has_path and scratch.is_registered


def _is_right(
    runtime: CudaRuntime,
    submitter: PieceSubmitter,
    scratch: _Scratch,
    path: CopyPath,
    direction: Direction,
) -> bool:
    """The one way by the path, the other by plain copies, which have been tried before."""
    run_bytes, run_count, step = _TRIAL_RUN_BYTES, _TRIAL_RUN_COUNT, _TRIAL_STEP_BYTES
    used = run_count * step
    # Other bytes in every trial: those of the last one still lie on the device.
    seed = [ord(letter) for letter in path.value] + [direction.value]
    expected = np.random.default_rng(seed).integers(0, 256, used, np.uint8)
    np.copyto(scratch.host[:used], expected)
    for way in (_UP, _DOWN):
        way_path = path if way is direction else CopyPath.PLAIN
        submitter.submit(
            scratch.piece(way_path, way, run_bytes, run_count, step - run_bytes), scratch.stream
        )
        runtime.synchronize_stream(scratch.stream)
        if way is _UP:
            np.copyto(scratch.host[:used], 0x3C)
    rows, wanted = (array[:used].reshape(run_count, step) for array in (scratch.host, expected))
    return bool(
        (rows[:, :run_bytes] == wanted[:, :run_bytes]).all() and (rows[:, run_bytes:] == 0x3C).all()
    )


def _give_up(path: CopyPath, submitter: PieceSubmitter) -> None:
    log.error("a copy path moved wrong bytes: not used", extra={"path": path.value})
    if path is CopyPath.PLAIN:
        raise CudaUnavailable("plain copies move wrong bytes: go on without this GPU")
    support = submitter.support
    submitter.support = PathSupport(
        has_batches=support.has_batches and path is not CopyPath.BATCH,
        has_kernels=support.has_kernels and path is CopyPath.BATCH,
    )


def _seconds(runtime: CudaRuntime, scratch: _Scratch, submit: Callable[[], None]) -> float:
    """The device's time for it, the median of several; the host's time to submit is hidden."""
    start, end = (runtime.create_event(with_timing=True) for _ in range(2))
    times = []
    for _ in range(_REPEAT_COUNT):
        # Keeps the stream busy until everything is queued.
        runtime.copy(
            scratch.device_address, scratch.host_address, _FILLER_BYTES, _UP, scratch.stream
        )
        runtime.record_event(start, scratch.stream)
        submit()
        runtime.record_event(end, scratch.stream)
        runtime.synchronize_stream(scratch.stream)
        times.append(runtime.elapsed_seconds(start, end))
    for event in (start, end):
        runtime.destroy_event(event)
    return sorted(times)[_REPEAT_COUNT // 2]


@contextmanager
def _scratch(runtime: CudaRuntime) -> Iterator[_Scratch]:
    memory = mmap.mmap(-1, SCRATCH_BYTES)
    host = np.frombuffer(memory, np.uint8)
    address = int(host.ctypes.data)
    stream = runtime.create_stream(runtime.priorities()[0])
    device = runtime.allocate_device(SCRATCH_BYTES)
    seen, is_registered = address, True
    try:
        runtime.register_host(address, SCRATCH_BYTES)
        seen = runtime.device_address(address)
    except RegistrationRefused:
        is_registered = False
    try:
        yield _Scratch(host, address, seen, device, is_registered, stream)
    finally:
        runtime.synchronize_stream(stream)
        if is_registered:
            runtime.unregister_host(address)
        runtime.free_device(device)
        runtime.destroy_stream(stream)
