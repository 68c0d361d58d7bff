"""FileDriver: one file or block device, by threads that call preadv and pwritev.

As many calls are under way as there are threads, which is the queue depth. Reads go before writes.
Accesses of one batch that lie side by side on the disk go in one vectored call. A call that fails
is done again in pieces once, so that one bad sector costs one member and a short transfer is tried
twice. All that takes long (the calls, checksums of the makers) runs without the GIL.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.io.alignment import open_direct
from kvtier.io.driver import Access, Batch, Outcome
from kvtier.io.memory import punch_hole
from kvtier.memory import Bytes

# The disks measured are busy with four calls (decision 0009); another one or two of these threads
# are at their checksums meanwhile.
DEPTH = 8
# A batch beyond this is refused: what waits here is memory that its maker cannot use. 4096 blocks
# of 2 MiB are 8 GiB, more than a second of the fastest disk.
QUEUE_ACCESSES_MAX = 4096
# Larger calls gain nothing, and what is behind them in the queue waits longer.
CALL_BYTES_MAX = 8 << 20
CALL_VIEWS_MAX = min(1024, os.sysconf("SC_IOV_MAX"))

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_GONE = {errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBADF, errno.ENOMEDIUM}


@dataclass(frozen=True, slots=True)
class _Call:
    """Accesses of one batch, side by side on the disk."""

    accesses: tuple[Access, ...]
    batch: Batch


class FileDriver:
    """Implements `Driver`. Holds an exclusive lock on the file as long as it is open."""

    def __init__(self, path: Path, *, depth: int = DEPTH, writable: bool = True) -> None:
        """Raises ConfigError, in one line, when the file cannot be had for ourselves."""
        self._path = path
        try:
            self._fd, self._direct = open_direct(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(f"{path} is in use by another process (flock)") from None
        self._length_bytes = os.lseek(self._fd, 0, os.SEEK_END)
        self._changed = threading.Condition()  # Guards the rest.
        self._reads: deque[_Call] = deque()
        self._writes: deque[_Call] = deque()
        self._queued_count = 0  # Accesses in both.
        self._stopping = False
        # Entered around every call of the kernel, in its thread, with "read" or "write".
        self.time_call: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-io-{number}", daemon=True)
            for number in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def alignment(self) -> int:
        return self._direct.alignment

    @property
    def is_direct(self) -> bool:
        return self._direct.is_direct

    @property
    def buffered_reason(self) -> str:
        """Why the page cache is used, for one line in the log; empty when it is not."""
        return self._direct.reason

    @property
    def length_bytes(self) -> int:
        return self._length_bytes

    @property
    def queued_count(self) -> int:
        """Accesses that wait for a thread."""
        return self._queued_count

    def read(self, accesses: Sequence[Access], batch: Batch) -> None:
        self._enqueue(self._reads, accesses, batch)

    def write(self, accesses: Sequence[Access], batch: Batch) -> None:
        self._enqueue(self._writes, accesses, batch)

    def sync(self) -> Outcome:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            return outcome_of(error)
        return Outcome.DONE

    def punch(self, first: int, length_bytes: int) -> bool:
        """Of a block device that can. In a file this would give up what was preallocated, and leave
        the bytes on the device."""
        try:
            if not stat.S_ISBLK(os.fstat(self._fd).st_mode):
                return False
            punch_hole(self._fd, first, length_bytes)
        except OSError:
            return False
        return True

    def close(self, timeout_seconds: float = 5.0) -> bool:
        with self._changed:
            self._stopping = True
            refused = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._queued_count = 0
            self._changed.notify_all()
        for call in refused:
            _finish_all(call, Outcome.REFUSED)
        for thread in self._threads:
            thread.join(timeout_seconds)
        if any(thread.is_alive() for thread in self._threads):
            return False  # The fd stays open: its number must not become another file's.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return True

    def _enqueue(self, queue: deque[_Call], accesses: Sequence[Access], batch: Batch) -> None:
        for access in accesses:
            self._assert_fits(access)
        calls = [_Call(run, batch) for run in merge(accesses)]
        with self._changed:
            taken = not self._stopping and self._queued_count + len(accesses) <= QUEUE_ACCESSES_MAX
            if taken:
                queue.extend(calls)
                self._queued_count += len(accesses)
                self._changed.notify(len(calls))
        if not taken:
            for call in calls:
                _finish_all(call, Outcome.REFUSED)

    def _assert_fits(self, access: Access) -> None:
        end = access.offset + access.length_bytes
        assert 0 <= access.offset < end <= self._length_bytes, "an access beyond the capacity"
        alignment = self._direct.alignment
        assert access.offset % alignment == 0, f"offset {access.offset} is not aligned"
        for view in access.views:
            address: int = view.__array_interface__["data"][0]
            assert address % alignment == 0, "a view at an address that is not aligned"
            assert view.nbytes % alignment == 0, "a view whose length is not aligned"

    def _run(self) -> None:
        """A thread: one call after the other, until `close`."""
        while True:
            with self._changed:
                while not (self._reads or self._writes or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                is_read = bool(self._reads)
                call = (self._reads if is_read else self._writes).popleft()
                self._queued_count -= len(call.accesses)
            if call.batch.is_given_up:
                _finish_all(call, Outcome.REFUSED)
            elif is_read:
                self._read(call)
            else:
                self._write(call)

    def _read(self, call: _Call) -> None:
        accesses = call.batch.to_read(call.accesses)
        for access, outcome in self._transfer(os.preadv, accesses):
            # Once given up, nobody will use the bytes.
            checked = outcome is Outcome.DONE and not call.batch.is_given_up
            sound = not checked or call.batch.is_sound(access.member)
            call.batch.finish(access.member, outcome if sound else Outcome.CORRUPT)

    def _write(self, call: _Call) -> None:
        sound = []
        for access in call.accesses:
            if call.batch.is_sound(access.member):
                sound.append(access)
            else:
                call.batch.finish(access.member, Outcome.CORRUPT)
        runs = [call.accesses] if len(sound) == len(call.accesses) else merge(sound)
        for run in runs:
            for access, outcome in self._transfer(os.pwritev, call.batch.to_write(run)):
                call.batch.finish(access.member, outcome)

    def _transfer(
        self, function: Callable[[int, list[Bytes], int], int], accesses: Sequence[Access]
    ) -> Iterator[tuple[Access, Outcome]]:
        """One call for all; those that it does not bring to their end are done singly, once."""
        first = self._call(function, accesses)
        end = accesses[0].offset + first if isinstance(first, int) else 0
        for access in accesses:
            if access.offset + access.length_bytes <= end:
                yield access, Outcome.DONE
                continue
            if isinstance(first, Outcome) and len(accesses) == 1:
                yield access, first  # The kernel has tried again already.
                continue
            again = self._call(function, [access])
            if isinstance(again, Outcome):
                yield access, again
            else:
                yield access, Outcome.DONE if again == access.length_bytes else Outcome.SHORT

    def _call(
        self, function: Callable[[int, list[Bytes], int], int], accesses: Sequence[Access]
    ) -> int | Outcome:
        """How many bytes, or what went wrong."""
        views = [view for access in accesses for view in access.views]
        try:
            with self.time_call("read" if function is os.preadv else "write"):
                return function(self._fd, views, accesses[0].offset)
        except OSError as error:
            return outcome_of(error)


def outcome_of(error: OSError) -> Outcome:
    """What an error of the kernel means for the caller."""
    if error.errno in _NO_SPACE:
        return Outcome.NO_SPACE
    return Outcome.GONE if error.errno in _GONE else Outcome.EIO


def merge(accesses: Sequence[Access]) -> list[tuple[Access, ...]]:
    """Runs of accesses that lie side by side, each short enough for one call; by offset."""
    runs: list[list[Access]] = []
    end = run_bytes = view_count = 0
    for access in sorted(accesses, key=lambda one: one.offset):
        length_bytes = access.length_bytes
        fits = run_bytes + length_bytes <= CALL_BYTES_MAX
        if runs and access.offset == end and fits:
            fits = view_count + len(access.views) <= CALL_VIEWS_MAX
        else:
            fits = False
        if not fits:
            runs.append([])
            run_bytes = view_count = 0
        runs[-1].append(access)
        run_bytes += length_bytes
        view_count += len(access.views)
        end = access.offset + length_bytes
    return [tuple(run) for run in runs]


def _finish_all(call: _Call, outcome: Outcome) -> None:
    for access in call.accesses:
        call.batch.finish(access.member, outcome)


def sync_directory(directory: Path) -> None:
    """Names that were made or changed in it are durable when this returns. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
