"""Records what the core is told: a manager that notes, and a thread that writes.

On the event loop a note costs an append. When the thread falls behind by more than it may, the
recording ends there and says so: the daemon never waits for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from pathlib import Path

from kvtier.config_recorder import RecorderConfig
from kvtier.core.events import Event
from kvtier.core.instructions import Instruction
from kvtier.core.manager import BlockManager
from kvtier.core.salting import SALT_BYTES
from kvtier.core.settings import ManagerConfig
from kvtier.errors import ConfigError, KVTierError
from kvtier.policy.eviction import PolicyMaker
from kvtier.recording.writer import Noted, RecordingPlan, RecordingWriter

log = logging.getLogger(__name__)

WRITE_SECONDS = 0.2
# What waits to be written: with 32 bytes a hash at most 100 MiB.
EVENTS_WAITING_MAX = 1 << 16
HASHES_WAITING_MAX = 1 << 21
CLOSE_SECONDS_MAX = 30.0


class Recorder:
    """`note` is called on the event loop, the rest of it runs in a thread."""

    def __init__(self, plan: RecordingPlan) -> None:
        try:
            self._writer = RecordingWriter(plan)
        except OSError as error:
            raise ConfigError(f"recorder.folder: cannot write to {plan.folder}: {error}") from None
        self._waiting: deque[Noted] = deque()
        # Each is written by one side only.
        self._told_hashes = self._written_hashes = 0
        self._is_behind = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        log.info("recording begins", extra={"path": str(self._writer.path)})
        self._thread.start()

    def note(self, noted: Noted) -> None:
        if self._is_behind:
            return
        self._told_hashes += _hash_count(noted)
        if (
            len(self._waiting) >= EVENTS_WAITING_MAX
            or self._told_hashes - self._written_hashes > HASHES_WAITING_MAX
        ):
            self._is_behind = True
            self._stop.set()
            return
        self._waiting.append(noted)

    def close(self) -> None:
        """Everything noted is written, if the disk takes it in time."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        try:
            while not self._stop.wait(WRITE_SECONDS):
                self._write()
            self._write()
            reason = "the writer fell behind" if self._is_behind else "the daemon ended"
            self._writer.close(reason)
        except OSError as error:
            self._is_behind = True
            reason = str(error)
        if self._is_behind:
            log.warning("recording ended", extra={"reason": reason})

    def _write(self) -> None:
        waiting = self._waiting
        for _ in range(len(waiting)):
            noted = waiting.popleft()
            self._writer.note(noted)
            self._written_hashes += _hash_count(noted)
        self._writer.write()


class RecordedManager(BlockManager):
    """Decides as ever; the recorder is told of every event afterwards."""

    def __init__(
        self, config: ManagerConfig, *, make_policy: PolicyMaker, recorder: Recorder
    ) -> None:
        super().__init__(config, make_policy=make_policy)
        self._recorder = recorder

    def handle(self, event: Event, now: float) -> list[Instruction]:
        try:
            found = super().handle(event, now)
        except (KVTierError, AssertionError) as error:
            self._recorder.note(Noted(now, event, (), type(error).__name__))
            raise
        self._recorder.note(Noted(now, event, found, None))
        return found


def open_recorder(config: RecorderConfig, manager: ManagerConfig, policy: str) -> Recorder:
    """`manager` has the salt. Raises ConfigError when the folder cannot be written to."""
    plan = RecordingPlan(
        folder=Path(config.folder).expanduser(),
        bytes_max=config.bytes,
        recording=secrets.token_hex(8),
        salt=manager.key_salt,
        manager=manager,
        policy=policy,
    )
    return Recorder(plan)


def draw_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)


def _hash_count(noted: Noted) -> int:
    return len(getattr(noted.event, "hashes", ()))
