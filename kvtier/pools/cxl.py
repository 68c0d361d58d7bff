"""Memory for a CXL tier: on a node without processors, on a dax device, or emulated.

One `CxlMemory` is all that a tier needs: a source for its stock of slabs, how many there may be,
how bytes are copied to and from them, and whether engines may map them. A `DramPool` of such slabs
is the tier's pool: it asks nothing of a slab but its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.io.copy import copy_batch
from kvtier.io.dax import DaxDevice
from kvtier.io.throttle import EmulatedSpeed, Throttle, ThrottleStats
from kvtier.memory import Bytes
from kvtier.pools.dax import DaxSource
from kvtier.pools.slabs import Slab
from kvtier.pools.source import MemorySource, SlabSource

CopyBatch = Callable[[Sequence[Bytes], Sequence[Bytes]], None]

# A node without processors has few users but us; the kernel's own part is taken off already.
RESERVE_BYTES = 16 << 20
# Engines give up what a former daemon lent them as soon as they see that it is gone.
_LENT_SECONDS_MAX = 5.0
# More than most processors' caches hold, in pieces, as far as the time goes.
_MEASURE_BYTES_MAX = 64 << 20
_MEASURE_PIECE_BYTES = 4 << 20
_MEASURE_SECONDS_MAX = 0.05


@dataclass(frozen=True, slots=True)
class ClientSlab:
    """What a client needs to map a slab."""

    fd: int  # The receiver closes it.
    offset: int


class CxlMemory(Protocol):
    """What the server needs of a CXL tier's memory."""

    @property
    def label(self) -> str:
        """For statistics and logs; begins with "emulated" where that is so."""
        ...

    @property
    def source(self) -> SlabSource: ...

    @property
    def slab_bytes(self) -> int: ...

    @property
    def slab_count_max(self) -> int: ...

    @property
    def reserve_bytes(self) -> int:
        """What the stock leaves to others."""
        ...

    @property
    def copy_batch(self) -> CopyBatch:
        """Copies to and from slots; every one that the daemon makes goes through this."""
        ...

    def open_for_client(self, slab: Slab) -> ClientSlab | None:
        """None: engines may not map it; blocks reach them through DRAM."""
        ...

    def throttle_stats(self) -> ThrottleStats | None:
        """Of an emulated tier."""
        ...

    def close(self) -> None: ...


class NodeMemory:
    """A NUMA node's; implements `CxlMemory`. A slab is a memfd, so that engines may map it."""

    reserve_bytes = RESERVE_BYTES

    def __init__(
        self,
        node: int,
        *,
        slab_bytes: int,
        budget_bytes: int | None = None,
        is_single_tenant: bool = False,
    ) -> None:
        """Raises ConfigError for a node without memory, or too little of it."""
        self._is_single_tenant = is_single_tenant
        # Somebody may read it under a lease when the daemon ends.
        self.source = MemorySource(node, punches=not is_single_tenant)
        self.label = self.source.name
        room_bytes = self.source.room_bytes() or 0
        wanted_bytes = max(0, room_bytes - RESERVE_BYTES) if budget_bytes is None else budget_bytes
        self.slab_bytes = slab_bytes
        self.slab_count_max = _slab_count(self.label, wanted_bytes, slab_bytes)
        self.copy_batch: CopyBatch = copy_batch

    def open_for_client(self, slab: Slab) -> ClientSlab | None:
        if not self._is_single_tenant:
            return None
        return ClientSlab(os.open(f"/proc/self/fd/{slab.fd}", os.O_RDONLY | os.O_CLOEXEC), 0)

    def throttle_stats(self) -> ThrottleStats | None:
        return None

    def close(self) -> None:
        """Nothing is held but the slabs."""


