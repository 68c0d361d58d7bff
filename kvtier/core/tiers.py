"""One namespace's share of a memory tier: its slots and what each one holds.

Columns are indexed by place (core/slots.py). A taken slot is in exactly one of these states:

* RESERVED, with an owner (the session that fills it); with a row as well while the daemon promotes
  that block into it;
* READY or LEAVING, with the row of its block;
* held: its replica is GONE, but a pin, or the session that was filling it when it was voided,
  may still touch the bytes. It is freed when the last of these ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.columns import grow
from kvtier.core.index import NOBODY
from kvtier.core.replica import (
    GONE,
    LEAVING,
    READY,
    RESERVED,
    Places,
    ReplicaEvent,
    ReplicaState,
    move,
    move_all,
)
from kvtier.core.slots import SlotAllocator, Slots
from kvtier.types import SessionId, SlabSetId

DAEMON_OWNER = 0  # The daemon's own session, see engines.py.
# Slots looked at in one slice when everything was voided; takes less than 1 ms.
_FREED_SLICE_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Used-slot fractions: eviction starts above one and stops at the other."""

    start: float
    stop: float

    def eviction_count(self, *, slot_count: int, free_count: int) -> int:
        """How many blocks to evict now: none below the start mark, then down to the stop mark."""
        used_count = slot_count - free_count
        if used_count <= self.start * slot_count:
            return 0
        return max(0, used_count - int(self.stop * slot_count))


