"""Finds unordered accesses: a happens-before checker over streams, events and the host.

Every stream and the host is an *actor* with a vector clock. An access is ordered before another one
if the other's clock covers it, whatever the timing of this run was: so one run finds a race that
would need bad luck to be seen in the bytes. What makes edges:

    program order of the host -> every operation it submits later, on any stream
    operations of one stream  -> in order
    record_event, wait_event  -> what was before the record is before what follows the wait
    an event seen done, or a synchronisation -> what was before is before what the host does next

All threads of the host are one actor. That is too kind to two threads that share memory without a
lock, which is no matter of CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtier.cuda.runtime import NO_RANGES, Addresses, Ranges

HOST = 0
"""The actor that submits."""

Clock = Mapping[int, int]


class DataRace(AssertionError):
    """Two accesses to the same bytes, one of them a write, and nothing orders them."""


@dataclass(frozen=True, slots=True, eq=False)
class Bytespans:
    """Ranges sorted and merged: starts and ends."""

    starts: Addresses
    ends: Addresses

    @classmethod
    def of(cls, ranges: Ranges) -> Bytespans:
        if len(ranges.starts) < 2:
            return cls(ranges.starts, ranges.starts + ranges.sizes)
        order = np.argsort(ranges.starts, kind="stable")
        starts = ranges.starts[order]
        ends = np.maximum.accumulate(starts + ranges.sizes[order])
        is_first = np.ones(len(starts), bool)
        is_first[1:] = starts[1:] > ends[:-1]
        is_last = np.ones(len(starts), bool)
        is_last[:-1] = is_first[1:]
        return cls(starts[is_first], ends[is_last])

    def overlap(self, other: Bytespans) -> tuple[int, int] | None:
        """The first range of bytes in both."""
        if not len(self.starts) or not len(other.starts):
            return None
        nearest = np.searchsorted(other.ends, self.starts, side="right")
        inside = nearest < len(other.ends)
        clipped = np.minimum(nearest, len(other.ends) - 1)
        hits = np.flatnonzero(inside & (other.starts[clipped] < self.ends))
        if not len(hits):
            return None
        mine, theirs = int(hits[0]), int(nearest[hits[0]])
        return (
            int(max(self.starts[mine], other.starts[theirs])),
            int(min(self.ends[mine], other.ends[theirs])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Access:
    actor: int
    count: int  # The actor's clock when it did this.
    name: str
    reads: Bytespans
    writes: Bytespans


class RaceChecker:
    """Told of all that is submitted, in the order of submission; raises DataRace at once.

    Code under test may catch what is raised, so every race is kept in `races` as well.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[int, dict[int, int]] = {HOST: {HOST: 0}}
        # What the host does not know to be over. Whatever is submitted later comes after the rest
        # and after all that the host itself did: neither is kept, and no clock need say so.
        self._open: list[_Access] = []

    @property
    def open_count(self) -> int:
        """Accesses that the host does not know to be over."""
        return len(self._open)

    def add_actor(self) -> int:
        """A stream."""
        actor = len(self._clocks)
        self._clocks[actor] = {}
        return actor

    def clock(self, actor: int) -> Clock:
        """All that is ordered before the actor's next step."""
        return dict(self._clocks[actor])

    def order_after(self, actor: int, clock: Clock) -> None:
        """The actor's next steps come after all of `clock`."""
        own = self._clocks[actor]
        for other, count in clock.items():
            own[other] = max(own.get(other, 0), count)
        if actor == HOST:
            self._open = [
                access for access in self._open if access.count > own.get(access.actor, 0)
            ]

    def operation(
        self, actor: int, name: str, reads: Ranges = NO_RANGES, writes: Ranges = NO_RANGES
    ) -> Clock:
        """The host submits an operation to the actor; returns its clock."""
        self._step(actor, name, Bytespans.of(reads), Bytespans.of(writes))
        return self.clock(actor)

    def early_read(self, actor: int, name: str, reads: Ranges) -> None:
        """The actor's next operation may read these at any time from now on, whatever it waits for.

        It is ordered after the host only, and over when the operation is.
        """
        reader = self.add_actor()
        self.operation(reader, f"{name} (source read in any order)", reads)
        self.order_after(actor, self._clocks[reader])

    def unordered(self, name: str, reads: Ranges, writes: Ranges) -> None:
        """Checks copies that run in no order among themselves."""
        order = np.argsort(writes.starts, kind="stable")
        starts, ends = writes.starts[order], (writes.starts + writes.sizes)[order]
        clash = np.flatnonzero(starts[1:] < ends[:-1])
        if len(clash):
            self._found(f"{name} writes {int(starts[clash[0] + 1]):#x} twice")
        hit = Bytespans.of(reads).overlap(Bytespans.of(writes))
        if hit is not None:
            self._found(f"{name} reads and writes {hit[0]:#x}")

    def assert_no_races(self) -> None:
        """For the end of a test: races that somebody has caught count."""
        assert not self.races, "\n".join(self.races)

    def _step(self, actor: int, name: str, reads: Bytespans, writes: Bytespans) -> None:
        clock = self._clocks[actor]
        for access in self._open:
            if access.count <= clock.get(access.actor, 0):
                continue
            hit = (
                writes.overlap(access.writes)
                or writes.overlap(access.reads)
                or reads.overlap(access.writes)
            )
            if hit is not None:
                self._found(
                    f"{name} and {access.name} touch bytes {hit[0]:#x} to {hit[1]:#x},"
                    " and nothing orders them"
                )
        clock[actor] = clock.get(actor, 0) + 1
        if actor != HOST and (len(reads.starts) or len(writes.starts)):
            self._open.append(_Access(actor, clock[actor], name, reads, writes))

    def _found(self, race: str) -> None:
        self.races.append(race)
        raise DataRace(race)
