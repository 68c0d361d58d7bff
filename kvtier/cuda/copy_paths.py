"""Which way bytes are copied: a pure choice by direction, length of the runs and their number.

A copy engine moves long runs at the speed of the link and does not disturb compute. It is slow at
short ones: on a PCIe 5 host, runs below 28 KiB go up at a tenth of the link's speed, however many
are in the batch. A kernel of a few blocks of threads reads short runs from host memory at half the
speed of the link or more; downwards it gathers them into device memory, and one long copy takes
them from there, because a kernel that writes to the host is in the way of compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.cuda.runtime import Direction


class CopyPath(Enum):
    PLAIN = "plain"  # One call for each run: all there is for memory that is not pinned.
    BATCH = "batch"  # One call for all runs, by the copy engine.
    KERNEL = "kernel"  # Gather from host memory, scatter to the device.
    STAGED = "staged"  # Gather on the device, then long copies down.


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Where one path gives way to another; start values from public reports, to be calibrated."""

    small_run_bytes: int = 28 << 10
    # Fewer runs than these are over before a kernel has started.
    kernel_count_min: int = 16
    # A copy engine finishes what it has begun: 32 MiB are 0.6 ms of PCIe 5, the longest that an
    # engine's own small copy, or a load behind a load, may have to wait.
    piece_bytes_max: int = 32 << 20
    # A batch costs the host half a microsecond a run before its first byte moves: the first one is
    # short, so that the link is busy soon, and each may be twice as long as the one before, up to
    # 2 ms of one call.
    piece_runs_first: int = 64
    piece_runs_max: int = 4096


@dataclass(frozen=True, slots=True)
class PathSupport:
    """What works here; a path that was refused once is taken off."""

    has_batches: bool
    has_kernels: bool = False


def choose_path(
    direction: Direction,
    *,
    run_bytes: int,
    run_count: int,
    is_registered: bool,
    support: PathSupport,
    limits: PathLimits = PathLimits(),
) -> CopyPath:
    """For `run_count` runs of about `run_bytes` each."""
    if not is_registered:
        return CopyPath.PLAIN
    is_small = run_bytes < limits.small_run_bytes and run_count >= limits.kernel_count_min
    if is_small and support.has_kernels:
        is_up = direction is Direction.HOST_TO_DEVICE
        return CopyPath.KERNEL if is_up else CopyPath.STAGED
    return CopyPath.BATCH if support.has_batches else CopyPath.PLAIN
