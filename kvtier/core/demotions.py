"""Write-behind: blocks are copied to a tier below while they are in memory, so that evicting them
writes nothing.

Who goes down: blocks used twice and those of a chain that pauses (*admitted*); of all others those
that the eviction policy finds likely to be used again, the likelier the less is left of the write
budget (policy/admission.py), or, where it cannot tell, all while the budget has room to spare. A
chain goes head first: a block whose parent has no copy brings its parents along. Blocks of a
segment that is about to be reused go again, once, if they were used since they were written
(`retiring.py`).

No block is worth the segment that its parent lies in: another is reused for it, and where there is
none the rest of the chain is given up. So is a block that loses its copy with a segment. They, and
who needs them, go down when they, or one that follows them, are asked for again. Otherwise chains
longer than what their tenants may fill would go round for ever: the end brings the beginning along,
for which the segment with the end is reused.

Invariant: a block is under way at most once; its place is pinned and its new slot reserved until
Demoted comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.index import NOBODY, PrefixIndex, RowFlag, Rows
from kvtier.core.lower_tier import LowerTier
from kvtier.core.replica import READY
from kvtier.core.residency import Residency
from kvtier.core.retiring import Retiring
from kvtier.core.runs import runs_of
from kvtier.core.segment_shares import SegmentShares
from kvtier.core.settings import LowerSettings
from kvtier.core.tenancy import Tenancy, Turns
from kvtier.core.write_budget import HOUR_SECONDS
from kvtier.core.write_shares import WriteShares
from kvtier.policy.admission import Admission, least_probability
from kvtier.policy.eviction import EvictionPolicy, ForecastingPolicy
from kvtier.types import BlockHash, NamespaceId, RemovedFor, TierName

# What waits is bounded: the oldest gives way, and may ask again at its next use.
_WAITING_MAX = 1 << 16
# How far up a chain a block looks for the first parent that has no copy. Chains wait in order, so
# as a rule it is one step.
_PARENTS_MAX = 1024
# However many that wait are gone already, one call looks at no more than so many batches of them.
_GATHERED_MAX = 8
# A segment is kept free for blocks that go again, where there are enough of them.
_SEGMENTS_FOR_SPARE = 3


_Queue = deque[tuple[NamespaceId, int]]
_Waiting = dict[str, _Queue]


@dataclass(slots=True)
class _UnderWay:
    index: PrefixIndex
    row: int
    block: BlockHash


class Demotions:
    """Part of the block manager, with its own slice of its state."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceId, Residency],
        lower: LowerTier,
        settings: LowerSettings,
        tenancy: Tenancy,
    ) -> None:
        self._namespaces = namespaces
        self._lower = lower
        self._settings = settings
        self._segments = SegmentShares(lower, tenancy)
        self.retiring = Retiring(lower, wait_seconds=settings.retire_wait_seconds)
        self.budget = WriteShares(tenancy.budgets, bytes_per_hour=settings.write_bytes_per_hour)
        self._turns = Turns(tenancy)
        # Those that wait, by tenant.
        self._admitted: _Waiting = {}
        self._spare: _Waiting = {}
        self._under_way: dict[int, _UnderWay] = {}  # By the slot below.
        self.under_way_bytes = 0
        self.written_bytes = 0
        self.demoted_count = 0
        self.refused_count = 0  # Blocks that were not worth their write when their turn came.
        self._not_before = 0.0  # Whoever refuses a block is left alone for a moment.

    def note_opened(self) -> None:
        if self._settings.is_filling_free:
            book = self._lower.book
            self.budget.fill(book.free_segment_count * book.segment_bytes)

    @property
    def waiting_count(self) -> int:
        return sum(map(len, (*self._admitted.values(), *self._spare.values())))

    @property
    def under_way_count(self) -> int:
        return len(self._under_way)

    def check_invariants(self) -> list[str]:
        if not self._lower.is_open:
            return []
        found = []
        if self._lower.book.reserved_count != len(self._under_way):
            found.append(f"{self._lower.tier} slots are reserved for nothing")
        if self.under_way_bytes < 0 or (not self._under_way and self.under_way_bytes):
            found.append("bytes are demoted of no block")
        for namespace, residency in self._namespaces.items():
            index = residency.index
            if residency.sweep_pending:
                continue
            mine = {one.row for one in self._under_way.values() if one.index is index}
            rows = np.fromiter(index.row_of.rows(), np.int32, len(index.row_of))
            flags = self._lower.columns(index).flags
            if not mine.issuperset(rows[(flags[rows] & RowFlag.DEMOTING) != 0].tolist()):
                found.append(f"namespace {namespace}: a block is called DEMOTING for ever")
        return found

    # ----------------------------------------------------------------------------------- asking

    def note_use(self, residency: Residency, rows: Rows) -> None:
        """These blocks, in chain order, were used: those used twice are admitted."""
        if self._lower.is_writable:
            absent = self._lower.columns(residency.index).slot[rows] == NOBODY
            twice = rows[(residency.index.uses[rows] >= 2) & absent]
            if len(twice):
                self._renew(residency, twice)
                self._ask(self._admitted, RowFlag.ADMITTED, residency, twice)

    def note_summed(self, residency: Residency, rows: Rows) -> None:
        """These blocks, in chain order, have a checksum now."""
        if self._lower.is_writable and len(rows):
            self._renew(residency, rows)
            twice = residency.index.uses[rows] >= 2
            self._ask(self._admitted, RowFlag.ADMITTED, residency, rows[twice])
            if self._takes_spare(residency.policy):
                self._ask(self._spare, RowFlag.SPARE, residency, rows[~twice])

    def admit(self, residency: Residency, rows: Rows) -> None:
        """A hint: these blocks will be wanted again, later."""
        index = residency.index
        index.uses[rows] = np.maximum(index.uses[rows], 2)
        self.note_use(residency, rows)

    def _renew(self, residency: Residency, rows: Rows) -> None:
        """These are asked for: they, and those before the first of them, may go down once more."""
        index, flags = residency.index, self._lower.columns(residency.index).flags
        flags[rows] &= ~RowFlag.GIVEN_UP
        at = int(index.parent[rows[0]])
        while at != NOBODY and flags[at] & RowFlag.GIVEN_UP:  # Each was written once: it is paid.
            flags[at] &= ~RowFlag.GIVEN_UP
            at = int(index.parent[at])

    def _ask(
        self,
        waiting: _Waiting,
        flag: np.uint8,
        residency: Residency,
        rows: Rows,
    ) -> None:
        index, tier = residency.index, residency.tier
        if not self._lower.has_room_for(residency):
            return
        columns = self._lower.columns(index)
        places = index.place[rows]
        fresh = (columns.slot[rows] == NOBODY) & tier.is_ready(places) & tier.summed[places]
        fresh &= (columns.flags[rows] & (flag | RowFlag.DEMOTING)) == 0
        mine = rows[fresh]
        columns.flags[mine] |= flag
        namespace = residency.facts.namespace
        queue = waiting.setdefault(residency.facts.tenant, deque())
        queue.extend((namespace, row) for row in mine.tolist())
        while len(queue) > _WAITING_MAX:
            self._pop(queue, flag)

    def _pop(self, queue: _Queue, flag: np.uint8) -> None:
        namespace, row = queue.popleft()
        flags = self._lower.columns(self._namespaces[namespace].index).flags
        if row < len(flags):
            flags[row] &= ~flag

    # --------------------------------------------------------------------------------- beginning

    def pump(self, now: float) -> list[ins.Instruction]:
        """Begin as many demotions as the limits allow."""
        found: list[ins.Instruction] = []
        if not self._lower.is_writable or now < self._not_before:
            return found
        self.budget.tell(now)
        while (
            self.under_way_bytes < self._settings.transfer_bytes_max
            and self.under_way_count < self._settings.transfer_blocks_max
        ):
            begun = self._begin_again() or self._begin_next(now)
            if not begun:
                break
            found.extend(begun)
        return found

    def _begin_again(self) -> list[ins.Instruction]:
        """Blocks of the segment that is retiring."""
        batch = self.retiring.take_batch(self._settings.batch_blocks)
        if batch is None:
            return []
        residency, rows = batch
        found, begun_count = self._begin(residency, rows, free_kept_count=0)
        self.retiring.note_begun(residency, rows, begun_count)
        return found

    def _begin_next(self, now: float) -> list[ins.Instruction]:
        stuck: set[str] = set()  # They have blocks, and no slots for them.
        for waiting, flag in ((self._admitted, RowFlag.ADMITTED), (self._spare, RowFlag.SPARE)):
            for tenant in self._turns.order(one for one, queue in waiting.items() if queue):
                if tenant in stuck or not self._may_write(tenant, waiting[tenant], flag):
                    continue
                found = self._begin_of(tenant, waiting[tenant], flag, now)
                if found:
                    return found
                if found is not None:
                    stuck.add(tenant)
        return []

    def _may_write(self, tenant: str, queue: _Queue, flag: np.uint8) -> bool:
        if not self.budget.may_write(tenant):
            return False
        if flag != RowFlag.SPARE or self._forecasts(queue) is not None:
            return True
        return self.budget.has_spare(tenant)

    def make_room(self, tenant: str, now: float, *, kept: int = NOBODY) -> bool:
        """The tenant needs a segment, and there is none to be bound: another than `kept` is given
        up. False where it could only be that one."""
        if not self.retiring.may_begin:
            return True
        may_retire = self._segments.to_retire(tenant, now)
        return (
            self.retiring.begin(now, lambda life: life.segment != kept and may_retire(life))
            or self._lower.book.oldest_of_all(may_retire) is None
        )

    def _make_room_for(self, residency: Residency, row: int, now: float) -> bool:
        parent = int(residency.index.parent[row])
        slot = (
            int(self._lower.columns(residency.index).slot[parent]) if parent != NOBODY else NOBODY
        )
        kept = slot // self._lower.book.row_count_max if slot != NOBODY else NOBODY
        return self.make_room(residency.facts.tenant, now, kept=kept)

    def _begin_of(
        self, tenant: str, queue: _Queue, flag: np.uint8, now: float
    ) -> list[ins.Instruction] | None:
        """The next blocks of one tenant; None where all that wait have gone."""
        for _ in range(_GATHERED_MAX):
            if not queue:
                break
            self._refuse_unlikely(queue, flag)
            residency, rows = self._gather(queue, flag)
            if not len(rows):
                continue  # All of them have gone, or gone down, or shall not.
            segments = self._lower.book.segment_count
            kept_count = 1 if segments >= _SEGMENTS_FOR_SPARE else 0
            if not self._segments.may_bind(tenant):
                kept_count = segments
            found, begun_count = self._begin(residency, rows, free_kept_count=kept_count)
            left = rows[begun_count:]
            if len(left) and self._make_room_for(residency, int(left[0]), now):
                self._put_back(queue, flag, residency, left)
            elif len(left):
                self._give_up(residency, left)
                if not found:
                    continue
            return found or self._begin_again()
        return None

    def _takes_spare(self, policy: EvictionPolicy) -> bool:
        """Whether blocks are asked for that were used once."""
        if self._settings.admission is not Admission.FORECAST:
            return self._settings.admission is Admission.ALL
        return self._settings.is_spare_written or isinstance(policy, ForecastingPolicy)

    def _forecasts(self, queue: _Queue) -> ForecastingPolicy | None:
        """Who tells whether what waits there first will be used again."""
        if not queue or self._settings.admission is not Admission.FORECAST:
            return None
        return self._namespaces[queue[0][0]].forecasting

    def _refuse_unlikely(self, queue: _Queue, flag: np.uint8) -> None:
        """Of those that wait first, let go who is not worth the write; what was used twice is,
        unless nobody will use it. They may ask again at their next use."""
        policy = self._forecasts(queue)
        if policy is None:
            return
        namespace = queue[0][0]
        index = self._namespaces[namespace].index
        flags = self._lower.columns(index).flags
        first = [row for one, row in islice(queue, self._settings.batch_blocks) if one == namespace]
        rows = np.array(first, dtype=np.int32)
        rows = rows[rows < len(flags)]
        rows = rows[(flags[rows] & flag) != 0]
        likely = policy.reuse_probabilities(rows, self._stay_seconds())
        share = self.budget.share(self._namespaces[namespace].facts.tenant)
        least = least_probability(share)
        if flag == RowFlag.ADMITTED or share > 1.0:
            least = 0.0
        refused = rows[(likely < least) & (index.uses[rows] < 2) | (likely <= 0)]
        flags[refused] &= ~flag  # So their turn passes over them.
        self.refused_count += len(refused)

    def _stay_seconds(self) -> float:
        """How long what is written now is taken to lie there."""
        hours = self._lower.book.capacity_bytes / self.budget.bytes_per_hour
        return max(self._settings.forecast_seconds_min, HOUR_SECONDS * hours)

    def _gather(self, queue: _Queue, flag: np.uint8) -> tuple[Residency, Rows]:
        """The next blocks of one namespace, with the parents that they need; flagged DEMOTING."""
        namespace = queue[0][0]
        residency = self._namespaces[namespace]
        flags = self._lower.columns(residency.index).flags
        batch_bytes, slot_bytes = self._settings.batch_bytes, residency.facts.layout.slot_bytes
        count_max = max(1, min(self._settings.batch_blocks, batch_bytes // slot_bytes))
        rows: list[int] = []
        looked_count = 0
        while queue and queue[0][0] == namespace and len(rows) < count_max:
            row = queue[0][1]
            looked_count += 1
            chain = self._missing_chain(residency, row, flag)
            room = count_max - len(rows)
            if len(chain) <= room:
                self._pop(queue, flag)
            for one in chain[:room]:
                flags[one] |= RowFlag.DEMOTING
                rows.append(one)
            if looked_count == 4 * count_max:
                break  # Many that are gone already: go on at the next call.
        return residency, np.array(rows, dtype=np.int32)

    def _missing_chain(self, residency: Residency, row: int, flag: np.uint8) -> list[int]:
        """The block and those before it that have no copy, first one first; none if that cannot
        be, or if it has one."""
        index, tier = residency.index, residency.tier
        columns = self._lower.columns(index)
        if row >= len(columns.flags) or not columns.flags[row] & flag or not index.has_row(row):
            return []
        chain: list[int] = []
        at = row
        while at != NOBODY and columns.slot[at] == NOBODY:
            if columns.flags[at] & RowFlag.DEMOTING:
                break
            if not residency.is_in_memory(at) or not tier.summed[index.place[at]]:
                return []
            if columns.flags[at] & RowFlag.GIVEN_UP:
                return []
            chain.append(at)
            if len(chain) > _PARENTS_MAX:
                return []
            at = int(index.parent[at])
        chain.reverse()
        return chain

    def _put_back(
        self,
        queue: _Queue,
        flag: np.uint8,
        residency: Residency,
        rows: Rows,
    ) -> None:
        columns = self._lower.columns(residency.index)
        columns.flags[rows] &= ~RowFlag.DEMOTING
        columns.flags[rows] |= flag
        namespace = residency.facts.namespace
        queue.extendleft((namespace, row) for row in rows[::-1].tolist())

    def _give_up(self, residency: Residency, rows: Rows) -> None:
        flags = self._lower.columns(residency.index).flags
        flags[rows] &= ~RowFlag.DEMOTING
        flags[rows] |= RowFlag.GIVEN_UP

    def _begin(
        self, residency: Residency, rows: Rows, *, free_kept_count: int
    ) -> tuple[list[ins.Instruction], int]:
        """Begin to demote the first of these blocks, for which there are slots; how many."""
        facts, book = residency.facts, self._lower.book
        found: list[ins.Instruction] = []
        reserved = book.reserve(
            facts.fingerprint,
            facts.layout,
            len(rows),
            reuse=False,
            free_kept_count=free_kept_count,
        )
        if reserved.bound:
            self._lower.forget_segments([header.segment for header in reserved.bound])
            found.append(ins.BindSegments(reserved.bound, self._lower.tier))
        count = len(reserved.slots)
        if not count:
            return found, 0
        mine = rows[:count]
        places = residency.index.place[mine]
        residency.tier.pin_for_transfer(places)
        index = residency.index
        for row, slot in zip(mine.tolist(), reserved.slots.tolist(), strict=True):
            block = index.hash_of[row]
            assert block is not None, "a resident row without its hash"
            self._under_way[slot] = _UnderWay(index, row, block)
        length_bytes = count * facts.layout.slot_bytes
        self.under_way_bytes += length_bytes
        self.budget.take(facts.tenant, length_bytes)
        self._turns.charge(facts.tenant, length_bytes)
        slots, hashes = residency.tier.slots_of(places), residency.hashes_of(mine)
        found.append(ins.Demote(facts.namespace, slots, reserved.slots, hashes, self._lower.tier))
        return found, count

    # ------------------------------------------------------------------------------------ ending

    def on_demoted(self, event: ev.Demoted, now: float) -> list[ins.Instruction]:
        residency = self._namespaces[event.namespace]
        tier = residency.tier
        places = tier.allocator.places_of(event.slots)
        self.under_way_bytes -= len(event.slots) * residency.facts.layout.slot_bytes
        ended = [self._end(residency, slot) for slot in event.lower_slots.tolist()]
        rows = np.array(ended, dtype=np.int32)
        alive = (tier.state[places] == READY) & (tier.row[places] == rows)
        done = alive & (rows != NOBODY) & (event.outcomes == ev.TransferOutcome.DONE)
        done &= self._lower.is_readable
        columns = self._lower.columns(residency.index)
        self.retiring.note_ended(columns.slot[rows[rows != NOBODY]].tolist())
        found: list[ins.Instruction] = []
        if done.any():
            found.extend(self._commit(residency, rows[done], event, done))
        self._lower.book.abort(event.lower_slots[~done])
        corrupt = places[alive & (event.outcomes == ev.TransferOutcome.CORRUPT)]
        hashes = residency.void_places(corrupt)
        if len(corrupt):
            found.append(ins.WriteGone(event.namespace, tier.slots_of(corrupt)))
        if hashes:
            namespace, reason = event.namespace, RemovedFor.CORRUPT
            found.append(ins.BlocksRemoved(namespace, TierName.DRAM, hashes, reason))
        refused = alive & (rows != NOBODY) & (event.outcomes == ev.TransferOutcome.REFUSED)
        if refused.any():
            self._not_before = now + self._settings.refused_seconds
            self._ask(self._admitted, RowFlag.ADMITTED, residency, rows[refused])
        tier.unpin_transfer(places)
        return found

    def _end(self, residency: Residency, slot: int) -> int:
        """The row of the block that was being written to this slot; NOBODY if it is gone."""
        one = self._under_way.pop(slot)
        if one.index is not residency.index or one.index.hash_of[one.row] is not one.block:
            return NOBODY  # Cleared, or gone and its row perhaps another's.
        self._lower.columns(one.index).flags[one.row] &= ~RowFlag.DEMOTING
        return one.row if one.index.is_whole(one.row) else NOBODY

    def _commit(
        self, residency: Residency, rows: Rows, event: ev.Demoted, done: np.ndarray
    ) -> list[ins.Instruction]:
        slots = event.lower_slots[done]
        hashes, parents = residency.named(rows)
        # The others go again.
        fresh = self._lower.columns(residency.index).slot[rows] == NOBODY
        left = self._lower.commit(residency, rows, slots)
        sequence = self._lower.book.take_sequences(len(slots))
        self.demoted_count += len(slots)
        self.written_bytes += len(slots) * residency.facts.layout.slot_bytes
        return [
            ins.WriteLowerReady(
                namespace=event.namespace,
                lower_slots=slots,
                hashes=hashes,
                parents=parents,
                checksums=event.checksums[done],
                epoch=residency.epoch,
                sequence=sequence,
                tier=self._lower.tier,
            ),
            *left,
            *(
                ins.BlocksStored(event.namespace, self._lower.tier, run, parent)
                for run, parent in runs_of(*residency.named(rows[fresh]))
            ),
        ]
