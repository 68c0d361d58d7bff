"""The fake's own promises: traps, faults, limits and virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cuda.errors import CudaBroken, CudaCode, RegistrationRefused
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.fake_copies import ProcessDied
from kvtier.cuda.fake_memory import FakeMemory, RegistrationLimits
from kvtier.cuda.fake_timeline import Engine
from kvtier.cuda.runtime import (
    LEGACY_STREAM,
    Direction,
    KernelLaunch,
    Ranges,
    SourceOrder,
    Stream,
)
from tests.support.pinned import HostSlab

MIB = 1 << 20
UP, DOWN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class Bench:
    """A slab, as much device memory, two streams."""

    def __init__(self, cuda: FakeCudart, *, registered: bool = True) -> None:
        self.cuda = cuda
        self.slab = HostSlab(4 * MIB)
        if registered:
            cuda.register_host(self.slab.address, 4 * MIB)
        self.device = cuda.allocate_device(4 * MIB)
        self.compute, self.copies = cuda.create_stream(0), cuda.create_stream(0)

    def batch(self, host: int, stream: Stream | None = None) -> None:
        columns = [np.array([value], np.uint64) for value in (self.device, host, MIB)]
        self.cuda.copy_batch(
            columns[0], columns[1], columns[2], SourceOrder.STREAM, stream or self.copies
        )


def test_nothing_runs_before_time_moves() -> None:
    bench = Bench(FakeCudart())
    bench.slab.array.fill(5)
    bench.cuda.copy(bench.device, bench.slab.address, MIB, UP, bench.copies)
    assert not (bench.cuda.device_bytes(bench.device, MIB) == 5).any()
    bench.cuda.advance(12e-6)
    copied = (bench.cuda.device_bytes(bench.device, MIB) == 5).sum()
    assert 0 < copied < MIB, "half a copy is what an early reader sees"
    bench.cuda.advance(12e-6)
    assert (bench.cuda.device_bytes(bench.device, MIB) == 5).all()


def test_the_host_s_address_is_a_fault_where_the_device_has_another() -> None:
    bench = Bench(FakeCudart(device=FakeDevice(is_aliased=True)))
    assert bench.cuda.device_address(bench.slab.address) != bench.slab.address
    bench.batch(bench.cuda.device_address(bench.slab.address))
    bench.cuda.synchronize_stream(bench.copies)
    bench.batch(bench.slab.address)  # Taken, and the fault comes later.
    with pytest.raises(CudaBroken, match="ILLEGAL_ADDRESS"):
        bench.cuda.synchronize_stream(bench.copies)


def test_memory_that_is_not_registered_is_a_fault_in_a_batch() -> None:
    bench = Bench(FakeCudart(), registered=False)
    bench.batch(bench.slab.address)
    bench.cuda.advance(1.0)
    with pytest.raises(CudaBroken):
        bench.cuda.free_bytes()


def test_a_fault_is_final_for_every_call_and_copies_nothing_more() -> None:
    bench = Bench(FakeCudart())
    bench.slab.array.fill(5)
    bench.cuda.copies.fail_copy(CudaCode.LAUNCH_FAILURE, after_count=1)
    event = bench.cuda.create_event()
    for part in range(3):
        offset = part * MIB
        bench.cuda.copy(bench.device + offset, bench.slab.address + offset, MIB, UP, bench.copies)
    bench.cuda.record_event(event, bench.copies)
    bench.cuda.advance(1.0)
    for call in (
        lambda: bench.cuda.is_event_done(event),
        lambda: bench.cuda.create_stream(0),
        lambda: bench.cuda.unregister_host(bench.slab.address),
        lambda: bench.cuda.copy(bench.device, bench.slab.address, 1, UP, bench.copies),
    ):
        with pytest.raises(CudaBroken, match="LAUNCH_FAILURE"):
            call()
    moved = bench.cuda.device_bytes(bench.device, 4 * MIB).reshape(4, MIB) == 5
    assert [bool(part.all()) for part in moved] == [True, False, False, False]


def test_one_registration_of_half_a_terabyte_fails_and_smaller_ones_do_not() -> None:
    cuda = FakeCudart()
    with pytest.raises(RegistrationRefused, match="cannot pin"):
        cuda.register_host(1 << 40, 512 << 30)
    cuda.register_host(1 << 40, 64 << 30)
    assert cuda.now > 6, "0.1 s a GB"


def test_registrations_have_a_total_and_do_not_overlap() -> None:
    limits = RegistrationLimits(total_bytes_max=3 * MIB)
    cuda = FakeCudart(device=FakeDevice(registration=limits))
    cuda.register_host(16 * MIB, 2 * MIB)
    for address, length in [(17 * MIB, MIB), (15 * MIB, 2 * MIB), (32 * MIB, 2 * MIB)]:
        with pytest.raises(RegistrationRefused):
            cuda.register_host(address, length)
    cuda.register_host(18 * MIB, MIB)
    assert cuda.memory.host.registrations == {16 * MIB: 2 * MIB, 18 * MIB: MIB}


def test_a_copy_across_two_registrations_is_refused() -> None:
    cuda = FakeCudart()
    slab = HostSlab(2 * MIB)
    cuda.register_host(slab.address, MIB)
    cuda.register_host(slab.address + MIB, MIB)
    device = cuda.allocate_device(2 * MIB)
    with pytest.raises(Exception, match="INVALID_VALUE"):
        cuda.copy(device, slab.address, 2 * MIB, UP, cuda.create_stream(0))


def test_a_copy_of_pageable_memory_makes_the_host_wait_for_the_stream() -> None:
    bench = Bench(FakeCudart(), registered=False)
    bench.cuda.compute(bench.copies, 0.5)
    bench.cuda.copy(bench.device, bench.slab.address, MIB, UP, bench.copies)
    assert bench.cuda.now > 0.5
    assert bench.cuda.synchronize_count == 1


def test_the_process_may_die_in_mid_copy() -> None:
    bench = Bench(FakeCudart())
    np.copyto(bench.slab.array, 0)
    bench.cuda.device_bytes(bench.device, 4 * MIB).fill(9)
    bench.cuda.copies.die_after_bytes = MIB + 1000
    bench.cuda.copy(bench.slab.address, bench.device, 4 * MIB, DOWN, bench.copies)
    with pytest.raises(ProcessDied):
        bench.cuda.advance(1.0)
    assert int((bench.slab.array == 9).sum()) == MIB + 1000


def test_blocking_streams_and_the_legacy_stream_take_turns() -> None:
    cuda = FakeCudart()
    blocking, own = cuda.create_blocking_stream(), cuda.create_stream(0)
    block = Ranges.of((cuda.allocate_device(MIB), MIB))
    cuda.compute(blocking, 1e-3, writes=block)
    cuda.compute(LEGACY_STREAM, 1e-3, writes=block)
    cuda.compute(blocking, 1e-3, writes=block)
    with pytest.raises(AssertionError, match="nothing orders them"):
        cuda.compute(own, 1e-3, reads=block)


def test_copies_both_ways_and_compute_overlap() -> None:
    bench = Bench(FakeCudart())
    other = bench.cuda.create_stream(0)
    bench.cuda.compute(bench.compute, 40e-6)
    bench.cuda.copy(bench.device, bench.slab.address, 2 * MIB, UP, bench.copies)
    bench.cuda.copy(bench.slab.address + 2 * MIB, bench.device + 2 * MIB, 2 * MIB, DOWN, other)
    start = bench.cuda.now
    for stream in (bench.compute, bench.copies, other):
        bench.cuda.synchronize_stream(stream)
    assert bench.cuda.now - start < 60e-6
    for engine in (Engine.HOST_TO_DEVICE, Engine.DEVICE_TO_HOST):
        assert bench.cuda.timeline.busy_seconds(engine) == pytest.approx(39e-6, rel=0.1)


def test_a_copy_engine_takes_what_was_ready_first_whatever_the_priority() -> None:
    bench = Bench(FakeCudart())
    urgent = bench.cuda.create_stream(-5)
    bench.cuda.copy(bench.device, bench.slab.address, 4 * MIB, UP, bench.copies)
    late = bench.cuda.create_event(with_timing=True)
    other = bench.cuda.allocate_device(4096)
    bench.cuda.copy(other, bench.slab.address, 4096, UP, urgent)
    bench.cuda.record_event(late, urgent)
    bench.cuda.synchronize_stream(urgent)
    assert bench.cuda.now > 4 * MIB / 54e9


def test_the_compute_engine_goes_by_priority() -> None:
    cuda = FakeCudart()
    low, high = cuda.create_stream(0), cuda.create_stream(-5)
    order: list[str] = []
    cuda.compute(low, 1e-3, effect=lambda: order.append("running"))
    cuda.compute(low, 1e-3, effect=lambda: order.append("low"))
    cuda.compute(high, 1e-3, effect=lambda: order.append("high"))
    cuda.advance(1.0)
    assert order == ["running", "high", "low"]


def test_a_kernel_runs_as_its_twin_on_what_was_declared() -> None:
    cuda = FakeCudart(device=FakeDevice(is_aliased=True))
    bench = Bench(cuda)

    def double(memory: FakeMemory, arguments: object) -> None:
        [target, source, count] = list(arguments)  # type: ignore[call-overload]
        np.multiply(memory.on_device(source, count), 2, out=memory.on_device(target, count))

    cuda.add_twin("double", double)
    function = cuda.load_function(b"cubin", "double")
    source = cuda.device_address(bench.slab.address)
    bench.slab.array.fill(21)
    touched = {
        "reads": Ranges.of((source, MIB)),
        "writes": Ranges.of((bench.device, MIB)),
    }
    cuda.launch(
        KernelLaunch(function, 4, 1024, [bench.device, source, MIB], **touched), bench.copies
    )
    cuda.synchronize_stream(bench.copies)
    assert (cuda.device_bytes(bench.device, MIB) == 42).all()
    cuda.launch(
        KernelLaunch(function, 4, 1024, [bench.device, source, MIB + 1], **touched), bench.copies
    )
    with pytest.raises(AssertionError, match="did not declare"):
        cuda.synchronize_stream(bench.copies)


def test_a_seed_replays_its_run() -> None:
    def run(seed: int) -> list[tuple[str, float | None]]:
        bench = Bench(FakeCudart(seed=seed))
        for _ in range(4):
            bench.cuda.copy(bench.device, bench.slab.address, MIB, UP, bench.copies)
            bench.cuda.compute(bench.compute, 1e-3)
        bench.cuda.advance(1.0)
        return [(operation.name, operation.ended_at) for operation in bench.cuda.timeline.history]

    assert run(4) == run(4)
    assert run(4) != run(5)
