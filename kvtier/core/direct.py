"""Direct leases: engines that have mapped a tier below memory copy blocks from there themselves.

A block leased so keeps its slot in that tier until the lease ends, as a block in memory keeps its
own; it takes none in memory. A segment is reused as a whole, so one such block holds all of it:
direct leases hold at most half of the segments, and what lies in another one is promoted instead.

Invariant: a segment with a slot that is leased stays bound in the life it has, whatever becomes of
its blocks, and so nobody writes to a slot of it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION, EngineTable
from kvtier.core.index import NOBODY, RowFlag, Rows
from kvtier.core.ladder import Ladder, Rung
from kvtier.core.leases import Lease, LowerSlots
from kvtier.core.residency import Residency
from kvtier.types import SessionId

Mask = npt.NDArray[np.bool_]
NO_SEGMENTS: Collection[int] = frozenset()


class DirectLeases:
    """Part of the block manager: which slots may be leased so, and which are."""

    def __init__(self, engines: EngineTable, ladder: Ladder) -> None:
        self._engines = engines
        self._ladder = ladder
        self._mapped: dict[SessionId, set[int]] = {}  # Segments, by the session that mapped them.
        self._held: Counter[int] = Counter()  # Segment -> leased slots, each as often as leased.

    # ----------------------------------------------------------------------------------- mapping

    def on_segments_mapped(self, event: ev.SegmentsMapped, now: float) -> list[ins.Instruction]:
        """One answer of a process; there is none about segments that it could not map."""
        gone = [one for one in self._mapped if self._engines.get(one) is None]
        for session in gone:
            del self._mapped[session]
        if self._engines.get(event.session) is not None:
            self._mapped.setdefault(event.session, set()).update(event.segments)
        return []

    def usable(self, event: ev.Acquire, residency: Residency) -> Collection[int]:
        """Segments that all processes of the engine have mapped that load this namespace."""
        is_asked = event.takes_direct and event.session != DAEMON_SESSION
        if not is_asked or self._rung is None:
            return NO_SEGMENTS
        engine = self._engines.require_live(event.session).engine
        workers = [
            one for one in self._engines.sessions() if one.engine == engine and one.maps_slots
        ]
        shards = {shard for one in workers for shard in one.shards}
        if not shards.issuperset(range(residency.facts.shard_count)):
            return NO_SEGMENTS
        return frozenset.intersection(
            *(frozenset(self._mapped.get(one.session, ())) for one in workers)
        )

    # ----------------------------------------------------------------------------------- leasing

    def choose(
        self, residency: Residency, rows: Rows, skipped: int, usable: Collection[int]
    ) -> LowerSlots:
        """Each block's slot, where it may be leased as it lies there; NOBODY elsewhere, and for
        what is in memory."""
        chosen = np.full(len(rows), NOBODY, dtype=np.int64)
        rung = self._rung
        if rung is None or not usable:
            return chosen
        index, book = residency.index, rung.lower.book
        slots = rung.lower.columns(index).slot[rows]
        may = (slots != NOBODY) & ~residency.tier.is_ready(index.place[rows])
        may[:skipped] = False
        segments = slots // book.row_count_max
        allowed: set[int] = set()
        room = book.segment_count // 2 - len(self._held)
        for segment in dict.fromkeys(segments[may].tolist()):  # In the order of the chain.
            if segment in usable and (segment in self._held or room > 0):
                room -= segment not in self._held
                allowed.add(segment)
        may &= np.isin(segments, list(allowed))
        chosen[may] = slots[may]
        return chosen

    def pin(self, slots: LowerSlots) -> None:
        mine = slots[slots != NOBODY].astype(np.uint32)
        if len(mine):
            lower = self._opened.lower
            lower.pin_for_lease(mine)
            self._held.update((mine // lower.book.row_count_max).tolist())

    def unpin(self, slots: LowerSlots) -> None:
        mine = slots[slots != NOBODY].astype(np.uint32)
        if not len(mine):
            return
        rung = self._opened
        for segment in (mine // rung.lower.book.row_count_max).tolist():
            self._held[segment] -= 1
            if not self._held[segment]:
                del self._held[segment]
        rung.lower.unpin_lease(mine)
        rung.demotions.retiring.note_unblocked()

    def are_whole(self, slots: LowerSlots) -> Mask:
        """Which leased slots still hold their block; pinned, so nothing else can be there."""
        found: Mask = slots != NOBODY
        if np.count_nonzero(found):
            book = self._opened.lower.book
            found[found] = [book.is_ready(slot) for slot in slots[found].tolist()]
        return found

    def used_again(self, residency: Residency, rows: Rows, slots: LowerSlots) -> Rows:
        """Note a direct use of each; which of them have had one since they were last promoted and
        are not in memory, or on their way there."""
        is_direct = slots != NOBODY
        rows = rows[is_direct]
        if not len(rows):
            return rows
        flags = self._opened.lower.columns(residency.index).flags
        again: Rows = rows[
            ((flags[rows] & RowFlag.DIRECT) != 0) & (residency.index.place[rows] == NOBODY)
        ]
        flags[rows] |= RowFlag.DIRECT
        flags[again] &= ~RowFlag.DIRECT
        return again

    # ----------------------------------------------------------------------------------- helpers

    def check_invariants(self, leases: Collection[Lease]) -> list[str]:
        rung = self._rung_opened
        if rung is None:
            return ["segments are held of a tier that is not open"] if self._held else []
        book = rung.lower.book
        expected: Counter[int] = Counter()
        for lease in leases:
            mine = lease.all_direct()
            expected.update((mine[mine != NOBODY] // book.row_count_max).tolist())
        found = []
        if expected != self._held:
            found.append("direct leases and what they hold disagree")
        if any(book.life_of(segment) is None for segment in expected):
            found.append("a segment under a direct lease is free")
        if len(self._held) > book.segment_count // 2:
            found.append("direct leases hold more than half of the segments")
        return found

    @property
    def _rung(self) -> Rung | None:
        """The tier that may be leased from now."""
        rung = self._rung_opened
        return rung if rung is not None and rung.lower.is_readable else None

    @property
    def _rung_opened(self) -> Rung | None:
        return next((one for one in self._ladder.opened() if one.lower.is_direct), None)

    @property
    def _opened(self) -> Rung:
        found = self._rung_opened
        assert found is not None, "a direct lease on a tier that allows none"
        return found
