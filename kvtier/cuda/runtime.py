"""What kvtier asks of CUDA, and no more: `Cudart` answers on a GPU, `FakeCudart` without one.

Addresses, streams and events are plain numbers, so that an engine's own (a torch stream's handle,
a tensor's address) can be used as they are. A stream given to a copy belongs to the device that the
calling thread uses: every thread calls `use_device` once before anything else.

What holds for every implementation (tests/contract/cuda_contract.py):
  (0) A call that raises has queued nothing, and leaves no error behind for another library to
      find in this thread.
  (1) CudaBroken is final: every later call that reaches the device raises it too.
  (2) `wait_event` waits for the newest record made before the call, and for nothing if there is
      none; an event that was never recorded counts as done.
  (3) Streams made here never order themselves after the legacy default stream, which engines
      compute on: only events order one stream after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import BadRequest

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Function = NewType("Function", int)
"""A loaded kernel."""

Addresses = npt.NDArray[np.uint64]

LEGACY_STREAM = Stream(0)
"""What an engine that asked for no stream computes on."""

PER_THREAD_STREAM = Stream(2)
"""Means another stream in every thread: never to be passed on, refused everywhere."""


class Direction(IntEnum):
    """Which way a plain copy goes; the values are those of cudaMemcpyKind."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class SourceOrder(IntEnum):
    """When a batch may read its sources; the values are those of cudaMemcpySrcAccessOrder."""

    STREAM = 1  # After all that the stream waits for: the only right one while sources change.
    ANY = 3  # At any time from the call on: for host memory that is quiet until the batch ends.


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """What decides between paths; a None is a question this CUDA does not answer."""

    pci_bus: str
    compute_capability: tuple[int, int]
    multiprocessor_count: int
    copy_engine_count: int
    can_register_host: bool
    # False: kernels and batches must be given `device_address`, never the host's address.
    can_use_host_address: bool
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Byte ranges of memory, in no order: what one operation reads, or what it writes."""

    starts: Addresses
    sizes: Addresses

    @classmethod
    def of(cls, *ranges: tuple[int, int]) -> Ranges:
        """From (start, size) pairs."""
        columns = np.array(ranges, np.uint64).reshape(-1, 2)
        return cls(columns[:, 0], columns[:, 1])


NO_RANGES = Ranges.of()


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a loaded kernel; `reads` and `writes` are what it touches, for the checker."""

    function: Function
    grid_count: int
    block_threads: int
    arguments: Sequence[int]  # 64 bits each: kernels of ours take pointers and wide integers only.
    shared_bytes: int = 0
    reads: Ranges = field(default=NO_RANGES)
    writes: Ranges = field(default=NO_RANGES)


class CudaRuntime(Protocol):
    """A narrow CUDA; see the module for what every implementation promises."""

    # ------------------------------------------------------------------------------------ devices

    def device_count(self) -> int: ...

    def attributes(self, device: int) -> DeviceAttributes: ...

    def use_device(self, device: int) -> None:
        """For the calling thread."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has allocated."""
        ...

    def take_error(self) -> int:
        """The result code pending in this thread, which is none afterwards."""
        ...

    # ------------------------------------------------------------------------- streams and events

    def priorities(self) -> tuple[int, int]:
        """(lowest, highest): numbers fall as priority rises."""
        ...

    def create_stream(self, priority: int) -> Stream: ...

    def destroy_stream(self, stream: Stream) -> None: ...

    def synchronize_stream(self, stream: Stream) -> None:
        """Wait until all work of the stream has ended; never on a step's path."""
        ...

    def create_event(self, *, with_timing: bool = False) -> Event: ...

    def destroy_event(self, event: Event) -> None: ...

    def record_event(self, event: Event, stream: Stream) -> None: ...

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Later work of the stream waits; the caller does not."""
        ...

    def is_event_done(self, event: Event) -> bool:
        """Whether all work before the newest record has ended; never waits."""
        ...

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Device time between two events with timing, both done."""
        ...

    # ------------------------------------------------------------------------------------- memory

    def allocate_device(self, length_bytes: int) -> int: ...

    def free_device(self, address: int) -> None:
        """Waits for the device: for the end of a process, not for a step."""
        ...

    def register_host(self, address: int, length_bytes: int) -> None:
        """Pin memory of this process and map it for the device, as one registration."""
        ...

    def unregister_host(self, address: int) -> None:
        """By the exact address that was registered."""
        ...

    def device_address(self, host_address: int) -> int:
        """Where kernels and batches see registered memory."""
        ...

    # --------------------------------------------------------------------------- copies, kernels

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` works here."""
        ...

    def copy(
        self, target: int, source: int, length_bytes: int, direction: Direction, stream: Stream
    ) -> None:
        """Queue one copy; host addresses are the host's own.

        Of memory that is not registered the call may wait for the stream and for the bytes.
        """
        ...

    def copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        stream: Stream,
    ) -> None:
        """Queue copies that end in no order; host memory is given by its device address.

        Never on the legacy default stream. No size is 0, and no two ranges overlap if one of
        them is written.
        """
        ...

    def load_function(self, image: bytes, name: str) -> Function:
        """A kernel of a cubin; stays loaded until the process ends."""
        ...

    def launch(self, launch: KernelLaunch, stream: Stream) -> None: ...


def check_batch(targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
    """What CUDA would answer with a fault, or with nothing at all. Raises BadRequest."""
    if stream in (LEGACY_STREAM, 1, PER_THREAD_STREAM):
        raise BadRequest("a batch of copies needs a stream of its own, not a default one")
    columns = (targets, sources, sizes)
    if any(column.dtype != np.uint64 or column.ndim != 1 for column in columns):
        raise BadRequest("a batch of copies is given as columns of uint64")
    if not len(targets) == len(sources) == len(sizes):
        raise BadRequest("a batch of copies has columns of different lengths")
    if not bool(sizes.all()):
        raise BadRequest("a batch of copies must not hold an empty one")
