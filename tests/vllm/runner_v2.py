"""Model Runner V2's calls to a worker's connector, replayed; and an engine that makes its steps so.

Read in the source archive of vLLM 0.33.0, as CPU engines run V1 only ("Model Runner V2 requires
Triton"). `kv_connector` is v1/worker/gpu/kv_connector.py, `runner` v1/worker/gpu/model_runner.py.

At the start
- kv_connector:69-70: `register_kv_caches`, `set_host_xfer_buffer_ops`.
- runner:903, 930: while dummy runs warm up, the connector hears nothing (kv_connector:178-181).
- runner:1150: `reset_capture_state` after CUDA graphs were captured.
Each step
- runner:1786-1796, 1850-1853: with no token to compute, or none on any data-parallel rank, there is
  no forward; kv_connector:168-176: the same calls, `start_load_kv` without keywords,
  `finish_forward` included, and never put off.
- runner:2051-2059: a full CUDA graph, begun outside a forward context; `start_load_kv` gets the
  step's `attn_metadata`, and no layer's hook is called.
- runner:2081: else within one; `wait_for_layer_load` and `save_kv_layer` for each layer
  (model_executor/layers/attention/kv_transfer_utils.py:47-57) between bind and clear.
- kv_connector:85-97: `handle_preemptions`, then `bind_connector_metadata`; `start_load_kv` at once
  only for loads within a step (`has_sync_kv_loads`).
- runner:2099: `finish_forward` after the forward; then sampling, then (runner:2187, 2259, 2366)
  kv_connector:136-160: `start_load_kv` if it is still due, `wait_for_save`, the collecting calls,
  `clear_connector_metadata`.
- runner:2258, 2343-2344: with a drafter `wait_for_save` and the clearing come after it, hence after
  the collecting (kv_connector:146, 158, 162-166).
- runner:2116, 2162: ids of finished requests are those of the step's own SchedulerOutput.
Two steps at a time (async scheduling, v1/engine/core.py `step_with_batch_queue`): the next step is
scheduled and launched before the last one's output is handled. Preempted requests that resume come
as new ones (v1/core/sched/scheduler.py:1642).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.connector.vllm import KVTierConnector
from tests.support.connector_rig import content_of
from tests.vllm.scheduler_rig import BLOCK_TOKENS, JUNK, SchedulerRig, kv_cache_config

LAYER = "layer0"


class Forward(Enum):
    """How a step with tokens runs its model."""

    GRAPH = auto()  # One full CUDA graph: no hook of a layer is called.
    LAYERS = auto()


def nothing() -> None:
    pass


@dataclass
class RunnerV2:
    """The calls of one worker's runner, in its order; `between` runs between any two of them."""

    connector: Any
    between: Callable[[], None] = nothing

    def begin(self, kv_caches: dict[str, Any]) -> None:
        self.connector.register_kv_caches(kv_caches)
        self.connector.set_host_xfer_buffer_ops(None)

    def captured(self) -> None:
        self.connector.reset_capture_state()

    def step(
        self,
        output: Any,
        forward: Callable[[], None] = nothing,
        *,
        form: Forward = Forward.LAYERS,
        has_drafter: bool = False,
    ) -> KVConnectorOutput:
        connector, order = self.connector, output.kv_connector_metadata
        has_tokens = output.total_num_scheduled_tokens > 0
        words = _load_words(output, form) if has_tokens else {}
        self._call(connector.handle_preemptions, order)
        self._call(connector.bind_connector_metadata, order)
        if output.has_sync_kv_loads:
            self._call(connector.start_load_kv, None, **words)
        if has_tokens:
            self._forward(forward, form)
        self._call(connector.finish_forward)
        if not output.has_sync_kv_loads:
            self._call(connector.start_load_kv, None, **words)
        is_put_off = has_drafter and has_tokens
        if not is_put_off:
            self._call(connector.wait_for_save)
        found = self._collect(output.finished_req_ids)
        if is_put_off:
            self._call(connector.wait_for_save)
        self._call(connector.clear_connector_metadata)
        return found

    def _forward(self, forward: Callable[[], None], form: Forward) -> None:
        if form is Forward.LAYERS:
            self._call(self.connector.wait_for_layer_load, LAYER)
        self._call(forward)
        if form is Forward.LAYERS:
            self._call(self.connector.save_kv_layer, LAYER, None, object())

    def _collect(self, finished: set[str]) -> KVConnectorOutput:
        connector = self.connector
        results = self._call(connector.get_transfer_results, finished)
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self._call(connector.get_block_ids_with_load_errors),
            kv_connector_stats=self._call(connector.get_kv_connector_stats),
            kv_cache_events=self._call(connector.get_kv_connector_kv_cache_events),
            kv_connector_worker_meta=self._call(connector.build_connector_worker_meta),
        )

    def _call(self, method: Callable[..., Any], *args: Any, **words: Any) -> Any:
        self.between()
        return method(*args, **words)


