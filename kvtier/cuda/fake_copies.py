"""How a fake GPU moves bytes: in pieces, in any order, up to the moment its process dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.cuda.fake_memory import FakeMemory, Fault, host_view
from kvtier.cuda.fake_timeline import Step, Timeline
from kvtier.cuda.runtime import Direction
from kvtier.memory import Bytes

Resolve = Callable[[int, int], Bytes]


class ProcessDied(BaseException):
    """The process that copies has been killed in mid-copy: nothing after this line runs."""


class FakeCopies:
    """Makes the steps of copies; counts the bytes that have landed."""

    def __init__(self, memory: FakeMemory, timeline: Timeline) -> None:
        self._memory = memory
        self._timeline = timeline
        self.copied_bytes = 0
        self.die_after_bytes: int | None = None
        self._fault: tuple[int, int] | None = None  # (copies left until then, code)

    def fail_copy(self, code: int, *, after_count: int = 0) -> None:
        """The copy after the next `after_count` ones ends with `code` on the device."""
        self._fault = after_count, code

    def plain(
        self, target: int, source: int, length_bytes: int, direction: Direction
    ) -> list[Step]:
        """Two halves, or any two parts: whoever looks in between sees a torn copy."""
        resolve_target, resolve_source = self._sides(direction)
        middle = self._timeline.random_part(length_bytes)
        parts = [(0, middle), (middle, length_bytes - middle)]

        def step(first: int, count: int) -> Step:
            return lambda: self._move(
                resolve_target(target, length_bytes)[first : first + count],
                resolve_source(source, length_bytes)[first : first + count],
            )

        return [self._maybe_fault, *(step(first, count) for first, count in parts)]

    def batch(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> list[Step]:
        """A first part of the copies, drawn by chance, and later the rest."""
        order = self._timeline.random_order(len(sizes))
        middle = self._timeline.random_part(len(sizes))
        on_device = self._memory.on_device

        def step(indices: Sequence[int]) -> Step:
            def run() -> None:
                for index in indices:
                    size = sizes[index]
                    self._move(on_device(targets[index], size), on_device(sources[index], size))

            return run

        return [self._maybe_fault, step(order[:middle]), step(order[middle:])]

    def batch_of_early_sources(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> list[Step]:
        """As `batch`, with the sources read now: as early as ANY allows."""
        taken = [
            np.array(self._memory.on_device(source, size))
            for source, size in zip(sources, sizes, strict=True)
        ]

        def run() -> None:
            for target, data in zip(targets, taken, strict=True):
                self._move(self._memory.on_device(target, len(data)), data)

        return [self._maybe_fault, run]

    def _sides(self, direction: Direction) -> tuple[Resolve, Resolve]:
        device = self._memory.device.view
        target = host_view if direction is Direction.DEVICE_TO_HOST else device
        source = host_view if direction is Direction.HOST_TO_DEVICE else device
        return target, source

    def _move(self, target: Bytes, source: Bytes) -> None:
        left = None if self.die_after_bytes is None else self.die_after_bytes - self.copied_bytes
        if left is not None and len(source) > left:
            np.copyto(target[:left], source[:left])
            self.copied_bytes += left
            raise ProcessDied(f"after {self.copied_bytes} bytes")
        np.copyto(target, source)
        self.copied_bytes += len(source)

    def _maybe_fault(self) -> None:
        if self._fault is None:
            return
        count, code = self._fault
        self._fault = (count - 1, code) if count else None
        if count == 0:
            raise Fault(code, "made to fail")
