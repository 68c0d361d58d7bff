"""Turns the planning's counts into each step's increase, and times what vLLM waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvtier.clock import Clock, SystemClock
from kvtier.connector.jobs import JobResult, StepPlan
from kvtier.connector.stats import ConnectorStats
from kvtier.connector.vllm.metrics import KVTierStats, sample
from kvtier.policy.prefill_rate import PrefillRate

STEPS_MAX = 64  # More than any vLLM has under way.


class Meter:
    """Owned by the scheduler's thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._told: dict[str, float] = {}  # What each count was when it was last told.
        self._data: dict[str, Any] = {}
        self._loads: dict[str, tuple[float, int]] = {}  # Since when, and of how many tokens.
        self._offloads: dict[int, float] = {}
        # Steps that compute and have no output yet, in order: since when, and how many tokens.
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS_MAX)
        self._output_at = float("-inf")
        self._rate = PrefillRate()
        self._deadline_count = 0

    @property
    def token_seconds(self) -> float | None:
        """What a token of a prefill takes; None before the first."""
        return self._rate.token_seconds

    def note_miss(self, stats: ConnectorStats, *, is_connected: bool) -> None:
        """A request was told that there is nothing for it."""
        is_late = stats.deadline_missed_requests > self._deadline_count
        self._deadline_count = stats.deadline_missed_requests
        if stats.disabled_by:
            reason = "internal_error"
        elif is_late:
            reason = "deadline"
        else:
            reason = "absent" if is_connected else "unavailable"
        self._add(sample("missed_requests", reason), 1)

    def note_allocated(self, request_id: str, tokens: int) -> None:
        self._loads[request_id] = self._clock.now(), tokens

    def note_step(self, plan: StepPlan, token_count: int) -> None:
        now = self._clock.now()
        if token_count:
            self._steps.append((now, token_count))
        for job in plan.offloads:
            self._offloads[job.job_id] = now

    def note_output(self, results: Sequence[JobResult]) -> None:
        """The step's output is there, and with it what ended in the workers."""
        now = self._clock.now()
        step_at, tokens = self._steps.popleft() if self._steps else (now, 0)
        # A step that is scheduled early begins when the one before it has ended.
        self._rate.note(tokens, now - max(step_at, self._output_at))
        self._output_at = now
        for result in results:
            began = self._offloads.pop(result.job_id, None)
            if began is not None and result.failed is None:
                self._data.setdefault("offload_seconds", []).append(now - began)

    def note_received(self, request_id: str, *, is_good: bool) -> None:
        """A load has ended; of a failed one there is nothing to tell but its blocks."""
        began, tokens = self._loads.pop(request_id, (None, 0))
        if began is None or not is_good:
            return
        seconds = self._clock.now() - began
        self._data.setdefault("onboard_seconds", []).append(seconds)
        if self.token_seconds is not None:
            self._add("saved_seconds", max(0.0, tokens * self.token_seconds - seconds))

    def take(self, stats: ConnectorStats) -> KVTierStats | None:
        """The increase since the last call; None when there is none."""
        # Of a request that had been told before, with another answer: not the next one's reason.
        self._deadline_count = stats.deadline_missed_requests
        for key, count in _counts(stats):
            increase = count - self._told.get(key, 0)
            if increase:
                self._told[key] = count
                self._add(key, increase)
        data, self._data = self._data, {}
        return KVTierStats(data=data) if data else None

    def _add(self, key: str, increase: float) -> None:
        self._data[key] = self._data.get(key, 0) + increase


def _counts(stats: ConnectorStats) -> list[tuple[str, float]]:
    return [
        ("asked_blocks", stats.asked_blocks),
        ("onboarded_bytes", stats.onboarded_bytes),
        ("avoided_blocks", stats.avoided_blocks),
        (sample("regret_seconds", "load"), stats.load_regret_seconds),
        (sample("regret_seconds", "recompute"), stats.recompute_regret_seconds),
        ("failed_onboard_blocks", stats.onboard_failed_blocks),
        ("offloaded_blocks", stats.committed_blocks),
        ("offloaded_bytes", stats.offloaded_bytes),
        ("hook_seconds", stats.hook_seconds),
        *((sample("onboarded_blocks", str(k)), n) for k, n in stats.onboarded_tier_blocks.items()),
        *((sample("dropped_blocks", reason), n) for reason, n in stats.dropped_blocks.items()),
        *((sample("call_errors", error), n) for error, n in stats.call_errors.items()),
    ]
