"""The engine: takes requests, steps the model over all of them at once, gives tokens out.

One thread calls it; copies to and from kvtier run beside it on the connector's own thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.clock import Clock, SystemClock
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connector_api import EngineConnector
from kvtier.engine.device import EngineDevice, open_device
from kvtier.engine.groups import Group, group_of
from kvtier.engine.hashing import HashChain
from kvtier.engine.intake import check_request
from kvtier.engine.model import LlamaModel
from kvtier.engine.request import (
    FinishReason,
    Load,
    Request,
    RequestResult,
    RequestState,
    ScheduledTokens,
)
from kvtier.engine.sampler import pick_token
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.step import Step
from kvtier.errors import BadRequest, LimitExceeded
from kvtier.policy.prefill_rate import PrefillRate

# How long `generate` and `stream` leave the core to the copies when no request can run.
IDLE_SECONDS = 0.0005
# Tokens computed beside a load wait so long for word of its end, which the copying thread looks for
# every 100 us: less than another step would take, and a bound.
VERDICT_SECONDS, VERDICT_LOOKS = 50e-6, 20


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A token that a step generated; the last one of a request comes with its result. Of beams
    there is only this last one: until then no token is sure to stay."""

    request_id: str
    token_id: int
    result: RequestResult | None = None
    index: int = 0  # Of the sample that goes on with this token.
    finish_reason: FinishReason | None = None  # Where the token ends its sample.
    cached_count: int = 0  # Tokens of the prompt that the engine's cache and kvtier had.


