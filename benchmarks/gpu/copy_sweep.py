"""Stage: runs of 4 KiB to 2 MiB by every path and direction, and whole blocks by our streams.

Figures are shares of the best plain copy of pinned memory, which is what the link can do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.findings import Findings, gigabytes_per_second
from benchmarks.gpu.kv import BLOCKS_OUTSIDE, VLLM, Kv, Shape, best_copy_seconds
from benchmarks.gpu.rig import FILLER_BYTES, Rig, Stopwatch
from benchmarks.gpu.slabs import Slab
from kvtier.cuda.copy_paths import CopyPath
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.copy_submit import KernelCopies, PieceSubmitter
from kvtier.cuda.path_trials import give_up_wrong_paths
from kvtier.cuda.runtime import Direction, Stream
from kvtier.cuda.streams import CopyTicket

MIB = 1 << 20
UP, DOWN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
_NAMES = {UP: "up", DOWN: "down"}

ONE_WAY_LEAST, BOTH_WAYS_LEAST = 0.9, 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    run_bytes: tuple[int, ...] = tuple(kib << 10 for kib in (4, 8, 16, 28, 32, 64, 256, 2048))
    piece_bytes_max: int = 32 * MIB
    piece_runs_max: int = 4096  # A kernel's table has no more rows.
    best_bytes: int = 256 * MIB
    repeat_count: int = 5
    shape: Shape = Shape()


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """As much of each side for every direction, so that both can go at once."""

    host: int
    seen: int
    device: int
    piece_bytes_max: int

    def piece(self, path: CopyPath, direction: Direction, run_bytes: int, runs: int) -> Piece:
        """Runs in a row on the host, in another order on the device."""
        places = np.arange(runs, dtype=np.uint64) * np.uint64(run_bytes)
        shuffled = np.random.default_rng(runs).permutation(places)
        first = np.uint64(0 if direction is UP else self.piece_bytes_max)
        return Piece(
            path,
            direction,
            shuffled + np.uint64(self.device) + first,
            places + np.uint64(self.host) + first,
            places + np.uint64(self.seen) + first,
            np.full(runs, run_bytes, np.uint64),
        )


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    kernels = rig.make_kernels()
    submitter = PieceSubmitter(rig.runtime, kernels)
    wrong = give_up_wrong_paths(rig.runtime, submitter)
    findings.claim(f"every path moves the right bytes {wrong or ''}".strip(), not wrong)
    findings.claim("kernels are there", kernels is not None)
    tried = submitter.support
    best = _sweep(rig, findings, submitter, sizes)
    findings.claim("no path was refused", submitter.support == tried)
    for order in (BLOCKS_OUTSIDE, VLLM):
        if rig.is_late(5.0):
            findings.cut_short(f"blocks {order}")
            continue
        _measure_blocks(rig, findings, (kernels, order, best), sizes)


def _sweep(
    rig: Rig, findings: Findings, submitter: PieceSubmitter, sizes: Sizes
) -> dict[Direction, float]:
    """Bytes a second of the best plain copy, by direction."""
    runtime = rig.runtime
    used = max(2 * sizes.piece_bytes_max, sizes.best_bytes)
    slab = Slab(used + FILLER_BYTES)
    device = runtime.allocate_device(used + FILLER_BYTES)
    runtime.register_host(slab.address, slab.length_bytes)
    memory = _Memory(
        slab.address, runtime.device_address(slab.address), device, sizes.piece_bytes_max
    )
    seconds = best_copy_seconds(rig, device, slab.address, sizes.best_bytes, sizes.repeat_count)
    best = {direction: sizes.best_bytes / one for direction, one in seconds.items()}
    for direction, rate in best.items():
        findings.note(f"best_plain_{_NAMES[direction]}_gigabytes_per_second", round(rate / 1e9, 2))
    lowest, highest = runtime.priorities()
    streams = [runtime.create_stream(highest), runtime.create_stream(lowest)]
    watch = Stopwatch(rig, streams[0], filler=(device + used, slab.address + used))
    try:
        for run_bytes in sizes.run_bytes:
            for paths in _ways(submitter):
                if rig.is_late(20.0):
                    findings.cut_short(f"runs of {run_bytes}: {paths}")
                    continue
                pieces = [
                    memory.piece(path, direction, run_bytes, _run_count(run_bytes, sizes))
                    for direction, path in paths.items()
                ]
                taken = _seconds(watch, submitter, (pieces, streams), sizes.repeat_count)
                findings.add("runs", _row(paths, pieces, taken, best))
    finally:
        for stream in streams:
            runtime.synchronize_stream(stream)
            runtime.destroy_stream(stream)
        watch.close()
        runtime.unregister_host(slab.address)
        runtime.free_device(device)
        slab.close()
    return best


def _ways(submitter: PieceSubmitter) -> list[dict[Direction, CopyPath]]:
    """Each path up and down that works here, and pairs of them at the same time."""
    support = submitter.support
    up, down = [CopyPath.PLAIN], [CopyPath.PLAIN]
    if support.has_batches:
        up, down = [*up, CopyPath.BATCH], [*down, CopyPath.BATCH]
    if support.has_kernels:
        up, down = [*up, CopyPath.KERNEL], [*down, CopyPath.STAGED]
    both: list[dict[Direction, CopyPath]] = [
        {UP: one, DOWN: other} for one, other in zip(up[1:], down[1:], strict=True)
    ]
    return [*({UP: path} for path in up), *({DOWN: path} for path in down), *both]


def _run_count(run_bytes: int, sizes: Sizes) -> int:
    return max(1, min(sizes.piece_runs_max, sizes.piece_bytes_max // run_bytes))


def _seconds(
    watch: Stopwatch,
    submitter: PieceSubmitter,
    pieces_of: tuple[list[Piece], list[Stream]],
    repeat_count: int,
) -> float:
    pieces, streams = pieces_of

    def queue() -> None:
        for piece, stream in zip(pieces, streams, strict=False):
            submitter.submit(piece, stream)

    other = streams[1] if len(pieces) > 1 else None
    return watch.seconds(queue, repeat_count=repeat_count, other=other)


def _row(
    paths: dict[Direction, CopyPath],
    pieces: list[Piece],
    seconds: float,
    best: dict[Direction, float],
) -> dict[str, object]:
    """Both ways: bytes of one way, against the slower of both."""
    bytes_count = pieces[0].bytes_count
    link = min(best[direction] for direction in paths)
    return {
        "run_bytes": int(pieces[0].sizes[0]),
        "run_count": len(pieces[0].sizes),
        "path": " + ".join(path.value for path in paths.values()),
        "direction": " + ".join(_NAMES[direction] for direction in paths),
        "gigabytes_per_second": gigabytes_per_second(bytes_count, seconds),
        "of_best": round(bytes_count / seconds / link, 3),
    }


def _measure_blocks(
    rig: Rig,
    findings: Findings,
    how: tuple[KernelCopies | None, str, dict[Direction, float]],
    sizes: Sizes,
) -> None:
    """Through planning, submitting and polling, as an engine's worker does it."""
    kernels, order, best = how
    kv = Kv(rig, sizes.shape, order, kernels=kernels)
    try:
        kv.fill_device(3)
        half = len(kv.blocks) // 2
        first, second = kv.blocks[:half], kv.blocks[half:]
        asks: dict[str, tuple[list[Callable[[], CopyTicket]], int, float, float]] = {
            "offload": ([lambda: kv.offload(kv.blocks)], len(kv.blocks), best[DOWN], ONE_WAY_LEAST),
            "onboard": ([lambda: kv.onboard(kv.blocks)], len(kv.blocks), best[UP], ONE_WAY_LEAST),
            "both": (
                [lambda: kv.onboard(first), lambda: kv.offload(second)],
                half,
                min(best.values()),
                BOTH_WAYS_LEAST,
            ),
        }
        for name, (ask, count, link, least) in asks.items():
            taken = sorted(kv.seconds_of(*ask) for _ in range(3))[1]
            rate = count * sizes.shape.block_bytes / taken
            findings.add(
                "blocks",
                {
                    "order": order,
                    "what": name,
                    "gigabytes_per_second": round(rate / 1e9, 2),
                    "of_best": round(rate / link, 3),
                },
            )
            if order == BLOCKS_OUTSIDE:
                findings.target(
                    f"{name} of whole blocks: share of the link", rate / link, least=least
                )
    finally:
        kv.close()
