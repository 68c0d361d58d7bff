"""Device blocks kept for requests that are over, in an engine that has few of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.connector import ConnectorSettings, SchedulerConnector, WorkerConnector
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connector_api import EngineConnector
from kvtier.engine.device import open_device
from kvtier.engine.engine import Engine
from kvtier.engine.kv_cache import namespace_spec
from tests.support.clock import ManualClock
from tests.support.fake_client import FakeClient
from tests.support.stepped_control import SteppedControl, SteppedLane
from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

ONE_TOKEN = SamplingParams(tokens_max=1)
CONFIG = EngineConfig(block_tokens=4, device_block_count=12)
SHORT, LONG = prompt_of(30, seed=1), prompt_of(38, seed=2)  # 8 and 10 blocks: not both at once.


class DeafConnector(SchedulerConnector):
    """For an engine that does not say when it is short of device blocks."""

    def on_device_blocks_short(self, block_count: int) -> None:
        pass


@dataclass
class Bench:
    """An engine on the real connector, whose calls are answered only when a test says so."""

    engine: Engine
    client: FakeClient
    clock: ManualClock
    control: SteppedControl
    lane: SteppedLane
    scheduler: SchedulerConnector


def bench(connector: type[SchedulerConnector] = SchedulerConnector) -> Bench:
    model, clock, control, lane = tiny_model(), ManualClock(), SteppedControl(), SteppedLane()
    spec, device = namespace_spec(model, CONFIG), open_device(model, CONFIG)
    client = FakeClient(clock, slot_count=64, shard_bytes=spec.shard_bytes)
    settings = ConnectorSettings(
        stock_blocks=16, onboard_wait_seconds=0.0, raise_internal_errors=True,
        holds_preempted_blocks=True,
    )  # fmt: skip
    scheduler = connector(client, spec, settings=settings, clock=clock, control=control)
    blocks = device.make_blocks(settings)
    worker = WorkerConnector(client, spec, blocks, settings=settings, clock=clock, lane=lane)
    both = EngineConnector(scheduler, worker)

    def pause(_: float) -> None:
        clock.advance(0.01)
        lane.step()

    engine = Engine(model, CONFIG, both, device=device, clock=clock, pause=pause)
    return Bench(engine, client, clock, control, lane, scheduler)


def test_blocks_kept_for_planning_are_taken_back_before_anybody_waits() -> None:
    rig = bench()
    rig.engine.generate([SHORT], ONE_TOKEN)
    assert rig.engine.scheduler.tables.kept_count == 8
    before = rig.clock.now()
    result = rig.engine.generate([LONG], ONE_TOKEN)[0]
    assert result.token_ids == tokens_alone(LONG, ONE_TOKEN)
    assert rig.clock.now() == before
    assert rig.scheduler.stats().dropped_blocks["blocks_short"] == 7
    assert rig.engine.check_invariants() == []


def test_running_request_takes_them_back_instead_of_being_preempted() -> None:
    rig = bench()
    params = SamplingParams(tokens_max=12)
    prompt = prompt_of(10, seed=3)  # 3 blocks, and 6 in the end.
    rig.engine.add_request("grows", prompt, params)
    outputs = rig.engine.step()
    rig.engine.add_request("short", SHORT, ONE_TOKEN)
    for _ in range(20):
        outputs += rig.engine.step()
    assert rig.engine.unfinished_count == 0
    tokens = tuple(output.token_id for output in outputs if output.request_id == "grows")
    assert tokens == tokens_alone(prompt, params)
    assert rig.scheduler.stats().dropped_blocks["blocks_short"] == 7
    results = [output.result for output in outputs if output.request_id == "grows"]
    assert results[-1] is not None
    assert results[-1].preempted_count == 0


def test_engine_that_does_not_ask_goes_on_after_the_bound() -> None:
    rig = bench(DeafConnector)
    rig.engine.generate([SHORT], ONE_TOKEN)
    before = rig.clock.now()
    result = rig.engine.generate([LONG], ONE_TOKEN)[0]
    assert result.token_ids == tokens_alone(LONG, ONE_TOKEN)
    assert rig.clock.now() - before == pytest.approx(0.5, abs=0.05)
    assert rig.scheduler.stats().dropped_blocks["finish_deadline"] == 7
    assert rig.engine.check_invariants() == []


def test_short_request_is_offloaded_whole_once_the_answers_come() -> None:
    rig = bench()
    rig.engine.generate([SHORT], ONE_TOKEN)
    for _ in range(4):
        rig.control.step()
        rig.engine.step()
        rig.lane.step()
    assert rig.engine.wait_offloads(1.0)
    namespace = rig.client.open_namespace(namespace_spec(tiny_model(), CONFIG))
    assert len(namespace.resident) == 7
    assert rig.engine.scheduler.pool.free_count == CONFIG.device_block_count