def _load_words(output: Any, form: Forward) -> dict[str, Any]:
    words = {
        "scheduler_output": output,
        "request_state_indices": list(range(len(output.num_scheduled_tokens))),
        "request_ids": list(output.num_scheduled_tokens),
        "num_tokens": output.total_num_scheduled_tokens,
    }
    return words | ({"attn_metadata": {}} if form is Forward.GRAPH else {})


@dataclass
class RunnerV2Rig(SchedulerRig):
    """vLLM's real Scheduler and a worker under Model Runner V2; see scheduler_rig.

    What is sampled is known to the device before it is to the scheduler, hence `_known`.
    """

    in_flight_max: int = 2
    random: random.Random = field(default_factory=random.Random)
    has_drafter: bool = False
    is_copying: bool = True  # Between any two calls some copies may be made.

    def begin(self) -> None:
        self.config.scheduler_config.async_scheduling = self.in_flight_max > 1
        super().begin()
        self.scheduler.use_v2_model_runner = True
        self.worker_half = KVTierConnector(
            self.config, KVConnectorRole.WORKER, kv_cache_config(self.device_block_count)
        )
        self.worker_half._worker = self.worker
        self.runner = RunnerV2(self.worker_half, self._copy_some)
        self.runner.captured()
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.told: list[str] = []  # Ids of loads that have ended, as the scheduler was told.
        self._known: dict[str, Request] = {}
        self._prefill_ends: dict[str, int] = {}

    def _scheduler_class(self) -> type[Scheduler]:
        return AsyncScheduler if self.in_flight_max > 1 else Scheduler

    def step(self, *, answers: bool = True, copies: bool = True, early: bool = False) -> Any:
        """Copies are made at random moments in the step, `early` or not."""
        self.is_copying = copies or early
        output = self.scheduler.schedule()
        self.orders.append(output.kv_connector_metadata)
        found = self.runner.step(
            output,
            lambda: self._forward(output),
            form=self.random.choice(tuple(Forward)),
            has_drafter=self.has_drafter,
        )
        assert not self.worker_half.has_connector_metadata()
        assert not found.finished_sending, "nothing was ever promised to be sent"
        self.told += found.finished_recving or ()
        self.in_flight.append((output, self._sampled(output, found)))
        is_busy = output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
        if len(self.in_flight) >= self.in_flight_max or not is_busy:
            self.handle_output()
        if answers:
            self._answer()
        self._pass_time()
        self._check_resident()
        return output

    def handle_output(self) -> None:
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        for out in outputs.values():
            self.finished += [o.request_id for o in out.outputs if o.finish_reason is not None]

    def run(self, limit: int = 400) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                while self.in_flight:
                    self.handle_output()
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.core.stats()}")

    def _copy_some(self) -> None:
        if self.is_copying:
            self.lane.step(self.random.choice((0, 0, 1, 1_000)))

    # ------------------------------------------------------------------------------- the device

    def _known_until(self, request: Request, count: int) -> Request:
        """The request as the device knows it: at least `count` tokens."""
        known = self._known.get(request.request_id)
        if known is None:
            known = Request(
                request_id=request.request_id,
                prompt_token_ids=list(request.prompt_token_ids or ()),
                sampling_params=SamplingParams(max_tokens=1 << 20),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            )
            self._known[request.request_id] = known
        while known.num_tokens < count:
            known.append_output_token_ids(self.next_token(known.all_token_ids))
        return known

    def _hash_of(self, request: Request, index: int) -> bytes:
        return bytes(request.block_hashes[index])

    def _forward(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._prefill_ends[new.req_id] = self.scheduler.requests[new.req_id].num_tokens
        for request_id, count in output.num_scheduled_tokens.items():
            end = output_end(output, request_id)
            known = self._known_until(self.scheduler.requests[request_id], end)
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            first, whole = (end - count) // BLOCK_TOKENS, end // BLOCK_TOKENS
            for index in range(first):
                self._check_block(known, index, table[index])
            for index in range(first, -(-end // BLOCK_TOKENS)):
                is_whole = index < whole
                self.copier.blocks[table[index]] = (
                    content_of(known.block_hashes[index], weights=self.weights)
                    if is_whole
                    else JUNK
                )

    def _sampled_tokens(self, output: Any, request: Request) -> list[int]:
        end = output_end(output, request.request_id)
        if end < self._prefill_ends[request.request_id]:
            return []
        return [self._known_until(request, end + 1).all_token_ids[end]]


def output_end(output: Any, request_id: str) -> int:
    """Tokens of the request that are computed when this step has run."""
    count: int = output.num_scheduled_tokens[request_id]
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            return int(new.num_computed_tokens) + count
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(request_id)]) + count


class CallLog:
    """Stands where a connector does, and writes down what is called with which words."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            self.calls.append((name, tuple(sorted(words))))
            nobody: set[str] = set()
            return SimpleNamespace(
                finished_sending=nobody, finished_recving=nobody, failed_recving=nobody
            )

        return call
