"""One request in the engine: its tokens, its device blocks, and where it is in its life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import torch

from kvtier.engine.config import SamplingParams
from kvtier.engine.hashing import HashChain
from kvtier.engine.prefix_index import Prefix
from kvtier.errors import IllegalTransition
from kvtier.types import BlockHash

if TYPE_CHECKING:
    from kvtier.engine.groups import Group


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


class Load(Enum):
    """That tokens are computed beside."""

    NONE = "none"
    UNDER_WAY = "under way"
    GOOD = "good"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a prompt."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    log_probability: float  # Of all its tokens, where beams are compared by it; else 0.


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A finished request; `token_ids` and `finish_reason` are those of its first sample. The three
    prompt counts add up to `prompt_count`."""

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
    samples: tuple[Sample, ...]


@dataclass(slots=True, eq=False)
class Request:
    """One run of tokens, the prompt and what was generated so far, and its block table. Requests
    for several answers are several of these, in one group, once their prompt is computed."""

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
    group: Group | None = None
    index: int = 0  # Of the answer, in its group.
    log_probability: float = 0.0  # Of what a beam has generated.
    width: int = 1  # How many requests it is, or will be when its prompt is computed.
    is_announced: bool = False  # To kvtier, which need not hear of branches that die at once.

    @property
    def hashes(self) -> list[BlockHash]:
        """Block hashes of all full blocks of `token_ids`."""
        return self.chain.hashes

    def prefix(self, block_count: int) -> Prefix:
        """Its first full blocks."""
        return Prefix(self.token_ids, self.hashes[:block_count], self.chain.cache_salt)

    def tokens_of(self, block: int) -> list[int]:
        """Token ids of one full block."""
        count = self.chain.block_tokens
        return self.token_ids[block * count : (block + 1) * count]

    @property
    def generated_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.prompt_count :]

    @property
    def cached_count(self) -> int:
        """Tokens of the prompt that were not computed, for its first start."""
        return sum(self.prefix_counts or ())

    @property
    def full_count(self) -> int:
        """Blocks that are full of computed tokens."""
        return self.computed_count // self.chain.block_tokens

    @property
    def reusable_count(self) -> int:
        """Full blocks before the one with the last token, which is always computed."""
        return (len(self.token_ids) - 1) // self.chain.block_tokens

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

    @property
    def leader_id(self) -> str:
        """The caller's name of the request that this is, or is a branch of."""
        return self.request_id if self.group is None else self.group.request_id

    def fork(self, request_id: str) -> Request:
        """Another that goes on from here in its own way, with the same blocks: hold them."""
        return replace(
            self,
            request_id=request_id,
            token_ids=list(self.token_ids),
            chain=self.chain.copy(),
            device_blocks=list(self.device_blocks),
            preempted_count=0,
            is_announced=False,
        )

    def sample(self, reason: FinishReason) -> Sample:
        """The answer, now that it is over."""
        return Sample(tuple(self.generated_ids), reason, self.log_probability)

    def finish(self, samples: Sequence[Sample], now: float) -> RequestResult:
        """Settle the account."""
        engine_cache_count, kvtier_count = self.prefix_counts or (0, 0)
        first_at = self.first_token_at
        self.result = RequestResult(
            request_id=self.request_id,
            token_ids=samples[0].token_ids,
            finish_reason=samples[0].finish_reason,
            prompt_count=self.prompt_count,
            engine_cache_count=engine_cache_count,
            kvtier_count=kvtier_count,
            computed_count=self.prompt_count - engine_cache_count - kvtier_count,
            preempted_count=self.preempted_count,
            ttft_seconds=0.0 if first_at is None else first_at - self.arrived_at,
            seconds=now - self.arrived_at,
            samples=tuple(samples),
        )
        return self.result


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """A request's next `count` tokens, from `first` on."""

    request: Request
    first: int
    count: int
    load: Load = Load.NONE
    # Beside a load, whose verdict they wait for: what was drawn, and the generator before that.
    token_id: int | None = None
    generator_state: torch.Tensor | None = None