class DaxMemory:
    """A dax device's; implements `CxlMemory`."""

    reserve_bytes = 0

    def __init__(
        self,
        device: DaxDevice,
        *,
        slab_bytes: int,
        generation: int,
        budget_bytes: int | None = None,
        is_single_tenant: bool = False,
    ) -> None:
        """Takes the device; ConfigError as from `DaxSource`."""
        self.source = DaxSource(
            device,
            slab_bytes=slab_bytes,
            generation=generation,
            is_single_tenant=is_single_tenant,
            wait_seconds=_LENT_SECONDS_MAX if is_single_tenant else 0.0,
        )
        self.label = self.source.name
        self.slab_bytes = slab_bytes
        count = self.source.slab_count_max
        if budget_bytes is not None:
            try:
                count = min(count, _slab_count(self.label, budget_bytes, slab_bytes))
            except ConfigError:
                self.source.close()
                raise
        self.slab_count_max = count
        self.copy_batch: CopyBatch = copy_batch
        self._is_single_tenant = is_single_tenant

    def open_for_client(self, slab: Slab) -> ClientSlab | None:
        if not self._is_single_tenant:
            return None
        return ClientSlab(self.source.open_for_client(), self.source.offset_of(slab))

    def throttle_stats(self) -> ThrottleStats | None:
        return None

    def close(self) -> None:
        self.source.close()


class EmulatedMemory:
    """This machine's memory, its copies held back; implements `CxlMemory`.

    Engines may not map it: they would copy at the speed that it really has.
    """

    def __init__(
        self, speed: EmulatedSpeed, clock: Clock, *, slab_bytes: int, budget_bytes: int
    ) -> None:
        self.source = MemorySource()
        self.label = f"emulated: {speed}"
        self.slab_bytes = slab_bytes
        self.slab_count_max = _slab_count(self.label, budget_bytes, slab_bytes)
        self.reserve_bytes = 256 << 20  # As for DRAM, which it is.
        self._throttle = Throttle(speed, clock.now)
        self.copy_batch: CopyBatch = self._throttle.copy_batch

    def open_for_client(self, slab: Slab) -> ClientSlab | None:
        return None

    def throttle_stats(self) -> ThrottleStats | None:
        return self._throttle.stats()

    def close(self) -> None:
        """Nothing is held but the slabs."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What copies of one thread reach between ordinary memory and a slab, and within the former."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    dram_bytes_per_second: float


def measure_speed(memory: CxlMemory, slab: Slab, clock: Clock) -> MeasuredSpeed:
    """The mean of a few copies; what the slab holds is lost. In a thread: it takes a moment, and
    three times `_MEASURE_SECONDS_MAX` and one piece at most.
    """
    length_bytes = min(slab.length_bytes, _MEASURE_BYTES_MAX)
    piece_bytes = min(length_bytes, _MEASURE_PIECE_BYTES)
    firsts = range(0, length_bytes - piece_bytes + 1, piece_bytes)
    inside = [slab.mapping.array[first : first + piece_bytes] for first in firsts]
    ordinary = np.ones(length_bytes, np.uint8)  # Zeros would all be one page.
    outside = [ordinary[first : first + piece_bytes] for first in firsts]
    buffer = np.ones(piece_bytes, np.uint8)

    def rate(copy: CopyBatch, pairs: Iterable[tuple[Bytes, Bytes]]) -> float:
        began_at, count = clock.now(), 0
        for target, source in pairs:
            copy([target], [source])
            count += 1
            if clock.now() - began_at > _MEASURE_SECONDS_MAX:
                break
        return count * piece_bytes / max(clock.now() - began_at, 1e-9)

    return MeasuredSpeed(
        write_bytes_per_second=rate(memory.copy_batch, ((one, buffer) for one in inside)),
        read_bytes_per_second=rate(memory.copy_batch, ((buffer, one) for one in inside)),
        dram_bytes_per_second=rate(copy_batch, ((buffer, one) for one in outside)),
    )


def _slab_count(label: str, budget_bytes: int, slab_bytes: int) -> int:
    count = budget_bytes // slab_bytes
    if count < 1:
        raise ConfigError(f"{label}: {budget_bytes} bytes hold no slab of {slab_bytes}")
    return count
