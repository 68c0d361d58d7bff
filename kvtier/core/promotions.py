"""Promotion: blocks that are not in memory are read into it, in chain order.

Slots are taken when a promotion is asked for, all of them at once; each block comes from the
fastest tier that has it. The reads begin as that tier's limit allows: first what somebody waits
for, then prefetches, then blocks of a segment that retires; among those tenants of a higher
priority, then round by weight, and of one tenant the largest saving. What nobody waits for any more
before its read began is dropped.

Invariant: while a block is promoted its place is RESERVED by the daemon and names its row, and its
slot in the tier below is pinned, until Promoted comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.index import NOBODY, Rows
from kvtier.core.ladder import Ladder, Rung
from kvtier.core.replica import RESERVED, Places
from kvtier.core.residency import Residency
from kvtier.core.runs import runs_of
from kvtier.core.segments import Slots
from kvtier.core.shares import Shares
from kvtier.core.tenancy import Tenancy, Turns
from kvtier.core.tiers import DAEMON_OWNER
from kvtier.types import Cut, NamespaceId, RemovedFor, SessionId, TierName

_LOST_FOR = {
    ev.TransferOutcome.CORRUPT: RemovedFor.CORRUPT,
    ev.TransferOutcome.FAILED: RemovedFor.READ_FAILED,
}


class Want(IntEnum):
    """Who wants a promotion; the smaller goes first."""

    LEASE = 0
    PREFETCH = 1
    AGAIN = 2


# Of the batches that are read one in so many is the oldest that waits, of whatever rank.
_OLDEST_EVERY = 16


@dataclass(slots=True)
class _Asked:
    want: Want
    residency: Residency
    lower_slots: Slots
    places: Places
    begun_count: int = 0

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Of those that have not begun, only these."""
        begun = self.begun_count
        self.places = np.concatenate([self.places[:begun], self.places[begun:][mask]])
        self.lower_slots = np.concatenate(
            [self.lower_slots[:begun], self.lower_slots[begun:][mask]]
        )


@dataclass(slots=True)
class _Queue:
    """What is asked of one tier."""

    rung: Rung
    tenancy: Tenancy
    turns: Turns
    heaps: dict[str, list[tuple[int, int, int, _Asked]]] = field(default_factory=dict)
    under_way_bytes: int = 0
    under_way_count: int = 0
    waiting_bytes: int = 0  # Asked for, and not begun.
    batch_count: int = 0

    @property
    def may_begin(self) -> bool:
        settings = self.rung.settings
        return (
            any(self.heaps.values())
            and self.under_way_bytes < settings.transfer_bytes_max
            and self.under_way_count < settings.transfer_blocks_max
        )

    def waiting(self) -> list[tuple[_Asked, int]]:
        """What has blocks that have not begun, and how many."""
        return [(one, len(one.places) - one.begun_count) for one in self.asked()]

    def asked(self) -> list[_Asked]:
        return [one for heap in self.heaps.values() for _, _, _, one in heap]

    def push(self, number: int, asked: _Asked) -> None:
        """`number`: rises with every call."""
        heap = self.heaps.setdefault(asked.residency.facts.tenant, [])
        heapq.heappush(heap, (asked.want, -len(asked.places), number, asked))

    def next_asked(self) -> _Asked:
        """Whose turn it is. One batch in so many is of who has waited longest, whatever the rank:
        else those of a higher one, who ask again and again, could keep others waiting for ever."""
        self.batch_count += 1
        if self.batch_count % _OLDEST_EVERY == 0:
            waiting = [entry for heap in self.heaps.values() for entry in heap]
            return min(waiting, key=lambda entry: entry[2])[3]
        names = [tenant for tenant, heap in self.heaps.items() if heap]
        name = names[0] if len(names) == 1 else min(names, key=self._rank)
        return self.heaps[name][0][3]

    def forget(self, asked: _Asked) -> None:
        """All of it has begun."""
        heap = self.heaps[asked.residency.facts.tenant]
        if heap[0][3] is asked:
            heapq.heappop(heap)
            return
        heap[:] = [entry for entry in heap if entry[3] is not asked]
        heapq.heapify(heap)

    def _rank(self, tenant: str) -> tuple[int, int, float, str]:
        want = self.heaps[tenant][0][0]
        return want, self.tenancy.budget(tenant).priority, self.turns.level(tenant), tenant