class Engine:
    """A model, its KV tensor and the requests that share them."""

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig = EngineConfig(),
        connector: EngineConnector | None = None,
        *,
        device: EngineDevice | None = None,
        clock: Clock = SystemClock(),
        pause: Callable[[float], object] = threading.Event().wait,
    ) -> None:
        """`device` is given where the connector's worker side was built on it before the engine.
        Raises CudaUnavailable."""
        self.device = open_device(model, config) if device is None else device
        self.model = self.device.model
        self.config = config
        side = None if connector is None else connector.scheduler
        self.scheduler = Scheduler(config, side, clock.now)
        self._connector = connector
        self._clock = clock
        self._pause = pause
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._rate = PrefillRate()
        self._launched = (0.0, 0)  # Seconds and tokens of steps that have given no token yet.

    @property
    def kv_cache(self) -> torch.Tensor:
        """[device_blocks, layers, 2 (keys, values), block_tokens, kv_heads, head_size]."""
        return self.device.kv_cache

    @property
    def unfinished_count(self) -> int:
        """Requests that will still give tokens."""
        return self.scheduler.unfinished_count

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. Prompts with different salts never share KV."""
        self._add(request_id, prompt_ids, params, cache_salt)

    def step(self) -> list[TokenOutput]:
        """Compute one batch; never waits, so it may return nothing while kvtier is copying."""
        self._exchange()
        outputs = self._settle()
        batch = self.scheduler.schedule()
        if copies := self.scheduler.tables.take_copies():
            # First: a block that is copied from may be written to in this step, by a new owner.
            self.device.copy_blocks(copies)
        if self._connector is not None:
            self._connector.worker.note_step(sum(scheduled.count for scheduled in batch))
        self._exchange()  # The onboards just allocated are copied while the batch is computed.
        batch = [scheduled for scheduled in batch if not self._is_void(scheduled)]
        if not batch:
            return outputs
        began_at = self._clock.now()
        step = Step(self.device, batch, self.config.block_tokens)
        step.launch(self._follow_layer)
        for scheduled in batch:
            if scheduled.load is Load.NONE:
                self.scheduler.on_computed(scheduled)
            else:
                scheduled.generator_state = scheduled.request.generator.get_state()
        for scheduled, logits, likeliest in step.read():
            outputs += self._take(scheduled, logits, likeliest)
        self._note_rate(batch, began_at, is_computed=bool(step.sampled))
        self._exchange()
        return outputs + self._settle_soon()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = SamplingParams()
    ) -> list[RequestResult]:
        """Run these prompts to their ends, together; the results are in the prompts' order."""
        requests = [self._add(self._next_id(), prompt, params, None) for prompt in prompts]
        while any(request.result is None for request in requests):
            self._step_or_pause()
        return [_result_of(request) for request in requests]

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[TokenOutput]:
        """The tokens of one request as they come. A stream that is dropped cancels its request.
        Raises BadRequest for several samples: `add_request` and `step` give theirs."""
        if params.branch_count > 1:
            raise BadRequest("a stream is of one sample: use add_request and step for several")
        request = self._add(request_id or self._next_id(), prompt_ids, params, cache_salt)
        return self._stream(request)

    def cancel(self, request_id: str) -> None:
        """End a request now; what it has computed stays cached."""
        if request_id not in self._requests:
            raise BadRequest(f"no request {request_id!r} is unfinished")
        request = self._requests[request_id]
        for one in [request] if request.group is None else list(request.group.live):
            self._finish(one, FinishReason.CANCELLED)

    def forget_cached(self) -> None:
        """Forget the engine's own cached blocks, so that the next run is cold."""
        assert self.unfinished_count == 0, "requests are still computing on cached blocks"
        self.scheduler.pool.forget_all()

    def wait_offloads(self, timeout_seconds: float) -> bool:
        """Let kvtier take in all that was computed; False when it had not by then."""
        deadline = self._clock.now() + timeout_seconds
        while True:  # Ends at the deadline.
            self._exchange()
            if self._connector is None or not self._connector.scheduler.has_work:
                return True
            self._connector.worker.note_step(0)  # Nothing is computed that offloads could stretch.
            if self._clock.now() >= deadline:
                return False
            self._pause(IDLE_SECONDS)

    def check_invariants(self) -> list[str]:
        """Each string is one violation."""
        return self.scheduler.check_invariants()

    def _add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None,
    ) -> Request:
        if request_id in self._requests or request_id in self.scheduler.tables.kept:
            raise BadRequest(f"request id {request_id!r} is in use")
        check_request(prompt_ids, params, self.config, self.model.config)
        if self.scheduler.waiting_count >= self.config.waiting_count_max:
            raise LimitExceeded(f"waiting_count_max {self.config.waiting_count_max} requests wait")
        chain = HashChain(
            seed=self.config.hash_seed,
            block_tokens=self.config.block_tokens,
            cache_salt=cache_salt,
        )
        chain.extend(prompt_ids)
        request = Request(
            request_id=request_id,
            token_ids=list(prompt_ids),
            prompt_count=len(prompt_ids),
            params=params,
            chain=chain,
            generator=torch.Generator().manual_seed(params.seed),
            arrived_at=self._clock.now(),
            width=params.branch_count,
        )
        request.group = group_of(request)
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def _is_void(self, scheduled: ScheduledTokens) -> bool:
        """Whether the load that it was to be computed beside has failed already."""
        return scheduled.load is Load.FAILED and not self.scheduler.settle(scheduled)

    def _settle(self) -> list[TokenOutput]:
        """Give out, or throw away, the tokens computed beside loads that have ended."""
        outputs = []
        for ahead in self.scheduler.ahead:
            if ahead.load is Load.UNDER_WAY:
                continue
            if not self.scheduler.settle(ahead):
                assert ahead.generator_state is not None, "settled before it was computed"
                ahead.request.generator.set_state(ahead.generator_state)
            elif ahead.token_id is not None:
                outputs.append(self._append(ahead.request, ahead.token_id))
        return outputs

    def _settle_soon(self) -> list[TokenOutput]:
        """As `_settle`; where a token is there its load has ended, and word of it is on its way."""
        outputs = self._settle()
        for _ in range(VERDICT_LOOKS):
            if all(ahead.token_id is None for ahead in self.scheduler.ahead):
                break
            self._pause(VERDICT_SECONDS)
            self._exchange()
            outputs += self._settle()
        return outputs

    def _note_rate(
        self, batch: Sequence[ScheduledTokens], began_at: float, *, is_computed: bool
    ) -> None:
        """Tell kvtier how long a token takes. A step that gives no token has only been launched."""
        seconds, count = self._launched
        seconds += self._clock.now() - began_at
        count += sum(scheduled.count for scheduled in batch)
        self._launched = (0.0, 0) if is_computed else (seconds, count)
        if not is_computed or self._connector is None:
            return
        self._rate.note(count, seconds)
        if self._rate.token_seconds is not None:
            self._connector.scheduler.note_prefill(self._rate.token_seconds)
            self.scheduler.preemption.note_prefill(self._rate.token_seconds)

    def _take(
        self, scheduled: ScheduledTokens, logits: torch.Tensor, likeliest: int
    ) -> list[TokenOutput]:
        """Choose what follows a request's last token."""
        request = scheduled.request
        if request.group is not None:
            return self._branch(request, request.group, logits.cpu())
        token_id = likeliest
        if not request.params.is_greedy:
            token_id = pick_token(logits.cpu(), request.params, request.generator)
        if scheduled.load is Load.NONE:
            return [self._append(request, token_id)]
        scheduled.token_id = token_id
        return []

    def _branch(self, request: Request, group: Group, logits: torch.Tensor) -> list[TokenOutput]:
        branching = group.branch(request, logits)
        heirs: list[Request] = []
        for branch in branching.branches:  # All forks are made before a token is appended.
            is_first = branch.parent not in heirs
            heirs.append(branch.parent if is_first else self.scheduler.fork(branch.parent))
        for dropped in branching.dropped:
            self.scheduler.finish(dropped)
        group.note_branched(branching, heirs)
        outputs = []
        for branch, heir in zip(branching.branches, heirs, strict=True):
            heir.index, heir.generator = branch.index, branch.generator
            heir.log_probability = branch.log_probability
            outputs.append(self._append(heir, branch.token_id))
        if not group.live and not heirs:  # Beams that no live one can overtake.
            outputs.append(self._last_of(group))
        return [one for one in outputs if group.is_streaming or one.result is not None]

    def _append(self, request: Request, token_id: int) -> TokenOutput:
        reason = request.append(token_id, self._clock.now())
        result = None if reason is None else self._finish(request, reason)
        return TokenOutput(
            request.leader_id, token_id, result, request.index, reason, request.cached_count
        )

    def _finish(self, request: Request, reason: FinishReason) -> RequestResult | None:
        """The result, where no other branch of the request goes on."""
        self.scheduler.finish(request)
        group = request.group
        if group is None:
            del self._requests[request.request_id]
            return request.finish([request.sample(reason)], self._clock.now())
        group.note_finished(request, reason)
        return None if group.live else self._last_of(group).result

    def _last_of(self, group: Group) -> TokenOutput:
        del self._requests[group.request_id]
        group.leader.preempted_count = group.preempted_count
        result = group.leader.finish(group.samples, self._clock.now())
        best = group.samples[0]
        return TokenOutput(
            group.request_id,
            best.token_ids[-1] if best.token_ids else -1,
            result,
            0,
            best.finish_reason,
            group.leader.cached_count,
        )

    def _exchange(self) -> None:
        if self._connector is not None:
            self.scheduler.on_outcome(self._connector.exchange())

    def _follow_layer(self, layer: int) -> None:
        if self._connector is not None:
            self._connector.worker.follow_layer(layer)

    def _stream(self, request: Request) -> Iterator[TokenOutput]:
        given = 0
        try:
            while given < len(request.generated_ids) or request.result is None:
                if given == len(request.generated_ids):
                    self._step_or_pause()
                    continue
                token_id = request.generated_ids[given]
                given += 1
                is_last = given == len(request.generated_ids)
                yield TokenOutput(request.request_id, token_id, request.result if is_last else None)
        finally:
            if request.state is not RequestState.FINISHED:
                self._finish(request, FinishReason.CANCELLED)

    def _step_or_pause(self) -> None:
        before = self.scheduler.computed_token_count
        self.step()
        if self.scheduler.computed_token_count == before:
            self._pause(IDLE_SECONDS)

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"


def _result_of(request: Request) -> RequestResult:
    assert request.result is not None, "a finished request has its result"
    return request.result
