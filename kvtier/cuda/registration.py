"""Slabs of this process that are pinned for CUDA: when, as what, and until when.

Pinning costs 0.1 s a GB under a lock that the whole machine's drivers share, so a slab is
registered when it is first used, or when `warm` is called by somebody who has the time. A slab is
the unit: registered as a whole, as one registration, unregistered by the same address.

    UNREGISTERED --take, warm--> REGISTERED or, when refused, PAGEABLE
    any --give_up--> gone, at once or when the last copy that uses it has ended

Invariants:
  (0) A slab is REGISTERED if and only if CUDA has it registered.
  (1) What is in use stays as it is; a slab that is being given up is used by nobody new.
  (2) A refused slab is copied as pageable memory, and not tried again: what refused it (a limit, a
      platform) does not pass, and trying costs everybody the lock.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvtier.cuda.errors import CudaBroken, CudaRefused, RegistrationRefused
from kvtier.cuda.runtime import Addresses, CudaRuntime
from kvtier.errors import BadRequest, StaleSlot

log = logging.getLogger(__name__)

# One registration of 512 GiB fails however much memory is free, and some hosts stop at 96 GiB.
# Slabs are 1 GiB at most; this is for those who would map something else.
SLAB_BYTES_MAX = 64 << 30

# Pinning in the background slows serving down: one slab, then a pause nine times as long as 1 GiB
# takes, leaves nine tenths of the lock's time to others.
WARM_PAUSE_SECONDS = 1.0


class SlabState(Enum):
    UNREGISTERED = 1
    REGISTERED = 2
    PAGEABLE = 3


@dataclass(slots=True, eq=False)
class HostSlab:
    """One mapped slab. `alias` is what the device adds to the host's addresses of it."""

    address: int
    length_bytes: int
    state: SlabState = SlabState.UNREGISTERED
    alias: int = 0
    use_count: int = 0
    is_leaving: bool = False

    @property
    def is_registered(self) -> bool:
        return self.state is SlabState.REGISTERED


class SlabRegistry:
    """All slabs that one process may copy from and to; used by its copying and session threads."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._changed = threading.Lock()
        self._slabs: list[HostSlab] = []  # By address.
        self._warm_at = 0.0
        self.refusals: list[str] = []  # Why slabs are PAGEABLE; at most one a slab.

    @property
    def registered_bytes(self) -> int:
        return sum(slab.length_bytes for slab in self._slabs if slab.is_registered)

    def add(self, address: int, length_bytes: int) -> None:
        """A slab has been mapped; it costs nothing yet. Raises BadRequest."""
        if not 0 < length_bytes <= SLAB_BYTES_MAX:
            raise BadRequest(f"a slab of {length_bytes} bytes: at most {SLAB_BYTES_MAX}")
        with self._changed:
            index = bisect_right(self._slabs, address, key=_address)
            before = self._slabs[index - 1] if index else None
            after = self._slabs[index] if index < len(self._slabs) else None
            if (before is not None and before.address + before.length_bytes > address) or (
                after is not None and address + length_bytes > after.address
            ):
                raise BadRequest(f"the slab at {address:#x} overlaps another one")
            self._slabs.insert(index, HostSlab(address, length_bytes))

    def take(self, addresses: Addresses, length_bytes: int) -> list[HostSlab]:
        """The slabs that hold ranges of this length, one for each address, registered if possible.

        They stay so until `end_use`. Raises StaleSlot for what lies in no slab, or in a leaving
        one, and then holds none.
        """
        with self._changed:
            found = self._find(addresses, length_bytes)
            distinct = {id(slab): slab for slab in found}
            for slab in distinct.values():
                if slab.state is SlabState.UNREGISTERED:
                    self._register(slab)
            for slab in distinct.values():
                slab.use_count += 1
            return found

    def end_use(self, slabs: Sequence[HostSlab]) -> None:
        """No copy that `take` was called for touches them any more."""
        with self._changed:
            for slab in {id(slab): slab for slab in slabs}.values():
                assert slab.use_count > 0, f"the slab at {slab.address:#x} is in nobody's use"
                slab.use_count -= 1
                if slab.is_leaving and slab.use_count == 0:
                    self._remove(slab)

    def warm(self, now: float) -> bool:
        """Register one slab if enough time has passed since the last; whether one is left.

        For the thread that copies, while it has nothing to copy: everybody else here waits for it.
        """
        with self._changed:
            waiting = [slab for slab in self._slabs if slab.state is SlabState.UNREGISTERED]
            if not waiting or now < self._warm_at:
                return bool(waiting)
            self._register(waiting[0])
            self._warm_at = now + WARM_PAUSE_SECONDS
            return len(waiting) > 1

    def give_up(self, address: int) -> bool:
        """The slab is to be unmapped: True when it is unregistered and forgotten now.

        False while copies use it: nobody new will, and the last `end_use` unregisters it. Asking
        again tells. Raises CudaBroken, and then the device may still write into the slab: it must
        stay mapped, and nobody may be told that it is ours no more.
        """
        with self._changed:
            slab = next((slab for slab in self._slabs if slab.address == address), None)
            if slab is None:
                return True
            slab.is_leaving = True
            if slab.use_count == 0:
                self._remove(slab)
            return slab.use_count == 0

    def close(self) -> None:
        """Unregister everything; no copy may be under way."""
        with self._changed:
            for slab in list(self._slabs):
                assert slab.use_count == 0, f"the slab at {slab.address:#x} is in use"
                self._remove(slab)

    def check_invariants(self) -> None:
        with self._changed:
            for slab in self._slabs:
                assert slab.use_count >= 0
                assert slab.use_count or not slab.is_leaving, "given up, unused, and not gone"

    def _find(self, addresses: Addresses, length_bytes: int) -> list[HostSlab]:
        starts = np.array([slab.address for slab in self._slabs], np.uint64)
        indices = np.searchsorted(starts, addresses, side="right") - 1
        found = []
        for index, address in zip(indices.tolist(), addresses.tolist(), strict=True):
            slab = self._slabs[index] if index >= 0 else None
            if slab is None or address + length_bytes > slab.address + slab.length_bytes:
                raise StaleSlot(f"{length_bytes} bytes at {address:#x} lie in no slab of ours")
            if slab.is_leaving:
                raise StaleSlot(f"the slab at {slab.address:#x} is being given up")
            found.append(slab)
        return found

    def _register(self, slab: HostSlab) -> None:
        try:
            self._runtime.register_host(slab.address, slab.length_bytes)
            slab.state = SlabState.REGISTERED
            slab.alias = self._runtime.device_address(slab.address) - slab.address
        except CudaBroken:
            raise
        except (CudaRefused, RegistrationRefused) as error:
            if slab.is_registered:  # Without its address on the device it is of no use.
                self._runtime.unregister_host(slab.address)
            slab.state = SlabState.PAGEABLE
            self.refusals.append(str(error))
            log.warning(
                "slab not pinned: copied as pageable memory, several times slower",
                extra={"slab_bytes": slab.length_bytes, "reason": str(error)},
            )

    def _remove(self, slab: HostSlab) -> None:
        if slab.is_registered:
            self._runtime.unregister_host(slab.address)
        self._slabs.remove(slab)


def _address(slab: HostSlab) -> int:
    return slab.address
