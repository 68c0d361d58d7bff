"""Segments of a pool below memory: which are free, whose they are, which is given up next; pure.

A segment belongs to one namespace at a time and has slots of one size. Slots are given out from its
start to its end and none a second time: a block that goes leaves a hole, and the segment is reused
as a whole, oldest first, whoever filled it. So the disk is written from end to end before a place
is written again, and no namespace can hold on to what it does not use.

A segment is not reused while a slot of it is pinned or reserved. Slot numbers are
`segment * row_count_max + row`; entries of the slot table stand in the same rows.

Lanes: with several paths, segment s lies on path s % lane_count, and a namespace fills one segment
on each path at the same time, a slot here and a slot there.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core.remains import Remains, ranges_of
from kvtier.layout import SegmentHeader, SlotLayout

Slots = npt.NDArray[np.uint32]
Sequences = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Group = tuple[int, npt.NDArray[np.int64]]  # A segment, and the positions of its slots in a list.


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots to be written, and what giving them out has cost."""

    slots: Slots
    bound: tuple[SegmentHeader, ...]  # Segments that have a new life since this call.
    evicted: Slots  # READY slots of their former lives: gone.


class _State(IntEnum):
    """Of one slot in the present life of its segment; it only ever goes up."""

    UNUSED = 0
    RESERVED = 1
    READY = 2
    GONE = 3


_VOIDED = bytes(_State.GONE if value == _State.READY else value for value in range(256))


@dataclass(slots=True)
class _Segment:
    header: SegmentHeader
    rows: bytearray  # One _State a slot.
    row_next: int = 0
    ready_count: int = 0
    reserved_count: int = 0
    pins: dict[int, int] = field(default_factory=dict)  # Row -> how often.
    is_erasing: bool = False  # What no block lies in is being overwritten.

    @property
    def is_held(self) -> bool:
        return self.reserved_count > 0 or bool(self.pins) or self.is_erasing

    @property
    def is_full(self) -> bool:
        return self.row_next == self.header.slot_count

    @property
    def is_empty(self) -> bool:
        return self.ready_count == 0 and not self.is_held


