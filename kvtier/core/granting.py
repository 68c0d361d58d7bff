"""Acquire and Release: who is granted a lease on what, at once or when promotion has ended.

A lease pins what it promises from the start: blocks in memory, the slots that others are being
promoted into, and the slots below of what is leased as it lies there (direct.py). While it is
pending it is on all of these; it is granted on the leading run that is there when the last of them
has ended, or when its wait is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.direct import DirectLeases
from kvtier.core.engines import DAEMON_SESSION, EngineTable
from kvtier.core.index import NOBODY, Rows
from kvtier.core.ladder import Ladder, Origins
from kvtier.core.leases import Lease, LeaseTable, LowerSlots
from kvtier.core.promotions import Promotions, Want
from kvtier.core.replica import RESERVED, Places
from kvtier.core.residency import Residency
from kvtier.core.settings import ManagerConfig
from kvtier.core.shares import Shares
from kvtier.core.slots import Slots
from kvtier.errors import BadRequest, LimitExceeded
from kvtier.types import BlockHash, Cut, EngineId, LeaseId, NamespaceId, TierName

Mask = npt.NDArray[np.bool_]

_SETTLED_PART = 256


@dataclass(slots=True)
class _Pending:
    """A lease that waits for promotion."""

    lease: Lease
    residency: Residency
    skip_count: int
    wait_until: float
    cut: Cut  # Should all of it come.
    places: Places
    direct: LowerSlots
    settled_count: int = 0  # Of the leading ones, which need not be looked at again.


@dataclass(frozen=True, slots=True)
class _Found:
    """What one slice of Acquire pinned."""

    places: Places
    origins: Origins  # Where each block was, see `Lease.origins`.
    cut: Cut
    direct: LowerSlots  # See `Lease.direct`.
    is_promoting: bool = False
    instructions: list[ins.Instruction] = field(default_factory=list)


class Granting:
    """Part of the block manager, with its own slice of its state."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        engines: EngineTable,
        shares: Shares,
        promotions: Promotions,
        ladder: Ladder,
        config: ManagerConfig,
    ) -> None:
        self._namespaces = namespaces
        self._engines = engines
        self._shares = shares
        self._promotions = promotions
        self._ladder = ladder
        self._config = config
        self.direct = DirectLeases(engines, ladder)
        self.leases = LeaseTable(
            margin_seconds=config.lease_margin_seconds, lease_first=config.lease_first
        )
        self._pending: dict[LeaseId, _Pending] = {}
        self._has_unwanted = False  # Somebody does not wait any more for all that he asked for.
        self.is_draining = False

    def handlers(self) -> dict[type, Callable[[Any, float], list[ins.Instruction]]]:
        return {ev.Release: self.release, ev.SegmentsMapped: self.direct.on_segments_mapped}

    # --------------------------------------------------------------------------------- acquire

    def acquire(self, event: ev.Acquire, residency: Residency, now: float) -> list[ins.Instruction]:
        """One slice."""
        if event.lease is None:
            lease = self._begin_lease(event, residency, now)
            if lease is None:
                return [no_lease(residency, event, Cut.DRAINING)]
        else:
            found = self.leases.get(event.lease)
            if found is None or not self._is_whole(found, residency, event.skip_count):
                # It expired, its engine died, or blocks that it holds were voided between two
                # slices. What is in doubt is a miss.
                self.end(event.lease)
                return [no_lease(residency, event, Cut.MISS)]
            lease = found
        sliced = self._pin_slice(event, residency, now)
        lease.places.append(sliced.places)
        lease.origins.append(sliced.origins)
        lease.direct.append(sliced.direct)
        done_count = event.done_count + len(sliced.places)
        if sliced.cut is Cut.NONE and done_count < len(event.hashes):
            rest = replace(
                event,
                lease=lease.lease,
                done_count=done_count,
                is_promoting=sliced.is_promoting,
            )
            return [*sliced.instructions, ins.Continue(rest)]
        # After its deadline the lease is of no use; and it would end before its wait.
        wait_until = min(event.wait_until, event.deadline)
        pending = _Pending(
            lease,
            residency,
            event.skip_count,
            wait_until,
            sliced.cut,
            lease.all_places(),
            lease.all_direct(),
        )
        residency.note_request(pending.places, event.hashes, now)
        return [*sliced.instructions, *self._answer(pending)]

    def _is_whole(self, lease: Lease, residency: Residency, skip_count: int) -> bool:
        """Whether all that the lease holds is still there, or coming."""
        coming = _is_coming(residency, lease.all_places(), skip_count)
        return bool((coming | self.direct.are_whole(lease.all_direct())).all())

    def _pin_slice(self, event: ev.Acquire, residency: Residency, now: float) -> _Found:
        start = event.done_count
        part = event.hashes[start : start + self._config.lease_slice_blocks]
        after = event.hashes[start - 1] if start else None
        waits = event.wait_until > now
        looks_below = waits or bool(self.direct.usable(event, residency))
        if not (event.is_promoting and looks_below):
            sliced = residency.lease(
                part,
                after=after,
                mapped_from=max(0, event.skip_count - start),
                usable=self._shares.usable(event.session, event.namespace),
                limit_count=self._shares.lease_count_max(residency, now),
                now=now,
            )
            self._ladder.note_use(residency, sliced.rows)
            absent = sliced.places == NOBODY
            origins = self._ladder.origins(residency.index, sliced.rows, absent)
            none = np.full(len(sliced.places), NOBODY, dtype=np.int64)
            if sliced.cut is not Cut.DEADLINE or not looks_below:
                return _Found(sliced.places, origins, sliced.cut, none)
            if len(sliced.places):  # The rest of it in the next slice, from below.
                return _Found(sliced.places, origins, Cut.NONE, none, is_promoting=True)
        return self._look_below(event, residency, part, after, now)

    def _look_below(
        self,
        event: ev.Acquire,
        residency: Residency,
        part: Sequence[BlockHash],
        after: BlockHash | None,
        now: float,
    ) -> _Found:
        """Pin blocks wherever they are: in memory, or below if they may be leased there. Have the
        others promoted, for who waits."""
        # First of all, for it raises if the session has ended meanwhile.
        self._shares.usable(event.session, event.namespace)
        part = part[: self._config.evict_slice_blocks]
        rows, cut = residency.straight_rows(part, after)
        skipped = max(0, event.skip_count - event.done_count)
        usable = self.direct.usable(event, residency)
        direct = self.direct.choose(residency, rows, skipped, usable)
        places = _places_of(residency, rows, direct)
        count, why = self._room(residency, places, direct, event, now)
        if count < len(rows):
            rows, places, direct, cut = rows[:count], places[:count], direct[:count], why
        wanted = np.flatnonzero((places == NOBODY) & (direct == NOBODY))
        wanted = wanted[wanted >= skipped]
        # Pinned before slots are taken: evicting for them must not hit this chain.
        self._pin(residency, places, direct)
        self._promotions.hasten(residency, places[places >= 0])
        taken, instructions = self._promotions.ask(
            residency, rows[wanted], want=Want.LEASE, session=event.session, now=now
        )
        residency.tier.pin_for_lease(taken)
        if len(taken) < len(wanted):
            stop = int(wanted[len(taken)])
            could_come = self._ladder.has_readable(residency.index, int(rows[stop]))
            cut = Cut.NO_SPACE if could_come else Cut.MISS
            self._unpin(residency, places[stop:], direct[stop:])
            rows, direct = rows[:stop], direct[:stop]
        places = _places_of(residency, rows, direct)
        # Cut where a block lies in a slab set that the engine has not mapped.
        count = self._mapped_count(event, residency, places, direct, skipped)
        if count < len(places):
            self._unpin(residency, places[count:], direct[count:])
            rows, places, direct = rows[:count], places[:count], direct[:count]
            cut = Cut.UNMAPPED
        absent = ~residency.tier.is_ready(places)
        residency.note_use(rows, now)
        self._ladder.note_use(residency, rows)
        origins = self._ladder.origins(residency.index, rows, absent)
        again = self.direct.used_again(residency, rows, direct)
        instructions.extend(self._promotions.ask_softly(residency, again, event.session, now))
        instructions.extend(self._promotions.pump(now))
        return _Found(places, origins, cut, direct, is_promoting=True, instructions=instructions)

    def _mapped_count(
        self,
        event: ev.Acquire,
        residency: Residency,
        places: Places,
        direct: LowerSlots,
        skipped: int,
    ) -> int:
        """How many of these lead in slab sets that the engine has mapped, or are leased below."""
        usable = self._shares.usable(event.session, event.namespace)
        others = np.flatnonzero(direct == NOBODY)
        count = residency.mapped_count(places[others], skipped, usable)
        return len(places) if count == len(others) else int(others[count])

    def _room(
        self,
        residency: Residency,
        places: Places,
        direct: LowerSlots,
        event: ev.Acquire,
        now: float,
    ) -> tuple[int, Cut]:
        """How many of these blocks may be leased, and what forbids the next one: the limit on
        pins, or that it would have to be waited for."""
        is_direct = direct != NOBODY
        skipped = max(0, event.skip_count - event.done_count)
        count = self._pin_room(residency, places, is_direct, skipped, now)
        if event.wait_until > now:
            return count, Cut.PIN_LIMIT
        there = residency.tier.is_ready(places) | is_direct
        there[:skipped] = True
        ready_count = _leading(there)
        return (count, Cut.PIN_LIMIT) if count <= ready_count else (ready_count, Cut.DEADLINE)

    def _pin_room(
        self, residency: Residency, places: Places, is_direct: Mask, skipped: int, now: float
    ) -> int:
        """How many of these blocks the limit on pins allows, those to be promoted included."""
        fresh = np.ones(len(places), dtype=np.int64)
        held = places >= 0
        fresh[held] = residency.tier.lease_pins[places[held]] == 0
        fresh[:skipped][~held[:skipped]] = 0
        fresh[is_direct] = 0  # They take no slot in memory.
        room = self._shares.lease_count_max(residency, now) - residency.tier.leased_count
        return int(np.searchsorted(np.cumsum(fresh), room, side="right"))

    def _begin_lease(self, event: ev.Acquire, residency: Residency, now: float) -> Lease | None:
        """A lease on nothing yet; None while draining."""
        engine = None
        if event.session != DAEMON_SESSION:
            session = self._engines.require_slots(event.session, event.namespace)
            engine = session.engine
            if self.leases.count_of(event.session) >= self._config.leases_per_session_max:
                raise LimitExceeded(
                    f"{self._config.leases_per_session_max} leases are open in this session: "
                    "release some"
                )
            if event.deadline > now + self._config.lease_seconds_max:
                raise BadRequest(
                    f"a lease may last {self._config.lease_seconds_max:g} s: ask for less"
                )
        self._shares.note_use(event.namespace, now)
        if self.is_draining:
            return None
        return self.leases.grant(
            session=event.session,
            engine=engine,
            namespace=event.namespace,
            deadline=event.deadline,
            now=now,
        )

    # -------------------------------------------------------------------------------- granting

    def _answer(self, pending: _Pending) -> list[ins.Instruction]:
        lease, count = pending.lease.lease, len(pending.places)
        ready = self._ready_count(pending)
        if ready < count and count > pending.skip_count:
            pending.settled_count = ready
            self._pending[lease] = pending
            return [ins.LeasePending(lease, count, ready)]
        return [self._grant(pending, count, pending.cut)]

    def _grant(self, pending: _Pending, count: int, cut: Cut) -> ins.LeaseGranted:
        """Grant the first `count` blocks of the lease."""
        lease, residency, places = pending.lease, pending.residency, pending.places
        if count <= pending.skip_count:
            self.end(lease.lease)
            none = np.zeros(0, dtype=np.uint32)
            return ins.LeaseGranted(None, 0, none, lease.deadline, cut, residency.epoch, ())
        direct = pending.direct
        if count < len(places):
            self._unpin(residency, places[count:], direct[count:])
            places, direct = places[:count], direct[:count]
        lease.places, lease.direct = [places], [direct]
        slots, is_direct = _slots_of(
            residency, places[pending.skip_count :], direct[pending.skip_count :]
        )
        names = (TierName.DRAM, *self._ladder.tiers)
        counts = np.bincount(lease.all_origins()[:count], minlength=len(names)).tolist()
        return ins.LeaseGranted(
            lease=lease.lease,
            leased_count=count,
            slots=slots,
            deadline=lease.deadline,
            cut=cut,
            epoch=residency.epoch,
            tiers=tuple(one for one in zip(names, counts, strict=True) if one[1]),
            is_direct=is_direct,
        )

    def grant_ended(self) -> list[ins.Instruction]:
        """Grant the leases that have nothing to wait for any more."""
        return [
            self._grant_pending(pending, Cut.MISS)
            for pending in list(self._pending.values())
            if not self._is_coming(pending)
        ]

    def _is_coming(self, pending: _Pending) -> bool:
        """Whether the first block that is not there may still come. Called at every step, so it
        looks at each block once."""
        residency, places = pending.residency, pending.places
        while pending.settled_count < len(places):  # Ends: goes on, or returns.
            part = places[pending.settled_count :][:_SETTLED_PART]
            direct = pending.direct[pending.settled_count :][:_SETTLED_PART]
            ready = _leading(residency.tier.is_ready(part) | self.direct.are_whole(direct))
            pending.settled_count += ready
            if ready < len(part):
                return bool(_is_coming(residency, part[ready : ready + 1], 0)[0])
        return False

    def end_waits(self, now: float) -> list[ins.Instruction]:
        """Grant what is there to those who would wait no longer."""
        found: list[ins.Instruction] = [
            self._grant_pending(pending, Cut.DEADLINE)
            for pending in list(self._pending.values())
            if pending.wait_until <= now
        ]
        return [*found, *self._drop_unwanted()]

    def _grant_pending(self, pending: _Pending, cut: Cut) -> ins.LeaseReady:
        """What is there; `cut` tells why that is not all of it, if so."""
        del self._pending[pending.lease.lease]
        ready = self._ready_count(pending)
        if ready < len(pending.places):
            self._has_unwanted = True
        else:
            cut = pending.cut
        return ins.LeaseReady(pending.lease.lease, self._grant(pending, ready, cut))

    def _ready_count(self, pending: _Pending) -> int:
        """The leading blocks that need not be waited for: READY, or the engine has them itself."""
        ready = pending.residency.tier.is_ready(pending.places)
        ready |= self.direct.are_whole(pending.direct)
        ready[: pending.skip_count] = True
        return _leading(ready)

    def next_deadline(self) -> float | None:
        waits = min((one.wait_until for one in self._pending.values()), default=None)
        times = [time for time in (waits, self.leases.next_expiry()) if time is not None]
        return min(times, default=None)

    # ---------------------------------------------------------------------------------- ending

    def release(self, event: ev.Release, now: float) -> list[ins.Instruction]:
        count = 0
        engine: EngineId | None = None
        if event.session != DAEMON_SESSION:
            engine = self._engines.require_live(event.session).engine
        for lease in event.leases:
            found = self.leases.get(lease)
            if found is not None and found.engine == engine:
                count += 1
                self.end(lease)
        return [*self._drop_unwanted(), ins.LeasesEnded(count)]

    def namespace_of(self, lease: LeaseId) -> NamespaceId | None:
        """None for a lease that there is not."""
        found = self.leases.get(lease)
        return None if found is None else found.namespace

    def end(self, lease: LeaseId) -> None:
        ended = self.leases.end(lease)
        if ended is not None:
            self._forget(ended)

    def end_engine(self, engine: EngineId) -> None:
        for lease in self.leases.end_engine(engine):
            self._forget(lease)

    def expire(self, now: float) -> None:
        for lease in self.leases.expire(now=now):
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        if self._pending.pop(lease.lease, None) is not None:
            self._has_unwanted = True
        self._unpin(self._namespaces[lease.namespace], lease.all_places(), lease.all_direct())

    def _drop_unwanted(self) -> list[ins.Instruction]:
        if not self._has_unwanted:
            return []
        self._has_unwanted = False
        return self._promotions.drop_unwanted()

    def _pin(self, residency: Residency, places: Places, direct: LowerSlots) -> None:
        residency.tier.pin_for_lease(places[places >= 0])
        self.direct.pin(direct)

    def _unpin(self, residency: Residency, places: Places, direct: LowerSlots) -> None:
        residency.tier.unpin_lease(places[places >= 0])
        self.direct.unpin(direct)

    def check_invariants(self) -> list[str]:
        return self.direct.check_invariants(self.leases.all_leases())


