"""The slabs and segments this process has mapped, and who may still touch them.

A segment belongs to no namespace and can only be read. Its slots have numbers of their own, from
`DIRECT_SLOTS` on: whoever copies from slots of a lease sees no difference.

Invariants:
  (0) A view is given out only for a slot of a slab that is mapped under our current session, not
      withdrawn, and under a session of the daemon's current life that nobody asked us to be quiet
      about.
  (1) A slab is unmapped only when nobody holds a view of it: `Mapping` sees to that.
  (2) What has been pinned for a device is unpinned before it is unmapped.
  (3) `wait_quiet(session)` returns True only when no hold under that session is open, none can
      open afterwards, and every slab that was mapped under it, were it our own, is unmapped.

After a reconnect the daemon offers its slabs anew. Where its memory outlives it, a slab whose file
is still mapped is not mapped again, nor pinned: it is *kept*, for nobody to use, until it becomes
one of the new session or is given up. Quiet about the old session waits for either, and for the
last view that was given out under it.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvtier.client.forks import check_not_forked
from kvtier.client.segments import check_segment, file_length
from kvtier.client.values import DIRECT_SLOTS, Namespace, SessionRef, Slots
from kvtier.errors import BadFrame, StaleSlot
from kvtier.memory import Bytes, Mapping
from kvtier.v1 import kvtier_pb2 as pb

# How often a slab is looked at that somebody still holds a view of.
LEAVING_POLL_SECONDS = 0.05
# Offers come with the answer to each namespace; what is not offered by then is not any more.
KEPT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Something that was offered and is mapped."""

    session: SessionRef  # Our own session that it was offered to.
    mapping: Mapping


@dataclass(frozen=True, slots=True, eq=False)
class Segment(Mapped):
    """One mapped segment, read only."""

    offer: pb.SegmentOffered


@dataclass(frozen=True, slots=True, eq=False)
class Slab(Mapped):
    """One mapped slab."""

    offer: pb.SlabOffered
    file: tuple[int, int]  # Device and inode: no other file has them while this one is mapped.
    # What every view under this session is one of, so that it lives as long as they do. None while
    # the slab is kept for another session.
    array: Bytes | None

    def is_of(self, file: tuple[int, int], length_bytes: int) -> bool:
        """Whether this mapping shows the whole of that file's first bytes."""
        return self.file == file and self.mapping.length_bytes == length_bytes


class SlabPins(Protocol):
    """Who pins mapped slabs for a device; called with the table's lock held, from any thread."""

    def add(self, address: int, length_bytes: int) -> None:
        """A slab has been mapped."""
        ...

    def give_up(self, address: int) -> bool:
        """Whether no device may touch the slab any more, so that it may be unmapped; asked again
        until it is so. It is for nobody new from the first time on."""
        ...


