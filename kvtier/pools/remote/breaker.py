"""The breaker of a remote tier: an engine in trouble is left alone, and asked now and then.

    CLOSED     calls pass; troubles among the last of them are counted
    OPEN       no call passes until a delay is over, which doubles from one opening to the next
    HALF_OPEN  one call at a time passes as a trial; it closes the breaker, or opens it again

Pure: whoever calls the engine asks `begin` before and says how it ended after; time and chance are
arguments. Slow, dead, full and refusing engines are all the same to it: what comes back is not
worth a wait. A lying engine is told to it as a trouble as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Opens when `trouble_count` of the last `window_count` calls ended in trouble."""

    trouble_count: int = 3
    window_count: int = 10
    open_seconds_min: float = 1.0
    open_seconds_max: float = 60.0
    # A trial that never reports is given up after this: every call has a deadline below it.
    trial_seconds_max: float = 60.0

    def __post_init__(self) -> None:
        assert 0 < self.trouble_count <= self.window_count
        assert 0 < self.open_seconds_min <= self.open_seconds_max


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """For one line in the log. `reason` is that of the last trouble, empty when there was none."""

    before: BreakerState
    after: BreakerState
    reason: str
    open_seconds: float  # How long the next trial is off; 0 unless OPEN.


class Breaker:
    """Invariant: while HALF_OPEN, at most one call is under way that was let through since."""

    def __init__(self, settings: BreakerSettings, jitter: Callable[[], float]) -> None:
        """`jitter`: from 0 to 1 by chance."""
        self._settings = settings
        self._jitter = jitter
        self._recent: deque[bool] = deque(maxlen=settings.window_count)  # True: trouble.
        self._open_until = 0.0
        self._step_seconds = settings.open_seconds_min
        self._trial_since: float | None = None
        self._life = 0  # Calls let through before the last change of state tell nothing of now.
        self.state = BreakerState.CLOSED
        self.reason = ""
        self.troubles: Counter[str] = Counter()  # By reason.
        self.skipped_count = 0  # Calls that were not let through.
        self._changes: deque[BreakerChange] = deque(maxlen=16)

    @property
    def ticket(self) -> int:
        """For a trouble that is found out after its call has ended."""
        return self._life

    def begin(self, *, now: float) -> int | None:
        """A ticket for one call, to be given back with how it ended; None: make no call now."""
        if self.state is BreakerState.OPEN and now >= self._open_until:
            self._move(BreakerState.HALF_OPEN)
        if self.state is BreakerState.CLOSED:
            return self._life
        if self.state is BreakerState.HALF_OPEN and not self._is_trying(now):
            self._trial_since = now
            return self._life
        self.skipped_count += 1
        return None

    def on_success(self, ticket: int) -> None:
        """The call was answered in time, with whatever."""
        if ticket != self._life:
            return
        if self.state is BreakerState.CLOSED:
            self._recent.append(False)
            if len(self._recent) == self._settings.window_count and not any(self._recent):
                # One good answer may be luck: the delays go on from where they were until then.
                self._step_seconds = self._settings.open_seconds_min
            return
        self.reason = ""
        self._move(BreakerState.CLOSED)

    def on_trouble(self, ticket: int, reason: str, *, now: float) -> None:
        self.troubles[reason] += 1
        if ticket != self._life:
            return
        self.reason = reason
        self._recent.append(True)
        if self.state is BreakerState.HALF_OPEN or (
            sum(self._recent) >= self._settings.trouble_count
        ):
            self._open(now)

    def on_given_up(self, ticket: int) -> None:
        """The caller was cancelled: that tells nothing; a trial's place is free again."""
        if ticket == self._life:
            self._trial_since = None

    def take_changes(self) -> list[BreakerChange]:
        """Changes of state since the last time, oldest first."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def _is_trying(self, now: float) -> bool:
        since = self._trial_since
        return since is not None and now - since < self._settings.trial_seconds_max

    def _open(self, now: float) -> None:
        # The jitter keeps the daemons of a cluster from coming back in step.
        delay = self._step_seconds * (1.0 - 0.5 * self._jitter())
        self._step_seconds = min(2 * self._step_seconds, self._settings.open_seconds_max)
        self._open_until = now + delay
        self._move(BreakerState.OPEN, delay)

    def _move(self, state: BreakerState, open_seconds: float = 0.0) -> None:
        self._changes.append(BreakerChange(self.state, state, self.reason, open_seconds))
        self.state = state
        self._life += 1
        self._trial_since = None
        self._recent.clear()
