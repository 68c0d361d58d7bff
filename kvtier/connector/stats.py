"""Counters of the scheduler side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace


@dataclass(slots=True)
class ConnectorStats:
    """Counts since the start; `stats()` of the connector hands out a copy.

    Once nothing is in flight: offload_planned_blocks = committed_blocks + present_blocks + the
    blocks dropped after planning.
    """

    # Of first attempts, also after a preemption: blocks that the engine did not have itself.
    asked_blocks: int = 0
    matched_blocks: int = 0  # Of these, leased.
    onboarded_blocks: int = 0
    onboarded_tier_blocks: Counter[str] = field(default_factory=Counter)  # By tier they were in.
    onboard_failed_blocks: int = 0
    # Blocks that were there and are computed, because loading them should take longer.
    avoided_blocks: int = 0
    # What requests took more than the other way would have, by what was chosen.
    load_regret_seconds: float = 0.0
    recompute_regret_seconds: float = 0.0
    waiting_acquires: int = 0  # That waited for blocks which were on NVMe only.
    deadline_missed_requests: int = 0
    offload_planned_blocks: int = 0
    offloaded_blocks: int = 0  # Copied by every worker.
    committed_blocks: int = 0
    present_blocks: int = 0  # Somebody else had committed them before us.
    dropped_blocks: Counter[str] = field(default_factory=Counter)  # By reason.
    lingered_requests: int = 0  # Finished before all was planned, and kept for it.
    onboarded_bytes: int = 0
    offloaded_bytes: int = 0
    # Copying alone, of the slowest worker of each job: bytes by seconds is the copies' bandwidth.
    onboard_copy_seconds: float = 0.0
    offload_copy_seconds: float = 0.0
    call_errors: Counter[str] = field(default_factory=Counter)  # By name of the error.
    disabled_by: str = ""  # The internal error after which all hooks say "no kvtier".
    hook_count: int = 0
    hook_seconds: float = 0.0
    hook_seconds_max: float = 0.0

    def note_hook(self, seconds: float) -> None:
        self.hook_count += 1
        self.hook_seconds += seconds
        if seconds > self.hook_seconds_max:
            self.hook_seconds_max = seconds

    def add_planning(self, other: ConnectorStats) -> None:
        """All that `other` counts, but for the time of its hooks, which lies within ours."""
        for one in fields(self):
            if one.name.startswith("hook_"):
                continue
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name == "disabled_by":
                self.disabled_by = mine or theirs
            elif isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, one.name, mine + theirs)

    def copy(self) -> ConnectorStats:
        return replace(
            self,
            onboarded_tier_blocks=Counter(self.onboarded_tier_blocks),
            dropped_blocks=Counter(self.dropped_blocks),
            call_errors=Counter(self.call_errors),
        )