class SegmentBook:
    """Invariants: a segment is free or bound, never both; slots in use never exceed the capacity;
    bound segments of a lane stand in the order of their sequence numbers.
    """

    def __init__(
        self,
        *,
        segment_bytes: int,
        segment_count: int,
        row_count_max: int,
        lane_count: int = 1,
        sequence_first: int = 1,
        key_id: int = 0,
    ) -> None:
        """`key_id`: of the key that new segments are sealed with; 0 for none."""
        self.segment_bytes = segment_bytes
        self.segment_count = segment_count
        self.row_count_max = row_count_max
        self._key_id = key_id
        self._sequences = itertools.count(sequence_first)
        self._lanes = lane_count
        self._free = [deque(range(lane, segment_count, lane_count)) for lane in range(lane_count)]
        self._bound: list[OrderedDict[int, _Segment]] = [OrderedDict() for _ in range(lane_count)]
        # The segment that a namespace fills now, by lane, and the lane of its next slot.
        self._filling: dict[tuple[bytes, int], _Segment] = {}
        self._turns: dict[bytes, int] = {}
        self._erasing: dict[int, None] = {}  # Segments neither free nor bound: all is overwritten.

    @property
    def capacity_bytes(self) -> int:
        return self.segment_bytes * self.segment_count

    @property
    def free_segment_count(self) -> int:
        return sum(map(len, self._free))

    @property
    def ready_count(self) -> int:
        return sum(segment.ready_count for segment in self._all())

    @property
    def reserved_count(self) -> int:
        return sum(segment.reserved_count for segment in self._all())

    @property
    def pin_count(self) -> int:
        return sum(sum(segment.pins.values()) for segment in self._all())

    def slot_count(self, layout: SlotLayout) -> int:
        """Slots that a segment has for such blocks; 0 when a slot does not fit."""
        return min(self.segment_bytes // self._here(layout).slot_bytes, self.row_count_max)

    def take_sequences(self, count: int) -> int:
        """The first of `count` numbers, higher than every one given before."""
        first = next(self._sequences)
        self._sequences = itertools.count(first + count)
        return first

    def header_of(self, slot: int) -> SegmentHeader:
        """The present life of the slot's segment; AssertionError when it has none."""
        return self._segment(slot).header

    def reserve(
        self,
        fingerprint: bytes,
        layout: SlotLayout,
        count: int,
        *,
        reuse: bool = True,
        free_kept_count: int = 0,
    ) -> Reserved:
        """Up to `count` slots, in the order to be filled; fewer when there is no segment for them.

        Segments are bound for them as needed: free ones first, but for `free_kept_count` of them;
        then, with `reuse`, the oldest without pins, whose blocks are gone with that.
        """
        assert self.slot_count(layout) > 0, "a slot larger than a segment"
        layout = self._here(layout)
        slots: list[int] = []
        bound: list[SegmentHeader] = []
        evicted: list[int] = []
        turn = self._turns.get(fingerprint, 0)
        lanes_without = 0
        while len(slots) < count and lanes_without < self._lanes:
            lane, turn = turn, (turn + 1) % self._lanes
            segment = self._filling.get((fingerprint, lane))
            if segment is None or segment.is_full or not self._suits(segment, layout):
                self._make_free(lane, reuse, free_kept_count, evicted)
                segment = self._bind(fingerprint, layout, lane, free_kept_count)
                if segment is None:
                    lanes_without += 1
                    continue
                bound.append(segment.header)
            lanes_without = 0
            slots.append(segment.header.segment * self.row_count_max + segment.row_next)
            segment.rows[segment.row_next] = _State.RESERVED
            segment.row_next += 1
            segment.reserved_count += 1
        self._turns[fingerprint] = turn
        return Reserved(_slots(slots), tuple(bound), _slots(evicted))

    def commit(self, slots: Slots) -> None:
        """Reserved slots hold a block from now on."""
        for segment, row in self._places(slots):
            assert segment.rows[row] == _State.RESERVED, "a commit of a slot not reserved"
            segment.rows[row] = _State.READY
            segment.reserved_count -= 1
            segment.ready_count += 1

    def abort(self, slots: Slots) -> None:
        """Reserved slots hold nothing; they are not given out again in this life of the segment."""
        for segment, row in self._places(slots):
            assert segment.rows[row] == _State.RESERVED, "an abort of a slot not reserved"
            segment.rows[row] = _State.GONE
            segment.reserved_count -= 1
            self._free_if_empty(segment)

    def void(self, slots: Slots) -> None:
        """Blocks are gone; a segment of which nothing is left is free."""
        for segment, row in self._places(slots):
            assert segment.rows[row] == _State.READY, "a slot without a block cannot lose it"
            segment.rows[row] = _State.GONE
            segment.ready_count -= 1
            self._free_if_empty(segment)

    def pin(self, slots: Slots) -> None:
        """The segments of these slots are not reused until as many unpins have come."""
        for segment, row in self._places(slots):
            assert segment.rows[row] == _State.READY, "a pin on a slot without a block"
            segment.pins[row] = segment.pins.get(row, 0) + 1

    def unpin(self, slots: Slots) -> None:
        for segment, row in self._places(slots):
            left = segment.pins[row] - 1
            if left:
                segment.pins[row] = left
            else:
                del segment.pins[row]
            self._free_if_empty(segment)

    def oldest(self, lane: int = 0) -> SegmentHeader | None:
        """The segment that is reused next on this lane, should no free one be left."""
        found = self._oldest(lane)
        return None if found is None else found.header

    def oldest_of_all(
        self, may_retire: Callable[[SegmentHeader], bool] | None = None
    ) -> SegmentHeader | None:
        """Of all segments without pins or reservations the one whose life began first: of those
        that `may_retire`."""
        found = [one for lane in range(self._lanes) if (one := self._oldest(lane, may_retire))]
        headers = (one.header for one in found)
        return min(headers, key=lambda header: header.sequence, default=None)

    def life_of(self, segment: int) -> SegmentHeader | None:
        """The segment's present life; None while it is free."""
        found = self._bound_at(segment)
        return None if found is None else found.header

    def lives(self) -> list[SegmentHeader]:
        return [one.header for one in self._all()]

    def is_ready(self, slot: int) -> bool:
        """Whether the slot holds a block."""
        segment = self._bound_at(slot // self.row_count_max)
        row = slot % self.row_count_max
        # Asked of a slot of a former life, which may have had more rows.
        return segment is not None and row < len(segment.rows) and segment.rows[row] == _State.READY

    def are_ready(self, slots: Slots, sequences: Sequences, groups: Iterable[Group]) -> Mask:
        """Which of these hold a block in the life of their segment that has this number; `groups`
        as `by_segment` gives them."""
        found = np.zeros(len(slots), dtype=np.bool_)
        rows = slots % self.row_count_max
        ready = int(_State.READY)  # NumPy is slow with an enum.
        for number, part in groups:
            segment = self._bound_at(number)
            if segment is not None:
                # Only these: another life may have fewer rows.
                same = part[sequences[part] == segment.header.sequence]
                found[same] = np.frombuffer(segment.rows, np.uint8)[rows[same]] == ready
        return found

    def is_pinned(self, slot: int) -> bool:
        return slot % self.row_count_max in self._segment(slot).pins

    def stop_filling(self, segment: int) -> None:
        """Give no more slots of this segment out."""
        found = self._bound_at(segment)
        assert found is not None, "a free segment is not being filled"
        key = (found.header.fingerprint, segment % self._lanes)
        if self._filling.get(key) is found:
            del self._filling[key]
        self._free_if_empty(found)

    def void_all(self, fingerprint: bytes) -> None:
        """Every block of the namespace is gone; reservations and pins end on their own."""
        for segment in list(self._all()):
            if segment.header.fingerprint == fingerprint:
                segment.rows = segment.rows.translate(_VOIDED)
                segment.ready_count = 0
                self._free_if_empty(segment)

    def ready_slots(self, segment: int) -> Slots:
        """The slots of one segment that hold a block."""
        bound = self._bound_at(segment)
        return _slots([] if bound is None else self._ready_slots(bound))

    def adopt(self, lives: Iterable[tuple[SegmentHeader, npt.NDArray[np.int64]]]) -> None:
        """Recovery found these segments, each with its rows that hold a block, ascending; once.

        The newest of a namespace goes on being filled behind its last block; what was written
        behind it before the crash is not in the table, so nobody will miss it.
        """
        assert self.free_segment_count == self.segment_count, "adopting into a used book"
        ready = bytes([_State.READY]) * self.row_count_max
        for header, rows in sorted(lives, key=lambda life: life[0].sequence):
            count = len(rows)
            if count == 0:
                continue
            lane = header.segment % self._lanes
            row_next = int(rows[-1]) + 1
            if count == row_next:  # No hole: as a rule, and there may be thousands of segments.
                states = ready[:count]
            else:
                holed = np.full(row_next, _State.GONE, np.uint8)
                holed[rows] = _State.READY
                states = holed.tobytes()  # gil-ok: at most a few KiB
            segment = _Segment(header, bytearray(header.slot_count), row_next=row_next)
            segment.rows[:row_next] = states
            segment.ready_count = count
            self._bound[lane][header.segment] = segment
            self._filling[header.fingerprint, lane] = segment
        for lane, free in enumerate(self._free):
            bound = self._bound[lane]
            self._free[lane] = deque(number for number in free if number not in bound)

    def hold_remains(self, number: int, fingerprints: Collection[bytes]) -> Remains | None:
        """Hold all of a segment that no block lies in, until `release_remains`. What nobody had
        begun to fill is not filled any more: a slot there may hold the remains of a former life.

        None, and nothing is held, where somebody still reads or writes blocks of `fingerprints`.
        """
        segment = self._bound_at(number)
        if segment is not None and segment.header.fingerprint in fingerprints and segment.is_held:
            return None
        if segment is not None:
            self.stop_filling(number)  # One of which nothing is left is free with that.
            segment = self._bound_at(number)
        if segment is None:
            self._free[number % self._lanes].remove(number)
            self._erasing[number] = None
            return Remains(None, ((0, self.segment_bytes),))
        assert not segment.is_erasing, "remains were held twice"
        segment.is_erasing = True
        unused = [
            row
            for row, state in enumerate(segment.rows)
            if state in (_State.UNUSED, _State.GONE) and row not in segment.pins
        ]
        void = tuple(row for row in unused if row < segment.row_next)
        return Remains(segment.header, ranges_of(segment.header, unused, self.segment_bytes), void)

    def release_remains(self, number: int) -> None:
        """They were overwritten, or will not be."""
        segment = self._bound_at(number)
        if segment is None:
            del self._erasing[number]
            self._free[number % self._lanes].append(number)
            return
        segment.is_erasing = False
        self._free_if_empty(segment)

    def check_invariants(self) -> list[str]:
        """Violations, one text each; none when all is well."""
        found: list[str] = []
        free = [*self._erasing, *(number for lane in self._free for number in lane)]
        bound = [segment.header.segment for segment in self._all()]
        if sorted(free + bound) != list(range(self.segment_count)):
            found.append("a segment was lost, or is free and bound")
        for lane in self._bound:
            sequences = [segment.header.sequence for segment in lane.values()]
            if sequences != sorted(set(sequences)):
                found.append("the segments of a lane are out of order")
        for segment in self._all():
            number, rows = segment.header.segment, segment.rows
            if segment.header.slot_count * segment.header.layout.slot_bytes > self.segment_bytes:
                found.append(f"the slots of segment {number} exceed it")
            if rows.count(_State.READY) != segment.ready_count:
                found.append(f"segment {number} counts its blocks wrongly")
            if rows.count(_State.RESERVED) != segment.reserved_count:
                found.append(f"segment {number} counts its reserved slots wrongly")
            if any(rows[segment.row_next :]):
                found.append(f"segment {number} has used slots that were not given out")
        if any(self._bound_of(one) is not one for one in self._filling.values()):
            found.append("a segment is filled that is not bound")
        return found

    # ------------------------------------------------------------------------------------ inside

    def _all(self) -> Iterator[_Segment]:
        return (segment for lane in self._bound for segment in lane.values())

    def _bound_of(self, segment: _Segment) -> _Segment | None:
        return self._bound_at(segment.header.segment)

    def _bound_at(self, number: int) -> _Segment | None:
        return self._bound[number % self._lanes].get(number)

    def _segment(self, slot: int) -> _Segment:
        segment = self._bound_at(int(slot) // self.row_count_max)
        assert segment is not None, f"slot {slot} is in no bound segment"
        return segment

    def _places(self, slots: Slots) -> Iterator[tuple[_Segment, int]]:
        for slot in slots.tolist():
            yield self._segment(slot), slot % self.row_count_max

    def _ready_slots(self, segment: _Segment) -> list[int]:
        first = segment.header.segment * self.row_count_max
        rows = segment.rows[: segment.row_next]
        return [first + row for row, state in enumerate(rows) if state == _State.READY]

    def _oldest(
        self, lane: int, may_retire: Callable[[SegmentHeader], bool] | None = None
    ) -> _Segment | None:
        return next(
            (
                one
                for one in self._bound[lane].values()
                if not one.is_held and (may_retire is None or may_retire(one.header))
            ),
            None,
        )

    def _here(self, layout: SlotLayout) -> SlotLayout:
        """How such a block lies in this pool."""
        return replace(layout, is_sealed=self._key_id != 0)

    def _suits(self, segment: _Segment, layout: SlotLayout) -> bool:
        """Whether it can be filled on; an adopted one may be of another key."""
        return (segment.header.layout, segment.header.key_id) == (layout, self._key_id)

    def _make_free(self, lane: int, reuse: bool, free_kept_count: int, evicted: list[int]) -> None:
        """Give up the oldest segment of the lane if there is no free one to be bound."""
        if not reuse or (self._free[lane] and self.free_segment_count > free_kept_count):
            return
        oldest = self._oldest(lane)
        if oldest is not None:
            evicted.extend(self._ready_slots(oldest))
            self._unbind(oldest)

    def _bind(
        self, fingerprint: bytes, layout: SlotLayout, lane: int, free_kept_count: int
    ) -> _Segment | None:
        if not self._free[lane] or self.free_segment_count <= free_kept_count:
            return None
        number = self._free[lane].popleft()
        header = SegmentHeader(
            segment=number,
            fingerprint=fingerprint,
            layout=layout,
            slot_count=self.slot_count(layout),
            sequence=self.take_sequences(1),
            key_id=self._key_id,
        )
        segment = _Segment(header, bytearray(header.slot_count))
        self._bound[lane][number] = segment
        self._filling[fingerprint, lane] = segment
        return segment

    def _unbind(self, segment: _Segment) -> None:
        number = segment.header.segment
        lane = number % self._lanes
        del self._bound[lane][number]
        if self._filling.get((segment.header.fingerprint, lane)) is segment:
            del self._filling[segment.header.fingerprint, lane]
        self._free[lane].append(number)

    def _free_if_empty(self, segment: _Segment) -> None:
        """A segment that is being filled stays: its slots were never written, which is cheap."""
        filling = self._filling.get(
            (segment.header.fingerprint, segment.header.segment % self._lanes)
        )
        if segment.is_empty and (segment.is_full or filling is not segment):
            self._unbind(segment)


def by_segment(slots: Slots, row_count_max: int) -> Iterator[Group]:
    """Each segment of these slots, with the positions of its slots among them."""
    if not len(slots):
        return
    segments = slots // row_count_max
    order = np.argsort(segments, kind="stable")
    ascending = segments[order]
    borders = (np.flatnonzero(ascending[1:] != ascending[:-1]) + 1).tolist()
    firsts = [0, *borders]
    for first, end in zip(firsts, [*borders, len(slots)], strict=True):
        yield int(ascending[first]), order[first:end]


def _slots(numbers: Sequence[int]) -> Slots:
    return np.array(numbers, np.uint32)