class Promotions:
    """Part of the block manager, with its own slice of its state."""

    def __init__(
        self, namespaces: Mapping[NamespaceId, Residency], ladder: Ladder, shares: Shares
    ) -> None:
        self._namespaces = namespaces
        self._ladder = ladder
        self._shares = shares
        tenancy = shares.tenancy
        self._queues = {
            tier: _Queue(rung, tenancy, Turns(tenancy)) for tier, rung in ladder.rungs.items()
        }
        self._asked_count = 0
        self.promoted_count = 0

    def under_way_count_of(self, tier: TierName) -> int:
        return self._queues[tier].under_way_count

    def check_invariants(self) -> list[str]:
        queues = [queue for queue in self._queues.values() if queue.rung.lower.is_open]
        if not queues:
            return []
        found = [one for queue in queues for one in self._check(queue)]
        under_way_count = sum(queue.under_way_count for queue in queues)
        for namespace, residency in self._namespaces.items():
            tier = residency.tier
            asked = {
                place
                for queue in queues
                for one, _ in queue.waiting()
                if one.residency is residency
                for place in one.places[one.begun_count :].tolist()
            }
            filling = (tier.owner == DAEMON_OWNER) & (tier.row != NOBODY)
            if not asked.issuperset(np.flatnonzero(filling).tolist()) and not under_way_count:
                found.append(f"namespace {namespace}: a slot waits for a block that nobody reads")
        return found

    def _check(self, queue: _Queue) -> list[str]:
        found = []
        lower, waiting = queue.rung.lower, queue.waiting()
        read_count = queue.under_way_count + sum(count for _, count in waiting)
        if lower.book.pin_count != read_count + lower.leased_count:
            found.append(f"{lower.tier} slots are pinned for nothing, or read without a pin")
        if queue.waiting_bytes != sum(_bytes(one.residency, count) for one, count in waiting):
            found.append("bytes wait to be promoted of no block")
        if queue.under_way_bytes < 0 or (not queue.under_way_count and queue.under_way_bytes):
            found.append("bytes are promoted of no block")
        return found

    # ----------------------------------------------------------------------------------- asking

    def ask(
        self,
        residency: Residency,
        rows: Rows,
        *,
        want: Want,
        session: SessionId = DAEMON_SESSION,
        now: float,
        tier: TierName | None = None,
    ) -> tuple[Places, list[ins.Instruction]]:
        """Take slots for the leading blocks of `rows`, none of them in memory; their places.

        Fewer than asked for when there is no room. Each is read from the fastest tier that has it,
        or from `tier`. Their reads begin with `pump`.
        """
        sources = [rung for rung in self._ladder.rungs.values() if tier in (None, rung.lower.tier)]
        slots = [
            rung.lower.columns(residency.index).slot[rows]
            if rung.lower.is_readable
            else np.full(len(rows), NOBODY, dtype=np.int64)
            for rung in sources
        ]
        # What a tier that nobody can read has not lost yet comes from nowhere.
        nowhere = np.flatnonzero(np.all([its == NOBODY for its in slots], axis=0))
        count = int(nowhere[0]) if len(nowhere) else len(rows)
        if not count:
            return np.zeros(0, dtype=np.int32), []
        places, found = self._shares.take_for_promotion(residency, session, count, now)
        if not len(places):
            return places, found
        rows = rows[: len(places)]
        residency.begin_promotion(rows, places)
        left = np.ones(len(places), dtype=np.bool_)
        for rung, column in zip(sources, slots, strict=True):
            here = left & (column[: len(places)] != NOBODY)
            if here.any():
                self._pin(rung, want, residency, column[: len(places)][here], places[here])
            left &= ~here
        written = residency.tier.slots_of(places)
        found.append(ins.WriteReserved(residency.facts.namespace, written, None))
        return places, found

    def _pin(
        self,
        rung: Rung,
        want: Want,
        residency: Residency,
        slots: npt.NDArray[np.int64],
        places: Places,
    ) -> None:
        lower_slots = slots.astype(np.uint32)
        rung.lower.book.pin(lower_slots)
        queue = self._queues[rung.lower.tier]
        queue.waiting_bytes += _bytes(residency, len(places))
        self._push(queue, want, residency, lower_slots, places)

    def hasten(self, residency: Residency, places: Places) -> None:
        """Somebody waits for these now: they are not read last, whoever asked for them."""
        if not len(places) or not (residency.tier.state[places] == RESERVED).any():
            return
        for queue in self._queues.values():
            for asked in queue.asked():
                if asked.want is Want.LEASE or asked.residency is not residency:
                    continue
                begun = asked.begun_count
                mine = np.isin(asked.places[begun:], places)
                if mine.any():
                    slots = asked.lower_slots[begun:][mine]
                    self._push(queue, Want.LEASE, residency, slots, asked.places[begun:][mine])
                    asked.keep(~mine)

    def _push(
        self, queue: _Queue, want: Want, residency: Residency, lower_slots: Slots, places: Places
    ) -> None:
        self._asked_count += 1
        queue.push(self._asked_count, _Asked(want, residency, lower_slots, places))

    def on_prefetch(self, event: ev.Prefetch, now: float) -> list[ins.Instruction]:
        """A slice: the leading blocks in memory are counted, those behind them asked for."""
        residency = self._namespaces[event.namespace]
        start, stop = event.done_count, event.done_count + self._shares.promoted_slice_blocks
        part = event.hashes[start:stop]
        rows, cut = residency.straight_rows(part, event.hashes[start - 1] if start else None)
        residency.keep(rows, now)  # Or room is made by evicting what they follow.
        absent = rows[residency.index.place[rows] == NOBODY]
        room = max(0, self._prefetch_room_bytes(residency, now) // residency.facts.block_bytes)
        places, found = self.ask(residency, absent[:room], want=Want.PREFETCH, now=now)
        found.extend(self.pump(now))
        promoting_count = event.promoting_count + len(places)
        if cut is Cut.NONE and len(places) == len(absent) and stop < len(event.hashes):
            rest = replace(event, done_count=stop, promoting_count=promoting_count)
            return [*found, ins.Continue(rest)]
        matched = residency.index.match(event.hashes)
        memory_count = residency.memory_count(event.hashes, matched)
        return [*found, ins.PrefetchBegun(memory_count, promoting_count)]

    def ask_softly(
        self, residency: Residency, rows: Rows, session: SessionId, now: float
    ) -> list[ins.Instruction]:
        """Have these promoted that nobody waits for, within what prefetches may, to where the
        session's engine can read them."""
        room = max(0, self._prefetch_room_bytes(residency, now) // residency.facts.block_bytes)
        rows = rows[:room]
        _, found = self.ask(residency, rows, want=Want.PREFETCH, session=session, now=now)
        return found

    def _prefetch_room_bytes(self, residency: Residency, now: float) -> int:
        fraction_max = max(
            (queue.rung.settings.prefetch_fraction_max for queue in self._queues.values()),
            default=0.0,
        )
        taken_bytes = sum(one.waiting_bytes + one.under_way_bytes for one in self._queues.values())
        room_bytes = int(self._shares.pool_bytes * fraction_max) - taken_bytes
        if self._shares.tenancy.is_alone:
            return room_bytes
        tenant = residency.facts.tenant
        mine_bytes = sum(
            _bytes(one.residency, count)
            for queue in self._queues.values()
            for one, count in queue.waiting()
            if one.residency.facts.tenant == tenant
        )
        own_bytes = int(self._shares.share_bytes(tenant, now) * fraction_max)
        return min(room_bytes, own_bytes - mine_bytes)

    # --------------------------------------------------------------------------------- beginning

    def pump(self, now: float) -> list[ins.Instruction]:
        """Begin as many reads as the limits allow."""
        found: list[ins.Instruction] = []
        for queue in self._queues.values():
            rung = queue.rung
            if rung.lower.is_open:
                absent = rung.demotions.retiring.take_absent()
                if absent is not None:
                    found.extend(self._ask_again(rung, *absent, now))
            while queue.may_begin:
                asked = queue.next_asked()
                found.extend(self._begin_batch(queue, asked))
                if asked.begun_count == len(asked.places):
                    queue.forget(asked)
        return found

    def _ask_again(
        self, rung: Rung, residency: Residency, rows: Rows, now: float
    ) -> list[ins.Instruction]:
        tier, retiring = rung.lower.tier, rung.demotions.retiring
        places, found = self.ask(residency, rows, want=Want.AGAIN, now=now, tier=tier)
        left = rows[len(places) :]
        if len(places):
            retiring.put_back_absent(left)
        else:
            retiring.note_ended(rung.lower.columns(residency.index).slot[left].tolist())
        return found

    def _begin_batch(self, queue: _Queue, asked: _Asked) -> list[ins.Instruction]:
        residency, lower, settings = asked.residency, queue.rung.lower, queue.rung.settings
        tier = residency.tier
        count = max(1, min(settings.batch_blocks, settings.batch_bytes // _bytes(residency, 1)))
        part = slice(asked.begun_count, asked.begun_count + count)
        places, lower_slots = asked.places[part], asked.lower_slots[part]
        asked.begun_count += len(places)
        queue.waiting_bytes -= _bytes(residency, len(places))
        wanted = tier.state[places] == RESERVED
        if asked.want is Want.LEASE:
            wanted &= tier.lease_pins[places] > 0
        if not lower.is_readable:
            wanted[:] = False
        found = self._drop(queue, residency, places[~wanted], lower_slots[~wanted])
        places, lower_slots = places[wanted], lower_slots[wanted]
        if not len(places):
            return found
        queue.turns.charge(residency.facts.tenant, _bytes(residency, len(places)))
        queue.under_way_bytes += _bytes(residency, len(places))
        queue.under_way_count += len(places)
        slots, hashes = tier.slots_of(places), residency.hashes_of(tier.row[places])
        namespace = residency.facts.namespace
        return [*found, ins.Promote(namespace, lower_slots, slots, hashes, lower.tier)]

    def drop_unwanted(self) -> list[ins.Instruction]:
        """Give the slots back of what nobody waits for any more and is not under way."""
        found: list[ins.Instruction] = []
        for queue in self._queues.values():
            for asked in queue.asked():
                if asked.want is not Want.LEASE:
                    continue
                tier, begun = asked.residency.tier, asked.begun_count
                places = asked.places[begun:]
                unwanted = tier.lease_pins[places] == 0
                if not unwanted.any():
                    continue
                gone = asked.lower_slots[begun:][unwanted]
                queue.waiting_bytes -= _bytes(asked.residency, len(gone))
                found.extend(self._drop(queue, asked.residency, places[unwanted], gone))
                asked.keep(~unwanted)
        return found

    def _drop(
        self, queue: _Queue, residency: Residency, places: Places, lower_slots: Slots
    ) -> list[ins.Instruction]:
        """Nobody wants these any more, or they have been voided."""
        if not len(places):
            return []
        slots = residency.tier.slots_of(places)
        self._abort(queue, residency, places, lower_slots)
        queue.rung.lower.book.unpin(lower_slots)
        return [ins.WriteGone(residency.facts.namespace, slots)]

    # ------------------------------------------------------------------------------------ ending

    def on_promoted(self, event: ev.Promoted, now: float) -> list[ins.Instruction]:
        """What the reads brought; the manager then looks who waits for it."""
        residency = self._namespaces[event.namespace]
        queue = self._queues[event.tier]
        lower, tier = queue.rung.lower, residency.tier
        places = tier.allocator.places_of(event.slots)
        queue.under_way_bytes -= _bytes(residency, len(places))
        queue.under_way_count -= len(places)
        # Voided meanwhile, or doomed and not swept yet.
        alive = np.array(
            [row != NOBODY and residency.index.is_whole(row) for row in tier.row[places].tolist()]
        )
        done = alive & (event.outcomes == ev.TransferOutcome.DONE)
        found: list[ins.Instruction] = []
        if done.any():
            found.extend(self._commit(residency, places[done], event.checksums[done], now))
        if not done.all():
            self._abort(queue, residency, places[~done], event.lower_slots[~done])
            found.append(ins.WriteGone(event.namespace, event.slots[~done]))
        lower.book.unpin(event.lower_slots)
        for outcome, reason in _LOST_FOR.items():
            bad = event.lower_slots[event.outcomes == outcome].tolist()
            lost = [slot for slot in bad if lower.book.is_ready(slot)]
            found.extend(lower.lose(residency, lost, reason))
        queue.rung.demotions.retiring.note_unblocked()
        return found

    def _abort(
        self, queue: _Queue, residency: Residency, places: Places, lower_slots: Slots
    ) -> None:
        """These blocks do not come. No segment waits for them to go again, of whichever tier."""
        rows = residency.tier.row[places]
        rows = rows[rows != NOBODY]
        residency.abort_promotion(places)
        queue.rung.demotions.retiring.note_ended(lower_slots.tolist())
        for rung in self._ladder.opened():
            slots = rung.lower.columns(residency.index).slot[rows]
            rung.demotions.retiring.note_ended(slots.tolist())

    def _commit(
        self, residency: Residency, places: Places, checksums: npt.NDArray[np.uint64], now: float
    ) -> list[ins.Instruction]:
        namespace = residency.facts.namespace
        rows = residency.end_promotion(places, now)
        slots = residency.tier.slots_of(places)
        hashes, parents = residency.named(rows)
        self.promoted_count += len(rows)
        for rung in self._ladder.opened():
            rung.demotions.retiring.note_promoted(residency, rows)
        # Now that they can be copied: a faster tier may not have what this one gave.
        self._ladder.note_use(residency, rows)
        return [
            ins.WriteReady(
                namespace, slots, hashes, parents, residency.epoch, self._shares.sequence(len(rows))
            ),
            ins.WriteChecksums(namespace, slots, checksums),
            *(
                ins.BlocksStored(namespace, TierName.DRAM, run, parent)
                for run, parent in runs_of(hashes, parents)
            ),
        ]


def _bytes(residency: Residency, count: int) -> int:
    return count * residency.facts.layout.slot_bytes
