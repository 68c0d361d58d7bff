"""What came of the demo: plain values that `claims` judges, `table` prints and JSON keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine's answer to one question; the first three counts add up to `prompt_count`."""

    engine: str
    engine_cache_count: int
    kvtier_count: int
    computed_count: int
    prompt_count: int
    ttft_seconds: float
    seconds: float
    token_ids: tuple[int, ...]
    text: str
    # Of the connector, for this answer alone; 0 without kvtier.
    tier_blocks: Mapping[str, int] = field(default_factory=dict)  # Onboarded, by tier.
    onboarded_bytes: int = 0
    onboard_seconds: float = 0.0
    offloaded_bytes: int = 0
    hook_seconds_max: float = 0.0
    connected: bool = False  # To the daemon, when the answer had ended.

    @property
    def onboard_gb_per_second(self) -> float | None:
        return self.onboarded_bytes / self.onboard_seconds / 1e9 if self.onboard_seconds else None


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, and its answers with and without kvtier."""

    question: str
    with_kvtier: Answer
    without: Answer

    @property
    def ttft_ratio(self) -> float:
        return self.with_kvtier.ttft_seconds / self.without.ttft_seconds


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers to the same prompt part, and how near the two tokens' logits are."""

    index: int
    logit_gap: float


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """The restarted engine's answer against one from a prefix of the same length at home."""

    local_hit: Answer
    parting_from_cold: Parting | None  # None: equal to the last token.


@dataclass(frozen=True, slots=True)
class ByteCheck:
    """xxh3-64 of device blocks: before offload in one engine, after onboard in the other."""

    onboarded_count: int
    equal_count: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The daemon's end in the middle of the last answer."""

    after_token_count: int
    token_count: int
    connected_before: bool
    longest_pause_seconds: float  # Between two tokens, from the kill on.


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The daemon that was started again on what the killed one had left on NVMe."""

    index: int  # The turn before which it was.
    standing_count: int  # Full blocks that were on NVMe for a while before the kill.
    bytes: ByteCheck
    parting_from_cold: Parting | None
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything; `environment` says on what it ran."""

    document_token_count: int
    block_tokens: int
    turns: tuple[Turn, ...]
    restart_index: int  # The turn before which the engine was replaced by a new process.
    kill_index: int  # The turn in which the daemon was killed.
    tokens: TokenCheck
    bytes: ByteCheck
    kill: Kill
    warm: WarmStart
    daemon_start_seconds: float
    seconds: float
    model: str
    environment: Mapping[str, object] = field(default_factory=dict)

    @property
    def restart(self) -> Turn:
        return self.turns[self.restart_index]

    @property
    def killed(self) -> Turn:
        return self.turns[self.kill_index]

    @property
    def warm_turn(self) -> Turn:
        return self.turns[self.warm.index]

    @property
    def before_restart(self) -> Turn:
        return self.turns[self.restart_index - 1]


def as_json(report: Report) -> dict[str, object]:
    """JSON values, with the figures that are derived."""
    found = asdict(report)
    found["restart_ttft_ratio"] = report.restart.ttft_ratio
    found["warm_ttft_ratio"] = report.warm_turn.ttft_ratio
    found["restart_onboard_gb_per_second"] = report.restart.with_kvtier.onboard_gb_per_second
    return found
