"""Eviction in a shared folder by one owner among the daemons, elected by a file with a lifetime.

The owner counts the values, tells all by the file `usage`, evicts the least recently got ones when
there are more than the capacity allows, and removes what writers that died have left in `arriving`.

`ROOT/owner` names the owner and a number that it raises at every round. Who has seen the same
content for `owner_seconds`, by its own clock, takes over: it moves the file away and links its own
in its place. Nodes' clocks are never compared. Two who take over at the same moment may both be
owners until the next round; they would evict more than is needed, and nothing else: so there is no
lock that a dead node could hold.

All methods block and belong to one thread of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.clock import Clock
from kvtier.io.threads import IoThreads
from kvtier.pools.remote.files import ARRIVING_NAME, MARK_NAME, OWNER_NAME, USAGE_NAME, VALUES_NAME


@dataclass(frozen=True, slots=True)
class OwnerSettings:
    """Eviction starts above the start ratio of the capacity and goes down to the stop ratio."""

    root: Path
    capacity_bytes: int
    owner_seconds: float = 15.0
    start_ratio: float = 0.95
    stop_ratio: float = 0.90
    # Far longer than any put's deadline: what is that old will never be renamed into place.
    arriving_seconds: float = 600.0

    def __post_init__(self) -> None:
        assert 0 < self.stop_ratio <= self.start_ratio <= 1


@dataclass(frozen=True, slots=True)
class OwnerRound:
    """What one round did; all 0 when another daemon is the owner."""

    is_owner: bool
    value_count: int = 0
    used_bytes: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    stale_count: int = 0


@dataclass(frozen=True, slots=True, order=True)
class _Value:
    got_ns: int  # When it was got last, by the file server's clock.
    path: str
    size_bytes: int


ROUND_SECONDS_MIN = 2.0
# Counting may take this part of the time, however many values there are.
_COUNTING_SHARE = 0.1


async def keep_bounded(
    owner: FilesOwner, threads: IoThreads, on_round: Callable[[OwnerRound | OSError], None]
) -> None:
    """Rounds for ever, until cancelled; each is told, or why it could not be."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            on_round(await loop.run_in_executor(threads, owner.run_round))
        except OSError as error:
            on_round(error)
        took = loop.time() - began
        # An owner that is silent for its time is followed by another one.
        longest = owner.owner_seconds / 3
        await asyncio.sleep(min(max(ROUND_SECONDS_MIN, took / _COUNTING_SHARE), longest))


class FilesOwner:
    """One daemon's part in it. Raises OSError when the share cannot be used: try again later."""

    def __init__(
        self, settings: OwnerSettings, *, unique: str, clock: Clock, pause: Callable[[], None]
    ) -> None:
        """`pause` is called between folders, so that a count does not take the share for itself."""
        self._settings = settings
        self._unique = unique
        self._clock = clock
        self._pause = pause
        self._round = 0
        self._seen: tuple[bytes | None, float] = (None, clock.now())
        self._is_owner = False
        root = settings.root
        self._owner, self._usage = root / OWNER_NAME, root / USAGE_NAME
        self._values, self._arriving = root / VALUES_NAME, root / ARRIVING_NAME

    @property
    def owner_seconds(self) -> float:
        return self._settings.owner_seconds

    def run_round(self) -> OwnerRound:
        """Be elected, or stay so; then count, evict and tell."""
        (self._settings.root / MARK_NAME).stat()
        if not self._hold():
            return OwnerRound(is_owner=False)
        values = list(self._all_values())
        used = sum(value.size_bytes for value in values)
        evicted = self._evict(values, used)
        evicted_bytes = sum(value.size_bytes for value in evicted)
        self._tell(used - evicted_bytes)
        stale = self._remove_stale()
        count = len(values) - len(evicted)
        return OwnerRound(
            is_owner=True,
            value_count=count,
            used_bytes=used - evicted_bytes,
            evicted_count=len(evicted),
            evicted_bytes=evicted_bytes,
            stale_count=stale,
        )

    def resign(self) -> None:
        """Somebody else need not wait until the owner's time is over."""
        if self._is_owner and self._content() == self._mine():
            self._owner.unlink(missing_ok=True)
        self._is_owner = False

    def _hold(self) -> bool:
        content = self._content()
        if self._is_owner and content == self._mine():
            self._round += 1
            self._replace(self._owner, self._mine())
            return True
        self._is_owner = False
        if content is not None:
            if content != self._seen[0]:
                self._seen = (content, self._clock.now())
            if self._clock.now() - self._seen[1] < self._settings.owner_seconds:
                return False
            self._move_away(content)
        self._is_owner = self._claim()
        return self._is_owner

    def _move_away(self, content: bytes) -> None:
        """Take the place of an owner that is silent; put back what is not that one's."""
        aside = self._arriving / f"{self._unique}.owner"
        self._arriving.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            self._owner.rename(aside)
            if aside.read_bytes() != content:
                with suppress(FileExistsError):
                    os.link(aside, self._owner)
            aside.unlink()

    def _claim(self) -> bool:
        self._round += 1
        claim = self._arriving / f"{self._unique}.claim"
        self._arriving.mkdir(exist_ok=True)
        claim.write_bytes(self._mine())
        try:
            os.link(claim, self._owner)
        except FileExistsError:
            return False
        finally:
            claim.unlink(missing_ok=True)
        return True

    def _content(self) -> bytes | None:
        try:
            return self._owner.read_bytes()
        except FileNotFoundError:
            return None

    def _mine(self) -> bytes:
        return f"{self._unique} {self._round}\n".encode()

    def _replace(self, path: Path, content: bytes) -> None:
        self._arriving.mkdir(exist_ok=True)
        arriving = self._arriving / f"{self._unique}.{path.name}"
        arriving.write_bytes(content)
        arriving.rename(path)

    def _tell(self, used_bytes: int) -> None:
        self._replace(self._usage, f"{used_bytes} {self._unique}.{self._round}\n".encode())

    def _all_values(self) -> Iterator[_Value]:
        for folder, _, names in os.walk(self._values):
            for name in names:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    status = os.stat(path)
                    yield _Value(status.st_mtime_ns, path, status.st_size)
            self._pause()

    def _evict(self, values: list[_Value], used_bytes: int) -> list[_Value]:
        """The ones got longest ago, from above the start mark down to the stop mark."""
        capacity = self._settings.capacity_bytes
        if used_bytes <= capacity * self._settings.start_ratio:
            return []
        evicted = []
        for value in sorted(values):
            if used_bytes <= capacity * self._settings.stop_ratio:
                break
            with suppress(FileNotFoundError):
                os.unlink(value.path)
            used_bytes -= value.size_bytes
            evicted.append(value)
            self._remove_empty(os.path.dirname(value.path))
        return evicted

    def _remove_empty(self, folder: str) -> None:
        """Up to the values' root; whoever renames into it meanwhile makes it again."""
        root = str(self._values)
        while folder != root:
            try:
                os.rmdir(folder)
            except OSError:
                return  # Not empty, or gone.
            folder = os.path.dirname(folder)

    def _remove_stale(self) -> int:
        """Ages are told by the file server: now is when it took the count."""
        now = self._usage.stat().st_mtime
        count = 0
        with os.scandir(self._arriving) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if now - entry.stat().st_mtime > self._settings.arriving_seconds:
                        os.unlink(entry.path)
                        count += 1
        return count
