"""`CudaRuntime` without a GPU: the rules and traps of CUDA, in virtual time, with a race checker.

The calls only; what they do is in `fake_machine`, and time passes as `fake_timeline` says.
"""

from __future__ import annotations

import numpy as np

from kvtier.cuda.errors import CudaCode, RegistrationRefused
from kvtier.cuda.fake_machine import FakeDevice, FakeEvent, FakeMachine
from kvtier.cuda.fake_memory import DEVICE_FIRST, FakeMemory, Fault
from kvtier.cuda.fake_timeline import Engine, Operation
from kvtier.cuda.race_checker import HOST
from kvtier.cuda.runtime import (
    LEGACY_STREAM,
    NO_RANGES,
    Addresses,
    DeviceAttributes,
    Direction,
    Event,
    Function,
    KernelLaunch,
    Ranges,
    SourceOrder,
    Stream,
    check_batch,
)
from kvtier.memory import Bytes

__all__ = ["FakeCudart", "FakeDevice"]

_ENGINES = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
    Direction.DEVICE_TO_DEVICE: Engine.COMPUTE,
}


class FakeCudart(FakeMachine):
    """See `CudaRuntime` for what each call means."""

    # ------------------------------------------------------------------------------------ devices

    def device_count(self) -> int:
        return 1

    def attributes(self, device: int) -> DeviceAttributes:
        with self._call("cudaDeviceGetAttribute"):
            _require(device == 0, CudaCode.INVALID_DEVICE)
            return DeviceAttributes(
                pci_bus="0000:00:00.0",
                compute_capability=(9, 0),
                multiprocessor_count=132,
                copy_engine_count=3,
                can_register_host=self.device.can_register,
                can_use_host_address=not self.device.is_aliased,
                numa_node=self.device.numa_node,
            )

    def use_device(self, device: int) -> None:
        with self._call("cudaSetDevice"):
            _require(device == 0, CudaCode.INVALID_DEVICE)

    def free_bytes(self) -> int:
        with self._call("cudaMemGetInfo"):
            return self.memory.device.free_bytes

    def take_error(self) -> int:
        return self._broken or 0

    # ------------------------------------------------------------------------- streams and events

    def priorities(self) -> tuple[int, int]:
        return 0, -5

    def create_stream(self, priority: int) -> Stream:
        with self._call("cudaStreamCreateWithPriority"):
            return self._add_stream(priority, is_blocking=False)

    def destroy_stream(self, stream: Stream) -> None:
        with self._call("cudaStreamDestroy"):
            _require(stream != LEGACY_STREAM, CudaCode.INVALID_HANDLE)
            self.timeline.remove_queue(self._stream(stream).queue)
            del self._streams[stream]

    def synchronize_stream(self, stream: Stream) -> None:
        with self._call("cudaStreamSynchronize"):
            found = self._stream(stream)
            self._wait(found.queue.last)
            self.checker.order_after(HOST, self.checker.clock(found.actor))

    def create_event(self, *, with_timing: bool = False) -> Event:
        with self._call("cudaEventCreateWithFlags"):
            event = Event(self._handle())
            self._events[event] = FakeEvent(with_timing)
            return event

    def destroy_event(self, event: Event) -> None:
        with self._call("cudaEventDestroy"):
            self._event(event)
            del self._events[event]

    def record_event(self, event: Event, stream: Stream) -> None:
        with self._call("cudaEventRecord"):
            found = self._event(event)
            operation = Operation("record", Engine.NONE, 0.0)
            found.clock = self._submit(stream, operation)
            found.record = operation

    def wait_event(self, stream: Stream, event: Event) -> None:
        with self._call("cudaStreamWaitEvent"):
            found, waiting = self._event(event), self._stream(stream)
            if found.record is None or found.clock is None:
                return  # As CUDA does: a wait for nothing is none.
            self._submit(stream, Operation("wait", Engine.NONE, 0.0, waits=[found.record]))
            self.checker.order_after(waiting.actor, found.clock)

    def is_event_done(self, event: Event) -> bool:
        with self._call("cudaEventQuery"):
            found = self._event(event)
            if found.record is not None and found.record.ended_at is None:
                return False
            if found.clock is not None:
                self.checker.order_after(HOST, found.clock)
            return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        with self._call("cudaEventElapsedTime"):
            return _end_of(self._event(end)) - _end_of(self._event(start))

    # ------------------------------------------------------------------------------------- memory

    def allocate_device(self, length_bytes: int) -> int:
        with self._call("cudaMalloc"):
            return self.memory.device.allocate(length_bytes)

    def free_device(self, address: int) -> None:
        with self._call("cudaFree"):
            for stream in self._streams.values():
                self._wait(stream.queue.last)
                self.checker.order_after(HOST, self.checker.clock(stream.actor))
            self.memory.device.free(address)

    def register_host(self, address: int, length_bytes: int) -> None:
        with self._call("cudaHostRegister", length_bytes / self.costs.register_bytes_per_second):
            try:
                _require(self.device.can_register, CudaCode.NOT_SUPPORTED)
                self.memory.host.register(address, length_bytes)
            except Fault as fault:
                raise RegistrationRefused(f"cudaHostRegister: {fault}") from fault

    def unregister_host(self, address: int) -> None:
        with self._call("cudaHostUnregister"):
            length_bytes = self.memory.host.unregister(address)
            self.host_writes((address, length_bytes), name="cudaHostUnregister")

    def device_address(self, host_address: int) -> int:
        with self._call("cudaHostGetDevicePointer"):
            return self.memory.host.device_address(host_address)

    # ---------------------------------------------------------------------------- copies, kernels

    @property
    def has_batches(self) -> bool:
        return self.device.has_batches

    def copy(
        self, target: int, source: int, length_bytes: int, direction: Direction, stream: Stream
    ) -> None:
        with self._call("cudaMemcpyAsync", self.costs.copy_call_seconds):
            host = {
                Direction.HOST_TO_DEVICE: source,
                Direction.DEVICE_TO_HOST: target,
                Direction.DEVICE_TO_DEVICE: None,
            }[direction]
            is_pinned = host is None or self.memory.host.is_registered(host, length_bytes)
            seconds = self.costs.engine_seconds(np.array([length_bytes], np.uint64), direction)
            steps = self.copies.plain(target, source, length_bytes, direction)
            operation = Operation("copy", _ENGINES[direction], seconds, steps)
            reads, writes = Ranges.of((source, length_bytes)), Ranges.of((target, length_bytes))
            if is_pinned:
                self._submit(stream, operation, reads, writes)
                return
            operation.seconds += length_bytes / self.costs.pageable_bytes_per_second
            if direction is Direction.HOST_TO_DEVICE:
                # The driver takes the bytes into a buffer of its own before it returns.
                self.host_reads((source, length_bytes), name="copy of pageable memory")
                reads = NO_RANGES
            clock = self._submit(stream, operation, reads, writes)
            self._wait(operation)
            if direction is Direction.DEVICE_TO_HOST:
                self.checker.order_after(HOST, clock)

    def copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        stream: Stream,
    ) -> None:
        check_batch(targets, sources, sizes, stream)
        seconds = self.costs.copy_call_seconds + self.costs.descriptor_seconds * len(sizes)
        with self._call("cuMemcpyBatchAsync", seconds):
            _require(self.has_batches, CudaCode.NOT_SUPPORTED)
            if not len(sizes):
                return
            found = self._stream(stream)
            reads, writes = self._ranges(sources, sizes), self._ranges(targets, sizes)
            self.checker.unordered("copy_batch", reads, writes)
            direction = _direction(int(reads.starts[0]), int(writes.starts[0]))
            columns = targets.tolist(), sources.tolist(), sizes.tolist()
            if order is SourceOrder.ANY:
                self.checker.early_read(found.actor, "copy_batch", reads)
                reads, steps = NO_RANGES, self.copies.batch_of_early_sources(*columns)
            else:
                steps = self.copies.batch(*columns)
            engine_seconds = self.costs.engine_seconds(sizes, direction)
            operation = Operation("copy_batch", _ENGINES[direction], engine_seconds, steps)
            self._submit(stream, operation, reads, writes)

    def load_function(self, image: bytes, name: str) -> Function:
        with self._call("cuModuleGetFunction"):
            _require(bool(image) and name in self._twins, CudaCode.SYMBOL_ABSENT)
            return Function(1 + list(self._twins).index(name))

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        with self._call("cuLaunchKernel"):
            _require(0 < launch.function <= len(self._twins), CudaCode.INVALID_HANDLE)
            assert len(launch.reads.starts) + len(launch.writes.starts), "touches nothing?"
            name, twin = list(self._twins.items())[launch.function - 1]
            reads = self._ranges(launch.reads.starts, launch.reads.sizes)
            writes = self._ranges(launch.writes.starts, launch.writes.sizes)
            memory = _DeclaredMemory(self.memory, launch)
            engine = _engine_of_kernel(reads, writes)
            bytes_count = max(int(reads.sizes.sum()), int(writes.sizes.sum()))
            rate = (
                self.costs.device_bytes_per_second
                if engine is Engine.COMPUTE
                else self.costs.kernel_bytes_per_second
            )
            operation = Operation(
                name,
                engine,
                self.costs.kernel_start_seconds + bytes_count / rate,
                [lambda: twin(memory, launch.arguments)],
            )
            self._submit(stream, operation, reads, writes)


