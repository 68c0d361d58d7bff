"""Promotion: blocks that are on NVMe only are read into memory, in chain order.

Slots are taken when a promotion is asked for, all of them at once; the reads begin as the limit
allows: first what somebody waits for, largest saving first, then prefetches, then blocks of a
segment that retires. What nobody waits for any more before its read began is dropped.

Invariant: while a block is promoted its place is RESERVED by the daemon and names its row, and its
NVMe slot is pinned, until Promoted comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.demotions import Demotions
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.index import NOBODY, Rows
from kvtier.core.nvme_tier import NvmeTier
from kvtier.core.replica import Places, ReplicaState
from kvtier.core.residency import Residency
from kvtier.core.runs import runs_of
from kvtier.core.segments import Slots
from kvtier.core.settings import NvmeSettings
from kvtier.core.shares import Shares
from kvtier.core.tiers import DAEMON_OWNER
from kvtier.types import Cut, NamespaceId, SessionId, TierName


class Want(IntEnum):
    """Who wants a promotion; the smaller goes first."""

    LEASE = 0
    PREFETCH = 1
    AGAIN = 2


@dataclass(slots=True)
class _Asked:
    want: Want
    residency: Residency
    nvme_slots: Slots
    places: Places
    begun_count: int = 0

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Of those that have not begun, only these."""
        begun = self.begun_count
        self.places = np.concatenate([self.places[:begun], self.places[begun:][mask]])
        self.nvme_slots = np.concatenate([self.nvme_slots[:begun], self.nvme_slots[begun:][mask]])


