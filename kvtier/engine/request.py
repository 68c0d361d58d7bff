"""One request in the engine: its tokens, its device blocks, and where it is in its life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import torch

from kvtier.engine.config import SamplingParams
from kvtier.engine.hashing import HashChain
from kvtier.errors import IllegalTransition
from kvtier.types import BlockHash


class RequestState(Enum):
    """Where a request is; the middle two hold device blocks."""

    WAITING = "waiting"
    WAITING_FOR_ONBOARD = "waiting for onboard"
    RUNNING = "running"
    FINISHED = "finished"


class RequestEvent(Enum):
    """What happens to a request."""

    ONBOARD = "onboard"  # Device blocks are allocated and kvtier fills them.
    START = "start"  # Its tokens may be computed from now on.
    PREEMPT = "preempt"  # Its device blocks are gone; it starts again by computing anew.
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.ONBOARD): RequestState.WAITING_FOR_ONBOARD,
    (RequestState.WAITING, RequestEvent.START): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.WAITING_FOR_ONBOARD, RequestEvent.START): RequestState.RUNNING,
    (RequestState.WAITING_FOR_ONBOARD, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.PREEMPT): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
}


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A finished request. The three prompt counts add up to `prompt_count`."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_count: int
    engine_cache_count: int
    kvtier_count: int
    computed_count: int
    preempted_count: int
    ttft_seconds: float  # From add_request to the first token; 0 if there was none.
    seconds: float


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows; `token_ids` are the prompt and what was generated so far."""

    request_id: str
    token_ids: list[int]
    prompt_count: int
    params: SamplingParams
    chain: HashChain
    generator: torch.Generator
    arrived_at: float
    state: RequestState = RequestState.WAITING
    device_blocks: list[int] = field(default_factory=list)
    computed_count: int = 0  # Tokens whose KV is in the device blocks.
    published_count: int = 0  # Leading blocks that are full and have been told to pool and kvtier.
    local_block_count: int = 0  # Of these blocks, found in the engine's own cache.
    onboard_block_count: int = 0  # And out of kvtier.
    prefix_counts: tuple[int, int] | None = None  # Tokens of the two, at the first start.
    preempted_count: int = 0
    first_token_at: float | None = None
    result: RequestResult | None = None

    @property
    def hashes(self) -> list[BlockHash]:
        """Block hashes of all full blocks of `token_ids`."""
        return self.chain.hashes

    def tokens_of(self, block: int) -> list[int]:
        """Token ids of one full block."""
        count = self.chain.block_tokens
        return self.token_ids[block * count : (block + 1) * count]

    @property
    def generated_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.prompt_count :]

    @property
    def pending_count(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.computed_count

    def move(self, event: RequestEvent) -> None:
        """The only way a request changes state."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} while {self.state.name}") from None

    def append(self, token_id: int, now: float) -> FinishReason | None:
        """Add a generated token; the reason to stop, if there is one."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.token_ids.append(token_id)
        self.chain.extend(self.token_ids)
        if token_id in self.params.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) - self.prompt_count >= self.params.tokens_max:
            return FinishReason.LENGTH
        return None

    def finish(self, reason: FinishReason, now: float) -> RequestResult:
        """Settle the account."""
        engine_cache_count, kvtier_count = self.prefix_counts or (0, 0)
        first_at = self.first_token_at
        self.result = RequestResult(
            request_id=self.request_id,
            token_ids=tuple(self.generated_ids),
            finish_reason=reason,
            prompt_count=self.prompt_count,
            engine_cache_count=engine_cache_count,
            kvtier_count=kvtier_count,
            computed_count=self.prompt_count - engine_cache_count - kvtier_count,
            preempted_count=self.preempted_count,
            ttft_seconds=0.0 if first_at is None else first_at - self.arrived_at,
            seconds=now - self.arrived_at,
        )
        return self.result
