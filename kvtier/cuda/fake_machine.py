"""What stands behind the fake CUDA calls: one device, its time, its memory, and one process.

Nothing runs before the host's time moves: with every call a little, with `advance` as much as the
host would do something else. What a test does as the host or as the engine's kernels it declares
(`host_reads`, `host_writes`, `compute`), so that the checker sees both sides of every conflict.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.cuda.errors import STICKY_CODES, CudaBroken, CudaCode, error_of
from kvtier.cuda.fake_copies import FakeCopies
from kvtier.cuda.fake_costs import FakeCosts
from kvtier.cuda.fake_memory import (
    DeviceMemory,
    FakeMemory,
    Fault,
    HostMemory,
    RegistrationLimits,
)
from kvtier.cuda.fake_timeline import Engine, Operation, Queue, Timeline
from kvtier.cuda.race_checker import HOST, Clock, RaceChecker
from kvtier.cuda.runtime import LEGACY_STREAM, NO_RANGES, Addresses, Event, Ranges, Stream
from kvtier.memory import Bytes

Twin = Callable[[FakeMemory, Sequence[int]], None]
"""A kernel as the host would run it: memory by device address, and the launch's arguments."""


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """What kind of machine is played."""

    is_aliased: bool = False  # Registered memory has another address on the device.
    has_batches: bool = True
    device_bytes: int = 64 << 30
    can_register: bool = True
    registration: RegistrationLimits = RegistrationLimits()
    numa_node: int | None = None


@dataclass(slots=True, eq=False)
class FakeStream:
    queue: Queue
    actor: int
    is_blocking: bool = False  # Ordered with the legacy default stream.


@dataclass(slots=True, eq=False)
class FakeEvent:
    with_timing: bool
    record: Operation | None = None
    clock: Clock | None = None


