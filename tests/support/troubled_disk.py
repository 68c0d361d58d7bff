"""A file whose driver is right and whose disk is not: one call, chosen by what it is for, suffers.

Trouble comes below FileDriver, in the place of the kernel, so that all that the driver does about a
short or failed call is tried as well. What is troubled stays troubled: a bad sector is bad at the
next try too, a full disk stays full, one that is gone stays gone.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access, Driver, Outcome
from kvtier.io.file import FileDriver, outcome_of
from kvtier.layout import PAD_BYTES
from kvtier.memory import Bytes
from kvtier.pools.superblock import HEADERS_FIRST, Geometry

Transfer = Callable[[int, list[Bytes], int], int]


class Trouble(StrEnum):
    """What the chosen call suffers, and others after it."""

    EIO = "eio"  # One sector cannot be read or written any more.
    SHORT_ONCE = "short_once"  # The call moves half of its bytes.
    SHORT = "short"  # So does every other that reaches over that place.
    BIT_FLIP = "bit_flip"  # Silent: in what is read, or in what gets to the disk.
    NO_SPACE = "no_space"  # No write succeeds from then on.
    GONE = "gone"  # Nothing does.
    STALL = "stall"  # The call begins `stall_seconds` late.


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A call by what it is for, so that it is met again in a run with another timing."""

    life: int
    area: str  # superblock, headers, table, recency, blocks; or all, for a sync.
    kind: str  # read, write, sync.
    number: int  # Of those of this life, area and kind, from 0.

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.area} in life {self.life}"


@dataclass
class Disk:
    """Outlives the daemons that use it. Without trouble it writes down the calls it gets."""

    geometry: Geometry
    trouble: Trouble | None = None
    at: Place | None = None
    stall_seconds: float = 0.0
    life: int = 0  # Set before each start.
    calls: list[Place] = field(default_factory=list)
    is_hit: bool = False  # The chosen call has come.
    is_stalling: bool = False
    _bad_first: int = -1  # The sector, or the place where transfers end.
    _counts: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open_driver(self, path: Path, depth: int) -> Driver:
        return TroubledFile(self, path, depth)

    def heal(self) -> None:
        """All is well again, but for what was silently changed."""
        self.trouble = None

    def note(self, area: str, kind: str) -> bool:
        """Count a call; whether it is the chosen one."""
        with self._lock:
            key = (self.life, area, kind)
            place = Place(*key, self._counts[key])
            self._counts[key] += 1
            self.calls.append(place)
            if self.trouble is None or place != self.at:
                return False
            self.is_hit = True
            return True

    def stall(self) -> None:
        self.is_stalling = True
        threading.Event().wait(self.stall_seconds)
        self.is_stalling = False

    def area_of(self, offset: int) -> str:
        geometry = self.geometry
        ends = {
            "superblock": HEADERS_FIRST,
            "headers": geometry.table_first,
            "table": geometry.recency_first,
            "recency": geometry.segments_first,
        }
        return next((area for area, end in ends.items() if offset < end), "blocks")

    def perform(self, function: Transfer, fd: int, views: list[Bytes], offset: int) -> int:
        """The call, or what the disk makes of it. Raises OSError."""
        is_read = function is os.preadv
        is_chosen = self.note(self.area_of(offset), "read" if is_read else "write")
        length_bytes = sum(map(len, views))
        if is_chosen and self.trouble in (Trouble.EIO, Trouble.SHORT, Trouble.SHORT_ONCE):
            self._bad_first = offset + length_bytes // 2 // PAD_BYTES * PAD_BYTES
        is_over_it = offset <= self._bad_first < offset + length_bytes
        match self.trouble:
            case Trouble.EIO if is_over_it:
                raise OSError(errno.EIO, "planted")
            case Trouble.SHORT | Trouble.SHORT_ONCE if is_over_it:
                cut = self._bad_first - offset
                if self.trouble is Trouble.SHORT_ONCE:
                    self._bad_first = -1
                return function(fd, _leading(views, cut), offset) if cut else 0
            case Trouble.NO_SPACE if self.is_hit and not is_read:
                raise OSError(errno.ENOSPC, "planted")
            case Trouble.GONE if self.is_hit:
                raise OSError(errno.ENODEV, "planted")
            case Trouble.STALL if is_chosen:
                self.stall()
            case Trouble.BIT_FLIP if is_chosen and not is_read:
                copy = aligned_buffer(length_bytes)
                np.concatenate(views, out=copy)
                _flip(copy)
                return function(fd, [copy], offset)
            case Trouble.BIT_FLIP if is_chosen:
                done = function(fd, views, offset)
                _flip(views[0])
                return done
        return function(fd, views, offset)

    def sync(self, fd: int) -> None:
        """Raises OSError."""
        is_chosen = self.note("all", "sync")
        if self.trouble is Trouble.EIO and is_chosen:
            raise OSError(errno.EIO, "planted")
        if self.trouble is Trouble.NO_SPACE and is_chosen:
            raise OSError(errno.ENOSPC, "planted")
        if self.trouble is Trouble.GONE and self.is_hit:
            raise OSError(errno.ENODEV, "planted")
        if self.trouble is Trouble.STALL and is_chosen:
            self.stall()
        os.fdatasync(fd)


class TroubledFile(FileDriver):
    """FileDriver on such a disk."""

    def __init__(self, disk: Disk, path: Path, depth: int) -> None:
        self._disk = disk
        super().__init__(path, depth=depth)

    def sync(self) -> Outcome:
        try:
            self._disk.sync(self._fd)
        except OSError as error:
            return outcome_of(error)
        return Outcome.DONE

    def _call(self, function: Transfer, accesses: Sequence[Access]) -> int | Outcome:
        views = [view for access in accesses for view in access.views]
        try:
            return self._disk.perform(function, self._fd, views, accesses[0].offset)
        except OSError as error:
            return outcome_of(error)


def _leading(views: list[Bytes], length_bytes: int) -> list[Bytes]:
    """The first so many bytes of what the views show."""
    found = []
    for view in views:
        found.append(view[:length_bytes])
        length_bytes -= len(found[-1])
        if not length_bytes:
            break
    return found


def _flip(view: Bytes) -> None:
    """One bit of the first entry, of what is no block."""
    view[40] ^= 0x10