class Promotions:
    """Part of the block manager, with its own slice of its state."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        nvme: NvmeTier,
        shares: Shares,
        demotions: Demotions,
        settings: NvmeSettings,
    ) -> None:
        self._namespaces = namespaces
        self._nvme = nvme
        self._shares = shares
        self._demotions = demotions
        self._settings = settings
        self._asked: list[tuple[int, int, int, _Asked]] = []  # A heap.
        self._asked_count = 0
        self._sequence = 0
        self.under_way_bytes = 0
        self.waiting_bytes = 0  # Asked for, and not begun.
        self.under_way_count = 0
        self.promoted_count = 0

    @property
    def is_possible(self) -> bool:
        return self._nvme.is_readable

    def check_invariants(self) -> list[str]:
        if not self._nvme.is_open:
            return []
        found = []
        waiting = [(one, len(one.places) - one.begun_count) for _, _, _, one in self._asked]
        if self._nvme.book.pin_count != self.under_way_count + sum(count for _, count in waiting):
            found.append("NVMe slots are pinned for nothing, or read without a pin")
        if self.waiting_bytes != sum(self._bytes(one.residency, count) for one, count in waiting):
            found.append("bytes wait to be promoted of no block")
        if self.under_way_bytes < 0 or (not self.under_way_count and self.under_way_bytes):
            found.append("bytes are promoted of no block")
        for namespace, residency in self._namespaces.items():
            tier = residency.tier
            asked = {
                place
                for one, _ in waiting
                if one.residency is residency
                for place in one.places[one.begun_count :].tolist()
            }
            filling = (tier.owner == DAEMON_OWNER) & (tier.row != NOBODY)
            if not asked.issuperset(np.flatnonzero(filling).tolist()) and not self.under_way_count:
                found.append(f"namespace {namespace}: a slot waits for a block that nobody reads")
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
    ) -> tuple[Places, list[ins.Instruction]]:
        """Take slots for the leading blocks of `rows`, all on NVMe only; their places.

        Fewer than asked for when there is no room. Their reads begin with `pump`.
        """
        none = np.zeros(0, dtype=np.int32)
        if not self._nvme.is_readable or not len(rows):
            return none, []
        places, found = self._shares.take_for_promotion(residency, session, len(rows), now)
        rows = rows[: len(places)]
        if not len(places):
            return none, found
        nvme_slots = residency.index.nvme_slot[rows].astype(np.uint32)
        residency.begin_promotion(rows, places)
        self._nvme.book.pin(nvme_slots)
        self.waiting_bytes += self._bytes(residency, len(places))
        self._push(want, residency, nvme_slots, places)
        slots = residency.tier.slots_of(places)
        found.append(ins.WriteReserved(residency.facts.namespace, slots, None))
        return places, found

    def hasten(self, residency: Residency, places: Places) -> None:
        """Somebody waits for these now: they are not read last, whoever asked for them."""
        if not len(places) or not (residency.tier.state[places] == ReplicaState.RESERVED).any():
            return
        for want, _, _, asked in list(self._asked):
            if want == Want.LEASE or asked.residency is not residency:
                continue
            begun = asked.begun_count
            mine = np.isin(asked.places[begun:], places)
            if mine.any():
                self._push(
                    Want.LEASE,
                    residency,
                    asked.nvme_slots[begun:][mine],
                    asked.places[begun:][mine],
                )
                asked.keep(~mine)

    def _push(self, want: Want, residency: Residency, nvme_slots: Slots, places: Places) -> None:
        self._asked_count += 1
        asked = _Asked(want, residency, nvme_slots, places)
        heapq.heappush(self._asked, (want, -len(places), self._asked_count, asked))

    def on_prefetch(self, event: ev.Prefetch, now: float) -> list[ins.Instruction]:
        """A slice: the leading blocks in memory are counted, those behind them asked for."""
        residency = self._namespaces[event.namespace]
        start, stop = event.done_count, event.done_count + self._shares.promoted_slice_blocks
        part = event.hashes[start:stop]
        rows, cut = residency.straight_rows(part, event.hashes[start - 1] if start else None)
        residency.keep(rows, now)  # Or room is made by evicting what they follow.
        absent = rows[residency.index.place[rows] == NOBODY]
        room_bytes = int(self._shares.pool_bytes * self._settings.prefetch_fraction_max)
        room_bytes -= self.waiting_bytes + self.under_way_bytes
        room = max(0, room_bytes // residency.facts.block_bytes)
        places, found = self.ask(residency, absent[:room], want=Want.PREFETCH, now=now)
        found.extend(self.pump(now))
        promoting_count = event.promoting_count + len(places)
        if cut is Cut.NONE and len(places) == len(absent) and stop < len(event.hashes):
            rest = replace(event, done_count=stop, promoting_count=promoting_count)
            return [*found, ins.Continue(rest)]
        matched = residency.index.match(event.hashes)
        memory_count = residency.memory_count(event.hashes, matched)
        return [*found, ins.PrefetchBegun(memory_count, promoting_count)]

    # --------------------------------------------------------------------------------- beginning

    def pump(self, now: float) -> list[ins.Instruction]:
        """Begin as many reads as the limit allows."""
        found: list[ins.Instruction] = []
        if self._nvme.is_open:
            absent = self._demotions.retiring.take_absent()
            if absent is not None:
                found.extend(self._ask_again(*absent, now))
        while (
            self._asked
            and self.under_way_bytes < self._settings.transfer_bytes_max
            and self.under_way_count < self._settings.transfer_blocks_max
        ):
            _, _, _, asked = self._asked[0]
            found.extend(self._begin_batch(asked))
            if asked.begun_count == len(asked.places):
                heapq.heappop(self._asked)
        return found

    def _ask_again(self, residency: Residency, rows: Rows, now: float) -> list[ins.Instruction]:
        places, found = self.ask(residency, rows, want=Want.AGAIN, now=now)
        left = rows[len(places) :]
        if len(places):
            self._demotions.retiring.put_back_absent(left)
        else:
            self._demotions.retiring.note_ended(residency.index.nvme_slot[left].tolist())
        return found

    def _begin_batch(self, asked: _Asked) -> list[ins.Instruction]:
        residency = asked.residency
        tier = residency.tier
        block_bytes = self._bytes(residency, 1)
        count = max(1, min(self._settings.batch_blocks, self._settings.batch_bytes // block_bytes))
        part = slice(asked.begun_count, asked.begun_count + count)
        places, nvme_slots = asked.places[part], asked.nvme_slots[part]
        asked.begun_count += len(places)
        self.waiting_bytes -= self._bytes(residency, len(places))
        wanted = tier.state[places] == ReplicaState.RESERVED
        if asked.want is Want.LEASE:
            wanted &= tier.lease_pins[places] > 0
        if not self._nvme.is_readable:
            wanted[:] = False
        found = self._drop(residency, places[~wanted], nvme_slots[~wanted])
        places, nvme_slots = places[wanted], nvme_slots[wanted]
        if not len(places):
            return found
        self.under_way_bytes += self._bytes(residency, len(places))
        self.under_way_count += len(places)
        slots = tier.slots_of(places)
        return [*found, ins.Promote(residency.facts.namespace, nvme_slots, slots)]

    def drop_unwanted(self) -> list[ins.Instruction]:
        """Give the slots back of what nobody waits for any more and is not under way."""
        found: list[ins.Instruction] = []
        for _, _, _, asked in self._asked:
            if asked.want is not Want.LEASE:
                continue
            tier, begun = asked.residency.tier, asked.begun_count
            places = asked.places[begun:]
            unwanted = tier.lease_pins[places] == 0
            if not unwanted.any():
                continue
            gone = asked.nvme_slots[begun:][unwanted]
            self.waiting_bytes -= self._bytes(asked.residency, len(gone))
            found.extend(self._drop(asked.residency, places[unwanted], gone))
            asked.keep(~unwanted)
        return found

    def _drop(
        self, residency: Residency, places: Places, nvme_slots: Slots
    ) -> list[ins.Instruction]:
        """Nobody wants these any more, or they have been voided."""
        if not len(places):
            return []
        slots = residency.tier.slots_of(places)
        residency.abort_promotion(places)
        self._nvme.book.unpin(nvme_slots)
        self._demotions.retiring.note_ended(nvme_slots.tolist())
        return [ins.WriteGone(residency.facts.namespace, slots)]

    # ------------------------------------------------------------------------------------ ending

    def on_promoted(self, event: ev.Promoted, now: float) -> list[ins.Instruction]:
        """What the reads brought; the manager then looks who waits for it."""
        residency = self._namespaces[event.namespace]
        tier = residency.tier
        places = tier.allocator.places_of(event.slots)
        self.under_way_bytes -= self._bytes(residency, len(places))
        self.under_way_count -= len(places)
        # Voided meanwhile, or doomed and not swept yet.
        alive = np.array(
            [row != NOBODY and residency.index.is_whole(row) for row in tier.row[places].tolist()]
        )
        done = alive & (event.outcomes == ev.TransferOutcome.DONE)
        found: list[ins.Instruction] = []
        if done.any():
            found.extend(self._commit(residency, places[done], event.checksums[done], now))
        if not done.all():
            residency.abort_promotion(places[~done])
            found.append(ins.WriteGone(event.namespace, event.slots[~done]))
        self._nvme.book.unpin(event.nvme_slots)
        bad = (event.outcomes == ev.TransferOutcome.CORRUPT) | (
            event.outcomes == ev.TransferOutcome.FAILED
        )
        lost = [slot for slot in event.nvme_slots[bad].tolist() if self._nvme.book.is_ready(slot)]
        found.extend(self._nvme.lose(residency, lost))
        self._demotions.retiring.note_ended(event.nvme_slots[~done].tolist())
        return found

    def _commit(
        self, residency: Residency, places: Places, checksums: npt.NDArray[np.uint64], now: float
    ) -> list[ins.Instruction]:
        namespace = residency.facts.namespace
        rows = residency.end_promotion(places, now)
        slots = residency.tier.slots_of(places)
        hashes, parents = residency.named(rows)
        self.promoted_count += len(rows)
        self._demotions.retiring.note_promoted(residency, rows)
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

    def _bytes(self, residency: Residency, count: int) -> int:
        return count * residency.facts.layout.slot_bytes
