"""Hooks of an 8,192-block request (128 K tokens): typical time below the architecture's 50 µs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvtier.clock import SystemClock
from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.settings import ConnectorSettings
from tests.support.connector_rig import SHARD_BYTES, numbered_chain, spec_of
from tests.support.fake_client import FakeClient
from tests.support.stepped_control import SteppedControl

BLOCK_COUNT = 8192
HOOK_SECONDS_MAX = 50e-6
ROUND_COUNT = 60


def median_seconds(hook: Callable[[], object]) -> float:
    """CPU time of the calling thread, as others use the cores; nothing here waits."""
    times = []
    for _ in range(ROUND_COUNT):
        start = time.thread_time()
        hook()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def test_hooks_of_a_long_request_take_no_time_by_its_length() -> None:
    clock, control = SystemClock(), SteppedControl()
    client = FakeClient(clock, slot_count=BLOCK_COUNT + 1024, shard_bytes=SHARD_BYTES)
    settings = ConnectorSettings(onboard_wait_seconds=60.0, stock_blocks=512)
    connector = SchedulerConnector(
        client, spec_of(), settings=settings, clock=clock, control=control
    )
    chain = numbered_chain(BLOCK_COUNT)
    namespace = client.open_namespace(spec_of())
    for block_hash in chain:
        namespace.resident[block_hash] = client.free.pop()
    blocks = list(range(BLOCK_COUNT))
    costs = {}

    connector.on_new_request("long", chain)
    control.step()
    costs["ask"] = median_seconds(lambda: connector.get_onboard_count("long", 16))
    control.step()
    assert connector.get_onboard_count("long", 16) == BLOCK_COUNT - 16
    costs["promise"] = median_seconds(lambda: connector.get_onboard_count("long", 16))
    connector.on_blocks_full("long", chain, blocks)
    costs["no new block"] = median_seconds(lambda: connector.on_blocks_full("long", chain, blocks))

    def one_more() -> None:
        chain.append(len(chain).to_bytes(16, "big"))
        blocks.append(len(blocks))
        connector.on_blocks_full("long", chain, blocks)

    costs["one new block"] = median_seconds(one_more)
    costs["plan"] = median_seconds(connector.build_plan)
    costs["results"] = median_seconds(lambda: connector.on_results([]))
    slow = {name: cost for name, cost in costs.items() if cost > HOOK_SECONDS_MAX}
    assert not slow


def test_hooks_of_a_request_that_waits_take_no_longer() -> None:
    clock, control = SystemClock(), SteppedControl()
    client = FakeClient(clock, slot_count=BLOCK_COUNT + 1024, shard_bytes=SHARD_BYTES)
    settings = ConnectorSettings(
        nvme_bytes_per_second=1.0,
        nvme_wait_seconds_max=60.0,
        waiting_acquires_max=ROUND_COUNT,
        leased_blocks_max=ROUND_COUNT * BLOCK_COUNT,
    )
    connector = SchedulerConnector(
        client, spec_of(), settings=settings, clock=clock, control=control
    )
    chain = numbered_chain(BLOCK_COUNT)
    namespace = client.open_namespace(spec_of())
    for block_hash in chain:
        namespace.nvme[block_hash] = client.memory[:, 0]
    names = [f"r{index}" for index in range(ROUND_COUNT)]
    for name in names:
        connector.on_new_request(name, chain)
    control.step()
    connector.on_results([])  # Takes the answers of all matches in.
    costs = {}

    todo = iter(names)
    costs["ask"] = median_seconds(lambda: connector.get_onboard_count(next(todo), 0))
    assert control.waiting_count == ROUND_COUNT
    control.begin_waits()
    costs["wait"] = median_seconds(lambda: connector.get_onboard_count(names[0], 0))
    todo = iter(names)

    def one_answer() -> None:
        control.end_waits(1)
        assert connector.get_onboard_count(next(todo), 0) == BLOCK_COUNT

    costs["promise"] = median_seconds(one_answer)
    slow = {name: cost for name, cost in costs.items() if cost > HOOK_SECONDS_MAX}
    assert not slow