class _DeclaredMemory(FakeMemory):
    """What a twin sees: a byte that the launch did not declare is a mistake of its caller."""

    def __init__(self, memory: FakeMemory, launch: KernelLaunch) -> None:
        super().__init__(memory.host, memory.device)
        self._declared = (launch.reads, launch.writes)

    def on_device(self, address: int, length_bytes: int) -> Bytes:
        assert any(
            bool(
                (
                    (ranges.starts <= address)
                    & (ranges.starts + ranges.sizes >= address + length_bytes)
                ).any()
            )
            for ranges in self._declared
        ), f"the launch did not declare {length_bytes} bytes at {address:#x}"
        return super().on_device(address, length_bytes)


def _require(is_right: bool, code: int) -> None:
    if not is_right:
        raise Fault(code, "")


def _end_of(event: FakeEvent) -> float:
    _require(event.with_timing and event.record is not None, CudaCode.INVALID_HANDLE)
    ended_at = event.record.ended_at if event.record is not None else None
    if ended_at is None:
        raise Fault(CudaCode.NOT_READY, "the event is not done")
    return ended_at


def _direction(source: int, target: int) -> Direction:
    if source >= DEVICE_FIRST:
        is_down = target < DEVICE_FIRST
        return Direction.DEVICE_TO_HOST if is_down else Direction.DEVICE_TO_DEVICE
    return Direction.HOST_TO_DEVICE


def _engine_of_kernel(reads: Ranges, writes: Ranges) -> Engine:
    """A kernel that touches host memory is bound by the link; others compute."""
    if len(reads.starts) and int(reads.starts.min()) < DEVICE_FIRST:
        return Engine.HOST_TO_DEVICE
    if len(writes.starts) and int(writes.starts.min()) < DEVICE_FIRST:
        return Engine.DEVICE_TO_HOST
    return Engine.COMPUTE
