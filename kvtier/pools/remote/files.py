"""A shared file system as a remote engine: one file a value, under a folder that all nodes mount.

    ROOT/kvtier-remote                  the mark: without it the share is not mounted
    ROOT/values/NAMESPACE/EPOCH/5a/HASH one value, in one of 256 folders by the key's checksum
    ROOT/arriving/                      values being written; renamed into place when complete
    ROOT/records/KEY/NUMBER             a record; the highest number is the present one
    ROOT/owner, ROOT/usage              who evicts, and what it counted (files_owner.py)

Renames and links are atomic, so a value is whole or not there, whoever dies. Nothing is fsynced:
what a crash of the file server tears is found out by the checksum in the value's frame.

A record is replaced by linking a new file under the next number, which only one can; who finds a
still higher number afterwards was late by more than one change, and takes its own back. The highest
number is never removed.

The root is never made here, nor the mark: a share that is not mounted must not fill the disk below.
Calls go through threads. One that hangs keeps its thread; the wait ends at its deadline.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import aiofiles
import numpy as np
import xxhash

from kvtier.clock import Clock, SystemClock
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.calls import Calls
from kvtier.pools.remote.engine import (
    RECORD_BYTES_MAX,
    Emptied,
    Health,
    Pace,
    RemoteKey,
    RemoteOutcome,
    Reply,
    Value,
)

MARK_NAME = "kvtier-remote"
MARK_TEXT = "kvtier remote tier, format 1\n"
# Of values that are got, the time is set anew at most this often: it is what eviction goes by.
TOUCH_SECONDS = 60.0

_TOUCHED_MAX = 100_000
# How old the owner's count may be when a value is put.
USAGE_SECONDS = 1.0
_FOLDER_ATTEMPTS = 3
# Of questions about keys, in one thread: a hop takes longer than a question on a near file server.
_KEYS_A_CALL = 64
# Of values: each goes by its own thread, as far as there are threads.
CALL_BYTES = 16 << 20
# Each time it was replaced by another daemon between two calls of ours.
_RECORD_READS_MAX = 8
VALUES_NAME, ARRIVING_NAME, RECORDS_NAME = "values", "arriving", "records"
OWNER_NAME, USAGE_NAME = "owner", "usage"

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = {
    *(errno.ENOENT, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),
    errno.ENOTDIR,
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
}


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """`capacity_bytes` bounds the values of all nodes together; each must be told the same."""

    root: Path
    capacity_bytes: int
    thread_count: int = 8


def prepare_root(root: Path) -> None:
    """Once, by hand, with the share mounted: make an empty folder a remote engine. Blocks."""
    root.mkdir(exist_ok=True)
    if not (root / MARK_NAME).exists():
        (root / MARK_NAME).write_text(MARK_TEXT, encoding="ascii")


@dataclass(slots=True)
class Usage:
    """What lies in the share: the owner's last count, and what was put from here since then."""

    counted_bytes: int = 0
    stamp: bytes = b""
    put_bytes: int = 0
    before_bytes: int = 0  # Put between the last two counts: the last may not have seen it.
    read_at: float = -USAGE_SECONDS

    @property
    def used_bytes(self) -> int:
        return self.counted_bytes + self.put_bytes + self.before_bytes

    def take(self, text: bytes) -> None:
        """A count as `files_owner.py` writes it: bytes, a space, and what is new in every count."""
        counted, _, stamp = text.strip().partition(b" ")
        if counted.isdigit() and stamp != self.stamp:
            self.counted_bytes, self.stamp = int(counted), stamp
            self.before_bytes, self.put_bytes = self.put_bytes, 0


