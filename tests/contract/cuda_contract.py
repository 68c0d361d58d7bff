"""What every CUDA runtime promises: run on the fake always, and on a GPU where there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.cuda.errors import CudaCode, CudaMemoryFull, CudaRefused, RegistrationRefused
from kvtier.cuda.runtime import (
    LEGACY_STREAM,
    PER_THREAD_STREAM,
    Addresses,
    CudaRuntime,
    Direction,
    Event,
    SourceOrder,
    Stream,
)
from kvtier.errors import BadRequest
from kvtier.memory import Bytes
from tests.support.pinned import HostSlab

UP, DOWN, ACROSS = (
    Direction.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST,
    Direction.DEVICE_TO_DEVICE,
)
MIB = 1 << 20


def column(*values: int) -> Addresses:
    return np.array(values, np.uint64)


class Rig:
    """A runtime with two registered slabs, device memory and two streams; closes all of it."""

    def __init__(self, runtime: CudaRuntime, *, length_bytes: int = MIB) -> None:
        self.runtime = runtime
        runtime.use_device(0)
        self.up_slab, self.down_slab = HostSlab(length_bytes), HostSlab(length_bytes)
        for slab in (self.up_slab, self.down_slab):
            runtime.register_host(slab.address, slab.length_bytes)
        self.device = runtime.allocate_device(length_bytes)
        lowest, highest = runtime.priorities()
        self.streams = [runtime.create_stream(lowest), runtime.create_stream(highest)]
        rng = np.random.default_rng(7)
        np.copyto(self.up_slab.array, rng.integers(0, 256, length_bytes, np.uint8))

    def seen(self, host_address: int) -> int:
        """As batches are given it."""
        return self.runtime.device_address(host_address)

    def put_on_device(self, stream: Stream) -> None:
        self.runtime.copy(self.device, self.up_slab.address, MIB, UP, stream)

    def on_device(self) -> Bytes:
        """What the device memory holds, once all is over."""
        for stream in (*self.streams, LEGACY_STREAM):
            self.runtime.synchronize_stream(stream)
        self.runtime.copy(self.down_slab.address, self.device, MIB, DOWN, self.streams[0])
        self.runtime.synchronize_stream(self.streams[0])
        return self.down_slab.array.copy()

    def event(self, stream: Stream, *, with_timing: bool = False) -> Event:
        event = self.runtime.create_event(with_timing=with_timing)
        self.runtime.record_event(event, stream)
        return event

    def wait_done(self, event: Event) -> None:
        for _ in range(1_000_000):
            if self.runtime.is_event_done(event):
                return
        raise AssertionError("the event is never done")

    def close(self) -> None:
        for stream in self.streams:
            self.runtime.synchronize_stream(stream)
            self.runtime.destroy_stream(stream)
        for slab in (self.up_slab, self.down_slab):
            self.runtime.unregister_host(slab.address)
        self.runtime.free_device(self.device)


class CudaContract(ABC):
    @abstractmethod
    def make_runtime(self) -> CudaRuntime: ...

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        rig = Rig(self.make_runtime())
        yield rig
        rig.close()
        assert rig.runtime.take_error() == 0

    def test_there_is_a_device_that_can_say_what_it_is(self, rig: Rig) -> None:
        assert rig.runtime.device_count() >= 1
        attributes = rig.runtime.attributes(0)
        assert attributes.pci_bus.count(":") == 2
        assert attributes.compute_capability >= (7, 0)
        assert attributes.multiprocessor_count > 0
        assert attributes.copy_engine_count > 0
        assert attributes.can_register_host

    def test_a_device_that_is_not_there_is_refused_and_nothing_is_left_behind(
        self, rig: Rig
    ) -> None:
        with pytest.raises(CudaRefused):
            rig.runtime.use_device(rig.runtime.device_count())
        assert rig.runtime.take_error() == 0

    def test_a_higher_priority_is_a_lower_number(self, rig: Rig) -> None:
        lowest, highest = rig.runtime.priorities()
        assert highest < lowest

    def test_bytes_go_up_and_come_down_again(self, rig: Rig) -> None:
        rig.put_on_device(rig.streams[0])
        assert (rig.on_device() == rig.up_slab.array).all()

    def test_copies_of_one_stream_run_in_order(self, rig: Rig) -> None:
        [stream, _] = rig.streams
        rig.put_on_device(stream)
        rig.runtime.copy(rig.device, rig.device + MIB // 2, MIB // 2, ACROSS, stream)
        half = rig.up_slab.array[MIB // 2 :]
        assert (rig.on_device() == np.concatenate([half, half])).all()

    def test_an_event_orders_two_streams(self, rig: Rig) -> None:
        first, second = rig.streams
        rig.put_on_device(first)
        rig.runtime.wait_event(second, rig.event(first))
        rig.runtime.copy(rig.down_slab.address, rig.device, MIB, DOWN, second)
        rig.wait_done(rig.event(second))
        assert (rig.down_slab.array == rig.up_slab.array).all()

    def test_a_stream_of_ours_follows_the_legacy_stream_only_by_an_event(self, rig: Rig) -> None:
        rig.put_on_device(LEGACY_STREAM)
        rig.runtime.wait_event(rig.streams[0], rig.event(LEGACY_STREAM))
        rig.runtime.copy(rig.down_slab.address, rig.device, MIB, DOWN, rig.streams[0])
        rig.wait_done(rig.event(rig.streams[0]))
        assert (rig.down_slab.array == rig.up_slab.array).all()

    def test_an_event_that_was_never_recorded_counts_as_done(self, rig: Rig) -> None:
        event = rig.runtime.create_event()
        assert rig.runtime.is_event_done(event)
        rig.runtime.wait_event(rig.streams[0], event)
        rig.runtime.synchronize_stream(rig.streams[0])
        rig.runtime.destroy_event(event)

    def test_time_between_two_events_is_the_device_s(self, rig: Rig) -> None:
        start = rig.event(rig.streams[0], with_timing=True)
        rig.put_on_device(rig.streams[0])
        end = rig.event(rig.streams[0], with_timing=True)
        rig.wait_done(end)
        assert 0 < rig.runtime.elapsed_seconds(start, end) < 1

    def test_an_event_without_timing_has_no_time(self, rig: Rig) -> None:
        start = rig.event(rig.streams[0])
        end = rig.event(rig.streams[0])
        rig.wait_done(end)
        with pytest.raises(CudaRefused) as caught:
            rig.runtime.elapsed_seconds(start, end)
        assert caught.value.code == CudaCode.INVALID_HANDLE

    def test_a_batch_copies_every_range_both_ways(self, rig: Rig) -> None:
        if not rig.runtime.has_batches:
            pytest.skip("no batches here")
        stream, size = rig.streams[0], 4096
        places = np.random.default_rng(3).permutation(64).astype(np.uint64) * np.uint64(size)
        sizes = np.full(64, size, np.uint64) - np.arange(64, dtype=np.uint64)
        up = places + np.uint64(rig.seen(rig.up_slab.address))
        on_device = np.arange(64, dtype=np.uint64) * np.uint64(size) + np.uint64(rig.device)
        down = places + np.uint64(rig.seen(rig.down_slab.address))
        np.copyto(rig.down_slab.array, 0)
        rig.runtime.copy_batch(on_device, up, sizes, SourceOrder.ANY, stream)
        rig.runtime.copy_batch(down, on_device, sizes, SourceOrder.STREAM, stream)
        rig.wait_done(rig.event(stream))
        for place, length in zip(places.tolist(), sizes.tolist(), strict=True):
            copied, rest = rig.down_slab.array[place:][:size][:length], size - length
            assert (copied == rig.up_slab.array[place:][:length]).all()
            assert not rig.down_slab.array[place + length :][:rest].any()

    @pytest.mark.parametrize("stream", [LEGACY_STREAM, Stream(1), PER_THREAD_STREAM])
    def test_a_batch_on_a_default_stream_is_refused(self, rig: Rig, stream: Stream) -> None:
        columns = column(rig.device), column(rig.seen(rig.up_slab.address)), column(64)
        with pytest.raises(BadRequest):
            rig.runtime.copy_batch(*columns, SourceOrder.STREAM, stream)

    def test_an_empty_copy_in_a_batch_is_refused(self, rig: Rig) -> None:
        targets, sources = column(rig.device, rig.device + 64), column(0, 0)
        sources += np.uint64(rig.seen(rig.up_slab.address))
        with pytest.raises(BadRequest):
            rig.runtime.copy_batch(
                targets, sources, column(64, 0), SourceOrder.STREAM, rig.streams[0]
            )

    def test_a_batch_of_none_is_nothing(self, rig: Rig) -> None:
        if rig.runtime.has_batches:
            none = column()
            rig.runtime.copy_batch(none, none, none, SourceOrder.STREAM, rig.streams[0])

    def test_memory_registers_once_and_unregisters_by_its_own_address(self, rig: Rig) -> None:
        slab = HostSlab(MIB)
        rig.runtime.register_host(slab.address, MIB)
        with pytest.raises(RegistrationRefused):
            rig.runtime.register_host(slab.address, MIB)
        with pytest.raises(CudaRefused):
            rig.runtime.unregister_host(slab.address + 4096)
        rig.runtime.unregister_host(slab.address)
        with pytest.raises(CudaRefused):
            rig.runtime.device_address(slab.address)
        rig.runtime.register_host(slab.address, MIB)
        rig.runtime.unregister_host(slab.address)
        assert rig.runtime.take_error() == 0

    def test_the_device_s_address_moves_with_the_host_s(self, rig: Rig) -> None:
        base = rig.seen(rig.up_slab.address)
        assert rig.seen(rig.up_slab.address + 8192) == base + 8192
        if rig.runtime.attributes(0).can_use_host_address:
            assert base == rig.up_slab.address

    def test_memory_that_is_not_registered_is_copied_by_plain_copies(self, rig: Rig) -> None:
        slab, stream = HostSlab(MIB), rig.streams[0]
        rig.put_on_device(stream)
        rig.runtime.copy(slab.address, rig.device, MIB, DOWN, stream)
        rig.runtime.synchronize_stream(stream)
        assert (slab.array == rig.up_slab.array).all()

    def test_too_much_device_memory_is_refused_and_nothing_is_left_behind(self, rig: Rig) -> None:
        with pytest.raises(CudaMemoryFull):
            rig.runtime.allocate_device(1 << 50)
        assert rig.runtime.take_error() == 0

    def test_device_memory_counts_until_it_is_freed(self, rig: Rig) -> None:
        free_bytes = rig.runtime.free_bytes()
        address = rig.runtime.allocate_device(256 * MIB)
        assert rig.runtime.free_bytes() <= free_bytes - 128 * MIB
        rig.runtime.free_device(address)
        assert rig.runtime.free_bytes() >= free_bytes - 64 * MIB