def no_lease(residency: Residency, event: ev.Acquire, cut: Cut) -> ins.LeaseGranted:
    none = np.zeros(0, dtype=np.uint32)
    return ins.LeaseGranted(None, 0, none, event.deadline, cut, residency.epoch, ())


def _is_coming(residency: Residency, places: Places, skip_count: int) -> Mask:
    """Where a block is or may still come."""
    tier = residency.tier
    found = residency.tier.is_ready(places)
    if len(tier.state):
        promoting = (tier.state[places] == RESERVED) & (tier.row[places] != NOBODY)
        found |= promoting & (places >= 0)
    found[:skip_count] = True
    return found


def _places_of(residency: Residency, rows: Rows, direct: LowerSlots) -> Places:
    """Each block's place in memory, but for those that are leased where they lie below."""
    places: Places = residency.index.place[rows]
    places[direct != NOBODY] = NOBODY
    return places


def _slots_of(
    residency: Residency, places: Places, direct: LowerSlots
) -> tuple[Slots, Mask | None]:
    """What the engine is told: a slot a block, and which of them are those of the tier below."""
    is_direct = direct != NOBODY
    if not np.count_nonzero(is_direct):
        return residency.tier.slots_of(places), None
    slots = direct.astype(np.uint32)
    slots[~is_direct] = residency.tier.slots_of(places[~is_direct])
    return slots, is_direct


def _leading(mask: Mask) -> int:
    """How many are True before the first False."""
    if not len(mask):
        return 0
    first = int(mask.argmin())
    return len(mask) if mask[first] else first