class _Rows:
    """The usable slabs of one namespace and shard, in slot order; replaced, never changed."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        ordered = sorted(slabs, key=lambda slab: slab.offer.slot_first)
        self.slot_firsts = [slab.offer.slot_first for slab in ordered]
        self.slot_count = sum(slab.offer.slot_count for slab in ordered)
        self._rows = [
            slab.array[: slab.offer.slot_count * slab.offer.slot_bytes].reshape(
                slab.offer.slot_count, slab.offer.slot_bytes
            )
            for slab in ordered
            if slab.array is not None
        ]

    def row(self, slot: int) -> Bytes:
        index = bisect_right(self.slot_firsts, slot) - 1
        if index < 0 or slot - self.slot_firsts[index] >= len(self._rows[index]):
            raise StaleSlot(f"slot {slot} is in no slab mapped here")
        found: Bytes = self._rows[index][slot - self.slot_firsts[index]]
        return found


class ArenaTable:
    """All slabs of one client. Changed by the session's thread, read by everybody."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation: int | None = None
        self._slabs: dict[tuple[int, int], Slab] = {}  # (shard, slab_id): usable.
        self._segments: dict[int, Segment] = {}  # Likewise.
        self._kept: dict[tuple[int, int], Slab] = {}  # Refused; of sessions that are lost.
        self._lent: list[tuple[SessionRef, weakref.ref[Bytes]]] = []  # Of slabs kept since.
        self._leaving: list[Mapped] = []  # Refused; waiting for the last view to go.
        self._unmapped: list[Mapped] = []  # To be reported to the daemon, if it asked us.
        self._rows: dict[tuple[int, int], _Rows] = {}  # (namespace_id, shard)
        # A refused session stays refused for the generation's life: an instruction under it may
        # come at any time. One int each; a session lasts at least one reconnect delay.
        self._refused: set[int] = set()
        self._held: Counter[SessionRef] = Counter()  # Open holds, of any generation.
        self._pins: SlabPins | None = None

    # ------------------------------------------------------------------- for the session's thread

    def enter_generation(self, generation: int) -> None:
        """The daemon's pool has a new life: everything mapped before is void."""
        with self._changed:
            if generation != self._generation:
                self.void_all()
                self._refused.clear()
                self._generation = generation

    def void_all(self, *, keeps: bool = False) -> None:
        """Our session is lost or ends: refuse every slab; pages go with their last view, or stay
        (`keeps`) for the next session."""
        with self._changed:
            if keeps:
                self._lent += [
                    (slab.session, weakref.ref(slab.array))
                    for slab in self._slabs.values()
                    if slab.array is not None
                ]
                self._kept |= {key: replace(one, array=None) for key, one in self._slabs.items()}
            else:
                self._leave(*self._slabs.values(), *self._kept.values())
                self._kept.clear()
            self._leaving += self._segments.values()  # The tier is gone with the daemon.
            self._slabs.clear()
            self._segments.clear()
            self._rows.clear()
            self._reap()

    def end_kept(self) -> None:
        """What was kept and has not been offered again is no more."""
        with self._changed:
            self._leave(*self._kept.values())
            self._kept.clear()
            self._reap()

    @property
    def has_kept(self) -> bool:
        return bool(self._kept)

    def add(self, offer: pb.SlabOffered, fd: int, session: SessionRef) -> None:
        """Map an offered slab, if it is not mapped still; the fd stays the caller's.

        Raises BadFrame, OSError.
        """
        found = os.fstat(fd)
        _check_offer(offer, found.st_size)
        file = (found.st_dev, found.st_ino)
        with self._changed:
            key = (offer.shard, offer.slab_id)
            if key in self._slabs:
                raise BadFrame(f"slab {offer.slab_id} of shard {offer.shard} was offered twice")
            kept = self._kept.pop(key, None)
            if kept is not None and kept.is_of(file, offer.slab_bytes):
                mapping = kept.mapping
            else:
                if kept is not None:
                    self._leave(kept)
                mapping = Mapping(fd, offer.slab_bytes)
                if self._pins is not None:
                    self._pins.add(mapping.address, mapping.length_bytes)
            self._slabs[key] = Slab(session, mapping, offer, file, mapping.array)
            self._rebuild(offer.namespace_id, offer.shard)

    def add_segment(self, offer: pb.SegmentOffered, fd: int, session: SessionRef) -> None:
        """Map an offered segment, to be read; the fd stays the caller's. Raises BadFrame, OSError,
        the latter also where a device would have to pin it."""
        check_segment(offer, file_length(fd))
        with self._changed:
            if offer.segment in self._segments:
                raise BadFrame(f"segment {offer.segment} was offered twice")
            if self._pins is not None:
                raise OSError("memory of this tier is not pinned for devices")
            mapping = Mapping(fd, offer.length, offer.offset, writable=False)
            self._segments[offer.segment] = Segment(session, mapping, offer)

    def withdraw(self, shard: int, slab_id: int) -> None:
        """Refuse the slab from now on; `take_unmapped` says when its pages are given up."""
        with self._changed:
            slab = self._slabs.pop((shard, slab_id), None)
            if slab is not None:
                self._leave(slab)
                self._rebuild(slab.offer.namespace_id, shard)

    def take_unmapped(self, session: SessionRef) -> list[pb.SlabOffered]:
        """Slabs of our session that were withdrawn and are unmapped now; each is told once."""
        with self._changed:
            self._reap()
            slabs = [one for one in self._unmapped if isinstance(one, Slab)]
            gone = [slab.offer for slab in slabs if slab.session == session]
            self._unmapped.clear()
            return gone

    @property
    def is_leaving(self) -> bool:
        """Whether a slab waits for its last view to go."""
        return bool(self._leaving)

    def refuse(self, session: SessionRef) -> None:
        """No view under this session any more: it is lost, ours or another process's."""
        with self._changed:
            if session.generation == self._generation:
                self._refused.add(session.session_id)

    def wait_quiet(self, session: SessionRef, timeout_seconds: float) -> bool:
        """Until invariant (3) holds for the (refused) session."""
        with self._changed:
            for _ in range(max(1, round(timeout_seconds / LEAVING_POLL_SECONDS))):
                self._reap()
                if not self._is_touched(session):
                    return True
                self._changed.wait(LEAVING_POLL_SECONDS)
            return not self._is_touched(session)

    def _leave(self, *slabs: Slab) -> None:
        """Nobody gets a view of them any more; those that there are keep their pages."""
        self._leaving += [replace(slab, array=None) for slab in slabs]

    def _is_touched(self, session: SessionRef) -> bool:
        mapped: list[Mapped] = [*self._slabs.values(), *self._kept.values(), *self._leaving]
        mapped += self._segments.values()
        self._lent = [one for one in self._lent if one[1]() is not None]
        return (
            self._held[session] > 0
            or any(one.session == session for one in mapped)
            or any(lent_to == session for lent_to, _ in self._lent)
        )

    def _reap(self) -> None:
        """Unmap what nobody holds a view of, and no device."""
        pins = self._pins
        gone = [
            slab
            for slab in self._leaving
            if (pins is None or pins.give_up(slab.mapping.address)) and slab.mapping.close()
        ]
        self._leaving = [slab for slab in self._leaving if slab not in gone]
        self._unmapped += gone

    def _rebuild(self, namespace_id: int, shard: int) -> None:
        here = [
            slab
            for slab in self._slabs.values()
            if (slab.offer.namespace_id, slab.offer.shard) == (namespace_id, shard)
        ]
        self._rows[namespace_id, shard] = _Rows(here)

    # ------------------------------------------------------------------------------- for everybody

    def set_pins(self, pins: SlabPins) -> None:
        """Once: it hears of every slab, of those that are mapped already as well."""
        with self._changed:
            assert self._pins is None, "slabs are pinned for one device"
            self._pins = pins
            assert not self._segments, "who pins slabs does not ask for segments"
            for slab in [*self._slabs.values(), *self._kept.values(), *self._leaving]:
                pins.add(slab.mapping.address, slab.mapping.length_bytes)

    def views(
        self,
        namespace: Namespace,
        shard: int,
        slots: Slots | Sequence[int],
        session: SessionRef,
    ) -> list[Bytes]:
        """One row a slot, padding included. Raises StaleSlot, see invariant (0)."""
        plain = slots.tolist() if isinstance(slots, np.ndarray) else slots
        with self._changed:
            state = namespace.state
            if session.generation != self._generation or session.session_id in self._refused:
                raise StaleSlot("the session these slots were given under is lost")
            rows = None if state is None else self._rows.get((state.namespace_id, shard))
            return [
                self._segment_row(namespace, shard, slot - DIRECT_SLOTS)
                if slot >= DIRECT_SLOTS
                else _row(rows, shard, slot)
                for slot in plain
            ]

    def _segment_row(self, namespace: Namespace, shard: int, slot: int) -> Bytes:
        state, spec = namespace.state, namespace.spec
        some = next(iter(self._segments.values()), None)
        if some is None:
            raise StaleSlot("no segment is mapped here")
        segment, row = divmod(slot, some.offer.row_count_max)  # The same in all.
        found = self._segments.get(segment)
        size = 0 if state is None else state.segment_shard_bytes
        first = (row * spec.shard_count + shard) * size
        if found is None or size < spec.shard_bytes or first + size > found.mapping.length_bytes:
            raise StaleSlot(f"slot {slot} is in no segment mapped here")
        view: Bytes = found.mapping.array[first : first + size]
        return view

    def begin_hold(
        self,
        namespace: Namespace,
        shard: int,
        slots: Slots | Sequence[int],
        session: SessionRef,
    ) -> list[Bytes]:
        """Like `views`, and nobody is told that we are quiet until `end_hold`."""
        with self._changed:
            rows = self.views(namespace, shard, slots, session)
            self._held[session] += 1
            return rows

    def end_hold(self, session: SessionRef) -> None:
        with self._changed:
            self._held[session] -= 1
            if self._held[session] == 0:
                del self._held[session]
            self._changed.notify_all()

    @property
    def is_in_use(self) -> bool:
        """Whether any hold is open, or a view of a refused slab is left."""
        return bool(self._held or self._leaving)

    def slot_count(self, namespace: Namespace, shard: int) -> int:
        state = namespace.state
        with self._changed:
            rows = None if state is None else self._rows.get((state.namespace_id, shard))
            return 0 if rows is None else rows.slot_count


