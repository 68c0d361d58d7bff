"""What the scheduler's hooks cost, and that none of them waits for anybody."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.connector import SchedulerConnector
from kvtier.connector.control import ControlThread
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.vllm.options import parse_options
from kvtier.connector.vllm.scheduler_side import SchedulerSide
from tests.support.fake_client import FakeClient
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SchedulerRig, prompt_of

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 128 << 10
BLOCK_COUNT = PROMPT_TOKENS // BLOCK_TOKENS
ROUNDS = 100
# As in vLLM the numbers belong to its blocks: lists of them come and go, they stay.
TABLE = list(range(BLOCK_COUNT + 1))
P50_SECONDS, P99_SECONDS = 50e-6, 200e-6


def request_of(number: int) -> Any:
    """As vLLM's, of 128 Ki tokens whose blocks nobody has."""
    hashes = [number.to_bytes(4, "big") + i.to_bytes(28, "big") for i in range(BLOCK_COUNT)]
    return SimpleNamespace(
        request_id=f"r{number}",
        block_hashes=hashes,
        num_preemptions=0,
        num_computed_tokens=0,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
        lora_request=None,
        resumable=False,
    )


def output_of(request: Any, *, is_new: bool) -> Any:
    """A step that computes the request's next block."""
    new = [SimpleNamespace(req_id=request.request_id, block_ids=[TABLE], num_computed_tokens=0)]
    return SimpleNamespace(
        preempted_req_ids=(),
        scheduled_new_reqs=new if is_new else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={request.request_id: BLOCK_TOKENS},
        total_num_scheduled_tokens=BLOCK_TOKENS,
    )


STEP_DONE = SimpleNamespace(
    kv_connector_worker_meta=None, finished_recving=None, invalid_block_ids=set()
)


def timed(costs: dict[str, list[float]], name: str, call: Any) -> None:
    start = time.thread_time()
    call()
    costs.setdefault(name, []).append(time.thread_time() - start)


def test_hooks_at_128_ki_tokens_take_microseconds(tiny_llama: Path) -> None:
    """CPU time of the calling thread; of three series the quietest, as others use the cores.

    The limits themselves are asserted in the full form, and wherever the machine is quiet: with
    more to run than there are cores, caches are cold and the same calls take three times as much.
    """
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    slack = 3 if is_busy and os.environ.get("KVTIER_TORTURE") != "1" else 1
    series = [hook_costs(SchedulerRig(tiny_llama)) for _ in range(3)]
    calls = [[seconds for found in costs.values() for seconds in found] for costs in series]
    medians = [{name: float(np.median(c)) for name, c in costs.items()} for costs in series]
    assert min(np.percentile(found, 50) for found in calls) <= slack * P50_SECONDS, medians
    assert min(np.percentile(found, 99) for found in calls) <= slack * P99_SECONDS, medians


def hook_costs(rig: SchedulerRig) -> dict[str, list[float]]:
    """Of every hook, over requests that are answered, run their last two steps and end."""
    side, control = rig.side, rig.control
    costs: dict[str, list[float]] = {}
    for request in [request_of(number) for number in range(ROUNDS)]:
        timed(costs, "on_new_request", lambda r=request: side.on_new_request(r))
        timed(costs, "get_matched_tokens", lambda r=request: side.get_matched_tokens(r, 0))
        control.step()
        rig.clock.advance(1.0)
        timed(costs, "get_matched_tokens", lambda r=request: side.get_matched_tokens(r, 0))
        timed(costs, "on_allocated", lambda r=request: side.on_allocated(r, None, 0))
        # The whole prompt in one step is no step of an engine: chunks are a hundredth of it.
        side.build_order(output_of(request, is_new=True))
        request.num_computed_tokens = (BLOCK_COUNT - 2) * BLOCK_TOKENS
        side.build_order(output_of(request, is_new=False))
        for full_count in (BLOCK_COUNT - 1, BLOCK_COUNT):
            request.num_computed_tokens = full_count * BLOCK_TOKENS
            output = output_of(request, is_new=False)
            timed(costs, "build_order", lambda o=output: side.build_order(o))
            timed(costs, "on_output", lambda: side.on_output(STEP_DONE))
            timed(costs, "take_stats", side.take_stats)
        timed(costs, "on_finished", lambda r=request: side.on_finished(r, ()))
        control.step()
    return costs


class BlockedClient(FakeClient):
    """A daemon that has stopped answering, and no deadline on our side."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SystemClock(), **options)
        self.is_released = threading.Event()

    def match(self, *args: Any, **kwargs: Any) -> Any:
        self.is_released.wait(30)
        return super().match(*args, **kwargs)

    acquire = reserve = commit = match


def test_hooks_return_while_every_call_to_the_daemon_blocks(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    client = BlockedClient(slot_count=64, shard_bytes=16)
    core = SchedulerConnector(
        client,
        rig.spec,
        settings=ConnectorSettings(onboard_wait_seconds=0.05),
        control=ControlThread(background_max=64, waiting_max=1),
    )
    rig.side.begin(core, SimpleNamespace(connected=True, close=lambda: None), rig.spec)
    try:
        request = rig.add("r", prompt_of(100))
        start = time.monotonic()
        while not request.is_finished():
            began = time.monotonic()
            rig.step()
            assert time.monotonic() - began < 0.05
            time.sleep(0.001)
        assert time.monotonic() - start < 2.0
    finally:
        client.is_released.set()


def test_scheduler_side_asks_nothing_before_it_has_met_a_worker(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    side = SchedulerSide(
        rig.config, SimpleNamespace(kv_cache_groups=rig_groups(), num_blocks=8), parse_options({})
    )
    request = request_of(0)
    side.on_new_request(request)
    assert side.get_matched_tokens(request, 0) == (0, False)
    side.on_finished(request, ())
    assert not side.has_work
    assert side.take_stats() is None


def rig_groups() -> list[Any]:
    return [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS))]