class FilesEngine:
    """Implements `RemoteEngine`."""

    def __init__(
        self,
        settings: FilesSettings,
        *,
        unique: str,
        clock: Clock = SystemClock(),
        buffers: Buffers | None = None,
    ) -> None:
        """`unique`: of this life of this daemon, for the names of files being written. `buffers`:
        where values are taken from."""
        self._buffers = buffers or Buffers()
        self._clock = clock
        self._touched: dict[str, float] = {}  # When to touch it again.
        self._root = str(settings.root)
        self._mark = f"{self._root}/{MARK_NAME}"
        self._capacity_bytes = settings.capacity_bytes
        self._unique = unique
        self._threads = IoThreads("kvtier-share", count=settings.thread_count)
        self._calls = Calls(settings.thread_count)
        self._numbers = count()
        self._usage_path = f"{self._root}/{USAGE_NAME}"
        self._usage = Usage()

    @property
    def name(self) -> str:
        return f"files:{self._root}"

    @property
    def pace(self) -> Pace:
        return Pace(CALL_BYTES, calls_at_once=2, leaves_what_failed=True)

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        works = [partial(self._guarded, partial(self._put, key, value)) for key, [value] in values]
        return await self._calls.run(works, timeout_seconds, RemoteOutcome.TIMED_OUT)

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        works = [
            partial(self._replied, partial(self._get, self._path(key), value_bytes_max))
            for key in keys
        ]
        return await self._calls.run(works, timeout_seconds, Reply(RemoteOutcome.TIMED_OUT))

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._by_keys(os.stat, keys, timeout_seconds)

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._by_keys(os.unlink, keys, timeout_seconds)

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        deadline = self._clock.now() + timeout_seconds

        async def work() -> Emptied:
            try:
                emptied = await self._in_thread(self._empty, folder, tuple(kept), deadline)
                await self._in_thread(os.stat, self._mark)  # Else nothing was seen of it.
            except OSError as error:
                return Emptied(outcome_of(error))
            except RuntimeError:
                return Emptied(RemoteOutcome.BUSY)  # Of the threads.
            return emptied

        [found] = await self._calls.run([work], timeout_seconds, Emptied(RemoteOutcome.TIMED_OUT))
        return found

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply:
        work = partial(self._replied, partial(self._read_record, self._record_folder(key)))
        [reply] = await self._calls.run([work], timeout_seconds, Reply(RemoteOutcome.TIMED_OUT))
        return reply

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        replace = partial(self._replace_record, self._record_folder(key), expected, value)
        [outcome] = await self._calls.run(
            [partial(self._guarded, replace)], timeout_seconds, RemoteOutcome.TIMED_OUT
        )
        return outcome

    async def health(self, *, timeout_seconds: float) -> Health:
        [health] = await self._calls.run(
            [self._health], timeout_seconds, Health(RemoteOutcome.TIMED_OUT)
        )
        return health

    async def close(self) -> None:
        await self._calls.close(timeout_seconds=1.0)
        self._threads.shutdown(wait=False)

    async def _put(self, key: RemoteKey, value: Bytes) -> RemoteOutcome:
        await self._read_usage()
        if self._usage.used_bytes + value.nbytes > self._capacity_bytes:
            return RemoteOutcome.FULL
        self._usage.put_bytes += value.nbytes  # Taken before the first await, given back below.
        arriving, path = self._arriving(), self._path(key)
        try:
            await self._in_thread(self._write_into_place, value, arriving, path)
        except BaseException:
            self._usage.put_bytes -= value.nbytes
            raise
        return RemoteOutcome.DONE

    async def _get(self, path: str, value_bytes_max: int) -> Reply:
        is_touched = self._clock.now() > self._touched.get(path, 0.0)
        reply = await self._in_thread(self._read_value, path, value_bytes_max, is_touched)
        if is_touched:
            if len(self._touched) >= _TOUCHED_MAX:
                self._touched.clear()
            self._touched[path] = self._clock.now() + TOUCH_SECONDS
        return reply

    async def _by_keys(
        self, work: Callable[[str], object], keys: Sequence[RemoteKey], timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """DONE for each path with which `work` raises nothing; many of them in one thread."""
        groups = [keys[start : start + _KEYS_A_CALL] for start in range(0, len(keys), _KEYS_A_CALL)]
        works = [partial(self._by_group, work, group) for group in groups]
        found = await self._calls.run(works, timeout_seconds, None)
        return [
            outcome
            for group, outcomes in zip(groups, found, strict=True)
            for outcome in outcomes or [RemoteOutcome.TIMED_OUT] * len(group)
        ]

    async def _by_group(
        self, work: Callable[[str], object], keys: Sequence[RemoteKey]
    ) -> list[RemoteOutcome]:
        def run() -> list[RemoteOutcome]:
            return [_outcome_of_work(work, self._path(key)) for key in keys]

        try:
            outcomes = await self._in_thread(run)
        except RuntimeError:
            return [RemoteOutcome.BUSY] * len(keys)  # Of the threads.
        if RemoteOutcome.ABSENT not in outcomes:
            return outcomes
        missing = await self._missing()
        return [missing if one is RemoteOutcome.ABSENT else one for one in outcomes]

    async def _read_record(self, folder: str) -> Reply:
        found = await self._newest(folder)
        if found is None:
            return Reply(await self._missing())
        return Reply(RemoteOutcome.DONE, np.frombuffer(found[1], np.uint8))

    async def _replace_record(
        self, folder: str, expected: bytes | None, value: bytes
    ) -> RemoteOutcome:
        found = await self._newest(folder)
        number, present = found or (0, None)
        if present != expected:
            return RemoteOutcome.LOST
        arriving, mine = self._arriving(), f"{folder}/{number + 1:010d}"
        try:
            await self._in_thread(self._write_arriving, np.frombuffer(value, np.uint8), arriving)
            link = partial(os.link, arriving, mine)
            await self._in_thread(self._retried_with_folder, folder, link)
        except FileExistsError:
            return RemoteOutcome.LOST
        finally:
            await self._unlink_quietly(arriving)
        numbers = await self._numbers_in(folder)
        if numbers and max(numbers) > number + 1:
            await self._unlink_quietly(mine)
            return RemoteOutcome.LOST
        for old in numbers:
            if old <= number:
                await self._unlink_quietly(f"{folder}/{old:010d}")
        return RemoteOutcome.DONE

    async def _newest(self, folder: str) -> tuple[int, bytes] | None:
        """Number and value of the record as it is now."""
        for _ in range(_RECORD_READS_MAX):
            numbers = await self._numbers_in(folder)
            if not numbers:
                return None
            path = f"{folder}/{max(numbers):010d}"
            try:
                async with aiofiles.open(path, "rb", executor=self._threads) as file:
                    return max(numbers), await file.read(RECORD_BYTES_MAX)
            except FileNotFoundError:
                continue  # Replaced, and removed, since the folder was listed.
        raise TimeoutError(f"{folder}: changed {_RECORD_READS_MAX} times while it was read")

    async def _numbers_in(self, folder: str) -> list[int]:
        try:
            names = await self._in_thread(os.listdir, folder)
        except FileNotFoundError:
            return []
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    async def _health(self) -> Health:
        try:
            await self._in_thread(os.stat, self._mark)
            await self._read_usage(at_once=True)
        except OSError as error:
            return Health(outcome_of(error), f"{self._root}: {error.strerror}")
        used_bytes = self._usage.counted_bytes + self._usage.put_bytes
        return Health(RemoteOutcome.DONE, "", used_bytes, self._capacity_bytes)

    async def _read_usage(self, *, at_once: bool = False) -> None:
        now = self._clock.now()
        if not at_once and now < self._usage.read_at + USAGE_SECONDS:
            return
        self._usage.read_at = now
        try:
            async with aiofiles.open(self._usage_path, "rb", executor=self._threads) as file:
                self._usage.take(await file.read(256))
        except FileNotFoundError:
            return  # Nobody has counted yet.

    def _arriving(self) -> str:
        """A name for a file that has no place yet."""
        return f"{self._root}/{ARRIVING_NAME}/{self._unique}.{next(self._numbers)}"

    async def _unlink_quietly(self, path: str) -> None:
        with suppress(OSError):
            await self._in_thread(os.unlink, path)

    async def _missing(self) -> RemoteOutcome:
        """ABSENT, unless all is."""
        try:
            await self._in_thread(os.stat, self._mark)
        except OSError as error:
            return outcome_of(error)
        return RemoteOutcome.ABSENT

    async def _guarded(self, work: Callable[[], Awaitable[RemoteOutcome]]) -> RemoteOutcome:
        try:
            return await work()
        except FileNotFoundError:
            return await self._missing()
        except OSError as error:
            return outcome_of(error)
        except RuntimeError:
            return RemoteOutcome.BUSY  # Of the threads.

    async def _replied(self, work: Callable[[], Awaitable[Reply]]) -> Reply:
        try:
            return await work()
        except FileNotFoundError:
            return Reply(await self._missing())
        except OSError as error:
            return Reply(outcome_of(error))
        except RuntimeError:
            return Reply(RemoteOutcome.BUSY)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # What follows runs in threads: a value's calls in one, as a hop takes longer than most of them.

    def _empty(self, folder: str, kept: tuple[str, ...], deadline: float) -> Emptied:
        """Raises OSError."""
        values = f"{self._root}/{VALUES_NAME}"
        count = 0
        for path, _, names in os.walk(f"{values}/{folder}", topdown=False):
            prefix = os.path.dirname(os.path.relpath(path, values))  # Without the spread.
            for name in names:
                if not f"{prefix}/{name}".startswith(kept):
                    with suppress(FileNotFoundError):
                        os.unlink(f"{path}/{name}")
                        count += 1
                if self._clock.now() > deadline:
                    return Emptied(RemoteOutcome.TIMED_OUT, count)
            with suppress(OSError):
                os.rmdir(path)  # Where nothing is left in it.
        return Emptied(RemoteOutcome.DONE, count)

    def _make_folder(self, folder: str) -> None:
        """Never the root: it may have vanished since somebody looked. Raises OSError."""
        path = self._root
        for name in os.path.relpath(folder, self._root).split(os.sep):
            path = f"{path}/{name}"
            with suppress(FileExistsError):
                os.mkdir(path)

    def _write_into_place(self, value: Bytes, arriving: str, path: str) -> None:
        """On trouble nothing is left of it."""
        try:
            self._write_arriving(value, arriving)
            replace = partial(os.replace, arriving, path)
            self._retried_with_folder(os.path.dirname(path), replace)
        except OSError:
            with suppress(OSError):
                os.unlink(arriving)
            raise

    def _write_arriving(self, value: Bytes, arriving: str) -> None:
        def write() -> None:
            with open(arriving, "xb", buffering=0) as file:
                done = 0
                while done < value.nbytes:
                    done += file.write(value[done:].data)

        self._retried_with_folder(os.path.dirname(arriving), write)

    def _retried_with_folder(self, folder: str, work: Callable[[], object]) -> None:
        """Make the folder if that is what is missing and the share is mounted; the owner may remove
        it again while it is empty."""
        for _ in range(_FOLDER_ATTEMPTS):
            with suppress(FileNotFoundError):
                work()
                return
            os.stat(self._mark)
            self._make_folder(folder)
        raise OSError(errno.EBUSY, "the folder was removed again and again", folder)

    def _read_value(self, path: str, value_bytes_max: int, is_touched: bool) -> Reply:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > value_bytes_max:
                return Reply(RemoteOutcome.FAILED)
            value = self._buffers.take(size)
            done = 0
            while done < size:
                count = file.readinto(value[done:].data)
                if not count:
                    return Reply(RemoteOutcome.FAILED)  # It became shorter.
                done += count
        if is_touched:  # Eviction goes by this time. On a share that is read only nobody evicts.
            with suppress(OSError):
                os.utime(path)
        return Reply(RemoteOutcome.DONE, value)

    def _path(self, key: RemoteKey) -> str:
        """No Path: it would intern each part for good, as far as the table of them goes."""
        folder, _, name = key.rpartition("/")
        spread = xxhash.xxh3_64_intdigest(key.encode()) & 0xFF
        return f"{self._root}/{VALUES_NAME}/{folder}/{spread:02x}/{name}"

    def _record_folder(self, key: RemoteKey) -> str:
        return f"{self._root}/{RECORDS_NAME}/{quote(key, safe='')}"


def _outcome_of_work(work: Callable[[str], object], path: str) -> RemoteOutcome:
    try:
        work(path)
    except FileNotFoundError:
        return RemoteOutcome.ABSENT
    except OSError as error:
        return outcome_of(error)
    return RemoteOutcome.DONE


def outcome_of(error: OSError) -> RemoteOutcome:
    """What an error of the file system means to whoever asked."""
    if error.errno in _FULL:
        return RemoteOutcome.FULL
    if error.errno in _REFUSED:
        return RemoteOutcome.REFUSED
    return RemoteOutcome.UNREACHABLE if error.errno in _GONE else RemoteOutcome.FAILED