class Arena:
    """One shard's slots of one namespace, as NumPy views."""

    def __init__(self, table: ArenaTable, namespace: Namespace, shard: int) -> None:
        self._table = table
        self._namespace = namespace
        self._shard = shard
        self._shard_bytes = namespace.spec.shard_bytes
        self._owner_pid = os.getpid()

    @property
    def mapped_slot_count(self) -> int:
        return self._table.slot_count(self._namespace, self._shard)

    def view(self, slot: int, session: SessionRef) -> Bytes:
        """The slot's bytes; a segment's are read only. Raises StaleSlot when they mean nothing.

        A view outlives the check: whoever copies for longer than a moment uses `hold`.
        """
        return self.views([slot], session)[0]

    def views(self, slots: Slots | Sequence[int], session: SessionRef) -> list[Bytes]:
        """One view a slot, or StaleSlot for all of them."""
        check_not_forked(self._owner_pid)
        rows = self._table.views(self._namespace, self._shard, slots, session)
        return [row[: self._shard_bytes] for row in rows]

    @contextmanager
    def hold(self, slots: Slots | Sequence[int], session: SessionRef) -> Iterator[list[Bytes]]:
        """Views for the length of a copy: until the end, no Quiet about `session` is sent.

        The slabs stay mapped as well. Leave the bracket only when the copy has really ended.
        """
        check_not_forked(self._owner_pid)
        rows = self._table.begin_hold(self._namespace, self._shard, slots, session)
        try:
            yield [row[: self._shard_bytes] for row in rows]
        finally:
            self._table.end_hold(session)


def _row(rows: _Rows | None, shard: int, slot: int) -> Bytes:
    if rows is None:
        raise StaleSlot(f"no slab of shard {shard} is mapped here")
    return rows.row(slot)


def _check_offer(offer: pb.SlabOffered, file_bytes: int) -> None:
    """A slab beyond its file would end this process with SIGBUS, not with an exception."""
    if file_bytes < offer.slab_bytes:
        raise BadFrame(f"slab {offer.slab_id} is {offer.slab_bytes} bytes, its file {file_bytes}")
    if offer.slot_bytes == 0 or offer.slot_count * offer.slot_bytes > offer.slab_bytes:
        raise BadFrame(f"the slots of slab {offer.slab_id} do not fit into it")