class MemoryTier:
    """Slots, replica states, owners and pins of one namespace."""

    def __init__(self, set_slot_count: int) -> None:
        self.allocator = SlotAllocator(set_slot_count)
        self.state = np.zeros(0, dtype=np.uint8)
        self.row = np.zeros(0, dtype=np.int32)
        self.owner = np.zeros(0, dtype=np.int32)  # Session that may write; NOBODY without one.
        self.lease_pins = np.zeros(0, dtype=np.int32)
        self.transfer_pins = np.zeros(0, dtype=np.int16)
        self.summed = np.zeros(0, dtype=np.bool_)  # The checksum of the payload is in the table.
        self.leased_count = 0  # Places with a lease pin.
        self.reserved_by: dict[SessionId, int] = {}
        # After void_all: places from here on may be taken although nothing uses them.
        self._unfreed_from: int | None = None

    # ------------------------------------------------------------------------------- slab sets

    def add_set(self, slab_set: SlabSetId, slot_first: int) -> None:
        self.allocator.add_set(slab_set, slot_first)
        count = self.allocator.place_count
        grow(self.state, count, GONE)
        grow(self.row, count, NOBODY)
        grow(self.owner, count, NOBODY)
        grow(self.lease_pins, count, 0)
        grow(self.transfer_pins, count, 0)
        grow(self.summed, count, False)

    # ------------------------------------------------------------------------------- reserving

    def reserve(
        self,
        count: int,
        session: SessionId,
        usable: Collection[SlabSetId] | None,
        near: Collection[SlabSetId] = (),
    ) -> Places:
        """Take `count` slots for `session`, in the sets `near` first; raises TierFull and changes
        nothing."""
        places = self.allocator.take(count, usable, near)
        move(self.state, places, ReplicaEvent.RESERVE)
        self.owner[places] = session
        self.summed[places] = False
        if len(places):
            self.reserved_by[session] = self.reserved_by.get(session, 0) + len(places)
        return places

    def commit(self, places: Places, rows: npt.NDArray[np.int32]) -> None:
        """The reserved slots hold these blocks now."""
        move(self.state, places, ReplicaEvent.COMMIT)
        self.row[places] = rows
        self._disown(places)

    def abort(self, places: Places) -> None:
        """End the reservation of these slots, voided ones too, and free them."""
        open_places = places[self.state[places] == RESERVED]
        move(self.state, open_places, ReplicaEvent.ABORT)
        self.row[open_places] = NOBODY
        self._disown(places)
        self.free_idle(places)

    def end_reservations(self, places: Places, *, but_of: Collection[SessionId]) -> None:
        """Of these slots free those that sessions of engines were filling, but for some of them."""
        owner = self.owner[places]
        self.abort(places[(owner > DAEMON_OWNER) & ~np.isin(owner, list(but_of))])

    def places_reserved_by(self, session: SessionId) -> Places:
        return np.flatnonzero(self.owner == session).astype(np.int32)

    # -------------------------------------------------------------------------------- adopting

    def adopt_ready(self, places: Places, rows: npt.NDArray[np.int32]) -> None:
        """Slots that are pinned hold these blocks already."""
        move(self.state, places, ReplicaEvent.RESERVE)
        move(self.state, places, ReplicaEvent.COMMIT)
        self.row[places] = rows
        self.summed[places] = True

    def adopt_reserved(self, places: Places, session: SessionId) -> None:
        """Slots that are pinned are being filled by `session` already."""
        move(self.state, places, ReplicaEvent.RESERVE)
        self.owner[places] = session
        if len(places):
            self.reserved_by[session] = self.reserved_by.get(session, 0) + len(places)

    def hand_over(self, places: Places, heir: SessionId) -> None:
        """These slots, reserved or voided since, are withheld for another session from now on."""
        self._disown(places)
        self.owner[places] = heir
        if len(places):
            self.reserved_by[heir] = self.reserved_by.get(heir, 0) + len(places)

    # ---------------------------------------------------------------------------------- ending

    def drop(self, places: Places) -> None:
        """End READY replicas that a policy nominated and nothing holds; frees the slots."""
        if not len(places):
            return
        move(self.state, places, ReplicaEvent.NOMINATE)
        move(self.state, places, ReplicaEvent.DROP)
        self.row[places] = NOBODY
        assert not (self.lease_pins.take(places) | self.transfer_pins.take(places)).any(), (
            "a held block was evicted"
        )
        self.allocator.release(places)

    def void(self, places: Places) -> None:
        """End replicas in whatever state; a slot is freed when the last hold on it ends."""
        move(self.state, places, ReplicaEvent.VOID)
        self.row[places] = NOBODY
        self.free_idle(places)

    def void_all(self) -> None:
        """End every replica at once (Clear); `free_some` then frees the slots in slices."""
        alive = self.state != GONE
        move_all(self.state, alive, ReplicaEvent.VOID)
        self.row.fill(NOBODY)
        self._unfreed_from = 0

    @property
    def free_pending(self) -> bool:
        return self._unfreed_from is not None

    def free_some(self) -> None:
        """Free a slice of the slots that `void_all` left behind and nothing uses."""
        start = self._unfreed_from
        assert start is not None, "nothing is left to free"
        stop = min(start + _FREED_SLICE_SLOTS, self.allocator.place_count)
        places = np.arange(start, stop, dtype=np.int32)
        self.free_idle(places[self.allocator.is_taken(places)])
        self._unfreed_from = stop if stop < self.allocator.place_count else None

    def free_idle(self, places: Places) -> None:
        """Free those slots whose replica is GONE and which nobody pins or fills."""
        places = places[self.state.take(places) == GONE]
        if not len(places):
            return
        idle = (
            (self.owner[places] == NOBODY)
            & (self.lease_pins[places] == 0)
            & (self.transfer_pins[places] == 0)
        )
        self.allocator.release(places[idle])

    # ----------------------------------------------------------------------------------- pins

    def is_ready(self, places: Places) -> npt.NDArray[np.bool_]:
        """Where a READY replica is; False for NOBODY."""
        if not len(self.state):
            return np.zeros(len(places), dtype=np.bool_)
        ready: npt.NDArray[np.bool_] = self.state.take(places) == READY
        ready &= places >= 0
        return ready

    def are_gone(self, places: Places) -> npt.NDArray[np.bool_]:
        """Where nothing is committed any more; True for NOBODY, a slot whose set is gone."""
        gone: npt.NDArray[np.bool_] = places == NOBODY
        gone[~gone] = self.state[places[~gone]] == GONE
        return gone

    def is_pinned(self, place: int) -> bool:
        return bool(self.lease_pins.item(place) or self.transfer_pins.item(place))

    def lease_room(self, places: Places, limit_count: int) -> int:
        """How many of `places`, from the first on, may be lease-pinned within the limit.

        NOBODY among them takes no room.
        """
        room = limit_count - self.leased_count
        if room >= len(places):
            return len(places)
        held = places >= 0
        fresh = np.zeros(len(places), dtype=np.int64)
        fresh[held] = self.lease_pins[places[held]] == 0
        return int(np.searchsorted(np.cumsum(fresh), room, side="right"))

    def pin_for_lease(self, places: Places) -> None:
        pins = self.lease_pins.take(places)
        self.leased_count += int(np.count_nonzero(pins == 0))
        self.lease_pins[places] = pins + 1

    def unpin_lease(self, places: Places) -> None:
        pins = self.lease_pins.take(places) - 1
        assert not np.count_nonzero(pins < 0), "a lease pin ended twice"
        self.lease_pins[places] = pins
        idle = places[pins == 0]
        self.leased_count -= len(idle)
        self.free_idle(idle)

    def pin_for_transfer(self, places: Places) -> None:
        self.transfer_pins[places] += 1

    def unpin_transfer(self, places: Places) -> None:
        assert (self.transfer_pins[places] > 0).all(), "a transfer pin ended twice"
        self.transfer_pins[places] -= 1
        self.free_idle(places[self.transfer_pins[places] == 0])

    # ------------------------------------------------------------------------------- questions

    def slots_of(self, places: Places) -> Slots:
        return self.allocator.slots_of(places)

    def count_in(self, state: ReplicaState) -> int:
        return int((self.state == state).sum())

    def held_count(self) -> int:
        """Taken slots whose replica is GONE."""
        return self.allocator.taken_count - int((self.state != GONE).sum())

    def check_invariants(self) -> list[str]:
        found = self.allocator.check_invariants()
        resident = (self.state == READY) | (self.state == LEAVING)
        promoting = (self.state == RESERVED) & (self.row != NOBODY)
        if ((self.row != NOBODY) != (resident | promoting)).any():
            found.append("a slot's row and its replica's state disagree")
        if (self.owner[promoting] != DAEMON_OWNER).any():
            found.append("a block is promoted into a slot that is not the daemon's")
        if ((self.state == RESERVED) & (self.owner == NOBODY)).any():
            found.append("a RESERVED slot has no owner")
        if (resident & (self.owner != NOBODY)).any():
            found.append("a READY slot has an owner that may write")
        if (self.lease_pins < 0).any() or (self.transfer_pins < 0).any():
            found.append("negative pins")
        if self.leased_count != int((self.lease_pins > 0).sum()):
            found.append("leased_count is wrong")
        owners, counts = np.unique(self.owner[self.owner != NOBODY], return_counts=True)
        if dict(zip(owners.tolist(), counts.tolist(), strict=True)) != self.reserved_by:
            found.append("reservation counts are wrong")
        return found + self._check_taken()

    # --------------------------------------------------------------------------------- helpers

    def _check_taken(self) -> list[str]:
        places = np.arange(self.allocator.place_count, dtype=np.int32)
        used = (
            (self.state[places] != GONE)
            | (self.owner != NOBODY)
            | (self.lease_pins > 0)
            | (self.transfer_pins > 0)
        )
        if self.free_pending:
            used |= self.allocator.is_taken(places)
        if int(used.sum()) != self.allocator.taken_count:
            return ["slots are taken that nothing uses, or used that are free: leaked or lost"]
        return []

    def _disown(self, places: Places) -> None:
        for session, count in sorted(Counter(self.owner.take(places).tolist()).items()):
            assert session != NOBODY, "a slot without owner was committed or aborted"
            left = self.reserved_by[SessionId(session)] - count
            if left:
                self.reserved_by[SessionId(session)] = left
            else:
                del self.reserved_by[SessionId(session)]
        self.owner[places] = NOBODY
