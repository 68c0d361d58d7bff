"""Writes a recording, file after file, within a bound; the oldest files go.

Used from one thread. A file ends when it has its size or its names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from kvtier.core.events import Event, Refitted
from kvtier.core.instructions import Continue, Instruction
from kvtier.core.settings import ManagerConfig
from kvtier.recording.decisions import Decisions
from kvtier.recording.files import Header, batch_bytes, end_bytes, file_name, header_line
from kvtier.recording.values import Encoder, Names
from kvtier.types import NamespaceId

BATCH_BYTES = 256 << 10
FILES_AT_ONCE = 8  # A file is this part of the bound.
FILES_MAX = 1000  # A daemon that fails at each start leaves a small one each time.
# Names of one file are kept while it is written, and known again by their hashes: some 200 bytes
# each, so 50 MiB.
NAMES_MAX = 1 << 18


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """Where a recording goes and what it may take; `salt` is drawn for it and never written."""

    folder: Path
    bytes_max: int
    recording: str
    salt: bytes
    manager: ManagerConfig
    policy: str


@dataclass(frozen=True, slots=True)
class Noted:
    """One event as it came, and what it led to."""

    now: float
    event: Event
    found: Iterable[Instruction]
    refused: str | None


class RecordingWriter:
    """Raises OSError when the disk does; then it writes no more."""

    def __init__(self, plan: RecordingPlan) -> None:
        self._plan = plan
        self._names = Names(plan.salt)
        self._decisions = Decisions(self._names)
        self._hash_bytes: dict[NamespaceId, int] = {}
        self._encoder = Encoder(self._names, self._hash_bytes, names_new=True)
        # By identity: what the core wants continued comes back as the same object.
        self._continued: dict[int, tuple[Event, int]] = {}
        self._continue_count = 0
        self._event_count = self._batch_first = 0
        self._number = -1
        self._written_bytes = 0
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self._next_file()

    @property
    def path(self) -> Path:
        return self._plan.folder / file_name(self._plan.recording, self._number)

    def note(self, noted: Noted) -> None:
        encoder = self._encoder
        encoder.put_float(noted.now)
        known = self._continued.pop(id(noted.event), None)
        if known is not None:
            encoder.put(known[1])
        elif type(noted.event) is Refitted:
            encoder.put(replace(noted.event, result=None))
        else:
            encoder.put(noted.event)
        encoder.put(noted.refused)
        encoder.out += self._decisions.note(noted.found, noted.refused)
        for one in noted.found:
            if type(one) is Continue:
                self._continued[id(one.event)] = (one.event, self._continue_count)
                self._continue_count += 1
        self._event_count += 1
        if len(encoder.out) >= BATCH_BYTES:
            self.write()

    def write(self) -> None:
        """What was noted since the last time."""
        out = self._encoder.out
        if not out:
            return
        count = self._event_count - self._batch_first
        self._put(batch_bytes(self._batch_first, count, self._decisions.digest(), out))
        self._batch_first = self._event_count
        out.clear()
        file_bytes = self._plan.bytes_max // FILES_AT_ONCE
        if self._written_bytes >= file_bytes or len(self._names) >= NAMES_MAX:
            self._end("goes on")
            self._names = Names(self._plan.salt)
            self._decisions.use_names(self._names)
            self._encoder = Encoder(self._names, self._hash_bytes, names_new=True)
            self._file = self._next_file()

    def close(self, reason: str) -> None:
        self.write()
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._put(end_bytes(reason, self._event_count))
        self._file.close()

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self._written_bytes += len(data)

    def _next_file(self) -> BinaryIO:
        plan = self._plan
        self._number += 1
        _make_room(plan.folder, plan.bytes_max - plan.bytes_max // FILES_AT_ONCE)
        header = Header(plan.recording, self._number, self._event_count, plan.manager, plan.policy)
        line = header_line(header)
        file = self.path.open("xb")
        self.path.chmod(0o600)
        file.write(line)
        self._written_bytes = len(line)
        return file


def _make_room(folder: Path, bytes_max: int) -> None:
    """Remove recordings, the oldest first, until they have at most so many bytes, and are few."""
    found = sorted(
        ((path.stat().st_mtime, path) for path in folder.glob("kvtier-*.kvrec")), reverse=True
    )
    total = 0
    for number, (_, path) in enumerate(found, start=1):
        total += path.stat().st_size
        if total > bytes_max or number >= FILES_MAX:
            path.unlink()