class FakeMachine:
    """One device, one process; `seed` None is the machine that the costs describe."""

    def __init__(
        self,
        *,
        seed: int | None = None,
        device: FakeDevice | None = None,
        costs: FakeCosts | None = None,
    ) -> None:
        self.device = device or FakeDevice()
        self.costs = costs or FakeCosts()
        self.timeline = Timeline(seed)
        self.checker = RaceChecker()
        self.memory = FakeMemory(
            HostMemory(self.device.registration, is_aliased=self.device.is_aliased),
            DeviceMemory(self.device.device_bytes),
        )
        self.copies = FakeCopies(self.memory, self.timeline)
        self.synchronize_count = 0  # How often the host has waited for the device.
        self.call_count = 0
        self._broken: int | None = None
        self._entered = threading.RLock()
        self._next_handle = 0x1000
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, FakeEvent] = {}
        self._twins: dict[str, Twin] = {}
        self._streams[LEGACY_STREAM] = self._new_stream(0, is_blocking=True)

    # ------------------------------------------------------------------------------ for the tests

    @property
    def now(self) -> float:
        """Virtual seconds of the host."""
        return self.timeline.now

    def advance(self, seconds: float) -> None:
        """The host does something else meanwhile; a fault is told by the next call."""
        with self._entered:
            try:
                self.timeline.run_until(self.now + seconds)
            except Fault as fault:
                self._broken = fault.code

    def compute(
        self,
        stream: Stream,
        seconds: float,
        *,
        reads: Ranges = NO_RANGES,
        writes: Ranges = NO_RANGES,
        effect: Callable[[], None] = lambda: None,
        name: str = "compute",
    ) -> None:
        """A kernel of the engine's, which does `effect` on the bytes at its end."""
        with self._call(name):
            operation = Operation(name, Engine.COMPUTE, seconds, [effect])
            self._submit(stream, operation, reads, writes)

    def host_reads(self, *ranges: tuple[int, int], name: str = "host reads") -> None:
        """Host code, or another process told by it, looks at these bytes now."""
        self.checker.operation(HOST, name, reads=Ranges.of(*ranges))

    def host_writes(self, *ranges: tuple[int, int], name: str = "host writes") -> None:
        """Host code, or another process told by it, changes these bytes now."""
        self.checker.operation(HOST, name, writes=Ranges.of(*ranges))

    def device_bytes(self, address: int, length_bytes: int) -> Bytes:
        """Device memory as it is at this moment, for a test to fill and to compare."""
        return self.memory.device.view(address, length_bytes)

    def create_blocking_stream(self) -> Stream:
        """As others in the process may make one: ordered with the legacy default stream."""
        with self._call("cudaStreamCreate"):
            return self._add_stream(0, is_blocking=True)

    def add_twin(self, name: str, twin: Twin) -> None:
        """What `load_function(…, name)` will run."""
        self._twins[name] = twin

    def assert_clean(self) -> None:
        """For the end of a test: no race, nothing still registered."""
        self.checker.assert_no_races()
        left = self.memory.host.registrations
        assert not left, f"still registered: {left}"

    # ------------------------------------------------------------------------------ for the calls

    @contextmanager
    def _call(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Time passes; what goes wrong on the device is told by whichever call comes next."""
        with self._entered:
            self.call_count += 1
            try:
                self._check_broken(name)
                self.timeline.run_until(
                    self.now + (self.costs.call_seconds if seconds is None else seconds)
                )
                yield
            except Fault as fault:
                if fault.code in STICKY_CODES:
                    self._broken = fault.code
                raise error_of(name, fault.code, str(fault)) from None

    def _check_broken(self, name: str) -> None:
        if self._broken is not None:
            raise CudaBroken(name, self._broken)

    def _submit(
        self,
        stream: Stream,
        operation: Operation,
        reads: Ranges = NO_RANGES,
        writes: Ranges = NO_RANGES,
    ) -> Clock:
        found = self._stream(stream)
        for other in self._ordered_with(found):
            if other.queue.last is not None:
                operation.waits.append(other.queue.last)
            self.checker.order_after(found.actor, self.checker.clock(other.actor))
        clock = self.checker.operation(found.actor, operation.name, reads, writes)
        self.timeline.submit(found.queue, operation)
        return clock

    def _ordered_with(self, stream: FakeStream) -> list[FakeStream]:
        """Those whose work comes first although nobody asked: the legacy default stream's rule."""
        legacy = self._streams[LEGACY_STREAM]
        if stream is legacy:
            return [
                other
                for other in self._streams.values()
                if other.is_blocking and other is not legacy
            ]
        return [legacy] if stream.is_blocking else []

    def _wait(self, operation: Operation | None) -> None:
        """The host waits: what a step must never do."""
        self.synchronize_count += 1
        if operation is not None:
            self.timeline.run_until_ended(operation)

    def _new_stream(self, priority: int, *, is_blocking: bool) -> FakeStream:
        queue = self.timeline.add_queue(priority)
        return FakeStream(queue, self.checker.add_actor(), is_blocking)

    def _add_stream(self, priority: int, *, is_blocking: bool) -> Stream:
        stream = Stream(self._handle())
        self._streams[stream] = self._new_stream(priority, is_blocking=is_blocking)
        return stream

    def _handle(self) -> int:
        self._next_handle += 0x10
        return self._next_handle

    def _stream(self, stream: Stream) -> FakeStream:
        if stream not in self._streams:
            raise Fault(CudaCode.INVALID_HANDLE, f"no stream {stream:#x}")
        return self._streams[stream]

    def _event(self, event: Event) -> FakeEvent:
        if event not in self._events:
            raise Fault(CudaCode.INVALID_HANDLE, f"no event {event:#x}")
        return self._events[event]

    def _ranges(self, addresses: Addresses, sizes: Addresses) -> Ranges:
        """For the checker, which knows host memory by the host's addresses."""
        return Ranges(self.memory.canonical(addresses), sizes)
