"""What a stage of the GPU check works with: a runtime, time, compute to run beside, and copies.

All of it can be a stand-in, so that the stages themselves are tested without a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvtier.cuda.copy_submit import KernelCopies
from kvtier.cuda.cudart import open_cudart
from kvtier.cuda.errors import CudaRefused, CudaUnavailable
from kvtier.cuda.kernel_cache import KernelCache, NvrtcCompiler
from kvtier.cuda.kernel_copies import load_run_kernels
from kvtier.cuda.runtime import CudaRuntime, Direction, Event, Stream

FILLER_BYTES = 16 << 20


class StageLate(Exception):
    """The stage's time is up in the middle of a measurement."""


class Work(Protocol):
    """What an engine computes, queued on a stream; every call returns before it has run."""

    def gemm(self, stream: Stream) -> None:
        """One large multiplication, bound by arithmetic."""
        ...

    def decode_step(self, stream: Stream) -> None:
        """A step of many requests with one token each, bound by memory."""
        ...

    def prefill(self, stream: Stream, token_count: int) -> None:
        """All layers over one prompt."""
        ...


@dataclass(slots=True, eq=False)
class Rig:
    """One device for one stage."""

    runtime: CudaRuntime
    make_work: Callable[[], Work]
    make_kernels: Callable[[], KernelCopies | None]
    kernel_cache: KernelCache | None
    now: Callable[[], float] = time.monotonic
    rest: Callable[[float], None] = time.sleep
    deadline: float = float("inf")
    device: int = 0
    stand_in: bool = False
    # Where the reference engine computes: what `kvtier.engine.device.open_device` opens, or this.
    make_engine_device: Callable[[Any, Any], Any] | None = None
    _work: Work | None = field(default=None)

    @property
    def work(self) -> Work:
        if self._work is None:
            self._work = self.make_work()
        return self._work

    def is_late(self, spare_seconds: float = 0.0) -> bool:
        """Whether to begin nothing more: better fewer figures than none."""
        return self.now() + spare_seconds > self.deadline

    def wait_done(self, event: Event, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Raises StageLate."""
        while not self.runtime.is_event_done(event):
            meanwhile()
            self.rest(20e-6)
            if self.is_late():
                raise StageLate("the device did not end in the stage's time")


def open_rig(seconds: float, cache_folder: Path) -> Rig:
    """On the first GPU. Raises CudaUnavailable."""
    runtime = open_cudart()
    runtime.use_device(0)
    cache = None
    try:
        cache = KernelCache(cache_folder, NvrtcCompiler())
    except CudaUnavailable as error:
        _say_no_kernels(error)

    def make_work() -> Work:
        from benchmarks.gpu.torch_work import TorchWork

        return TorchWork()

    def make_kernels() -> KernelCopies | None:
        try:
            return load_run_kernels(runtime, cache, 0) if cache is not None else None
        except (CudaRefused, CudaUnavailable) as error:
            _say_no_kernels(error)
            return None  # The stage finds that wrong, and measures what is left.

    return Rig(runtime, make_work, make_kernels, cache, deadline=time.monotonic() + seconds)


def _say_no_kernels(error: Exception) -> None:
    sys.stdout.write(f"    no kernels: {error}\n")


class Stopwatch:
    """Device time of what is queued, by events, the median of several; the time that the host
    takes to queue it is hidden behind a copy that goes first."""

    def __init__(self, rig: Rig, stream: Stream, *, filler: tuple[int, int] | None = None) -> None:
        """`filler`: (device, host) addresses of FILLER_BYTES that nobody else uses."""
        self._rig, self._stream, self._filler = rig, stream, filler
        runtime = rig.runtime
        self._start, self._end = (runtime.create_event(with_timing=True) for _ in range(2))

    def seconds(
        self, queue: Callable[[], None], *, repeat_count: int = 5, other: Stream | None = None
    ) -> float:
        """`other`: a second stream that `queue` uses, to begin and to end with the first."""
        times = []
        for _ in range(repeat_count):
            times.append(self._once(queue, other))
            if self._rig.is_late():
                break
        return sorted(times)[len(times) // 2]

    def close(self) -> None:
        for event in (self._start, self._end):
            self._rig.runtime.destroy_event(event)

    def _once(self, queue: Callable[[], None], other: Stream | None) -> float:
        runtime, stream = self._rig.runtime, self._stream
        if self._filler is not None:
            device, host = self._filler
            runtime.copy(device, host, FILLER_BYTES, Direction.HOST_TO_DEVICE, stream)
        runtime.record_event(self._start, stream)
        if other is not None:
            runtime.wait_event(other, self._start)
        queue()
        if other is not None:
            joined = runtime.create_event()
            runtime.record_event(joined, other)
            runtime.wait_event(stream, joined)
            runtime.destroy_event(joined)
        runtime.record_event(self._end, stream)
        self._rig.wait_done(self._end)
        return runtime.elapsed_seconds(self._start, self._end)
