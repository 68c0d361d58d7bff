"""Records of purges: one JSON file each, there before the purge begins, the report when it ended.

A file is replaced as a whole and synced, so after a crash it says what was to be purged, and that
it was not finished. All methods block; the daemon calls them in a thread.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError
from kvtier.io.file import sync_directory

log = logging.getLogger(__name__)

RUNNING, DONE, INCOMPLETE = "running", "done", "incomplete"
# Of purges that have ended; the oldest go.
RECORDS_MAX = 64
_SUFFIX = ".json"


@dataclass(slots=True)
class TierReport:
    """What a purge has done in one tier. `blocks`: that were there when it began, as far as that
    is known; None where it is not. `bytes`: overwritten, dropped by the device, or deleted."""

    blocks: int | None = None
    bytes: int = 0
    places: int = 0  # Slots, segments or values, as the tier has them.


@dataclass(slots=True)
class PurgeRecord:
    """One purge, as its file has it."""

    id: str
    tenant: str  # "": of namespaces alone.
    fingerprints: list[str]
    begun_at: float  # By the calendar's clock, as is `ended_at`.
    asked_by: str = ""  # The tenant whose administrator did, or the operator.
    state: str = RUNNING
    begun_count: int = 1  # Lives of the daemon that have worked at it.
    ended_at: float = 0.0
    tiers: dict[str, TierReport] = field(default_factory=dict)
    books: list[str] = field(default_factory=list)  # What was removed besides.
    not_done: list[str] = field(default_factory=list)  # And why.
    kept: list[str] = field(default_factory=list)  # What a purge does not reach.

    @property
    def spaces(self) -> list[bytes]:
        return [bytes.fromhex(one) for one in self.fingerprints]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


class PurgeRecords:
    """Invariant: a purge whose record was written is found again until it says that it ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: PurgeRecord) -> None:
        """Durable when this returns. Raises KVTierError."""
        path = self._directory / f"{record.id}{_SUFFIX}"
        new = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w") as file:
                file.write(record.to_json())
                file.flush()
                os.fdatasync(file.fileno())
            new.rename(path)
            for one in (self._directory, self._directory.parent):
                sync_directory(one)
        except OSError as error:
            raise KVTierError(
                f"the purge cannot be recorded in {self._directory} ({error.strerror}): make room "
                "there, or mend its rights"
            ) from None

    def read(self) -> list[PurgeRecord]:
        """All of them, the earliest first; a file that is damaged is left out, with a warning."""
        found = []
        for path in self._directory.glob(f"*{_SUFFIX}"):
            try:
                found.append(_record_of(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("purge record unreadable", extra={"path": path, "reason": str(error)})
        return sorted(found, key=lambda one: one.begun_at)

    def forget_old(self) -> None:
        """Keep the last RECORDS_MAX reports."""
        ended = [one for one in self.read() if one.state != RUNNING]
        for one in ended[:-RECORDS_MAX]:
            (self._directory / f"{one.id}{_SUFFIX}").unlink(missing_ok=True)


def _record_of(facts: dict[str, Any]) -> PurgeRecord:
    tiers = {name: TierReport(**one) for name, one in facts.pop("tiers").items()}
    record = PurgeRecord(**facts, tiers=tiers)
    record.spaces  # noqa: B018  # Raises ValueError for what names no namespaces.
    return record
