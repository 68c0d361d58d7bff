"""The connector with the real client and daemon: bytes through the arenas, and law 2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.connector import StepOutcome
from tests.support.connector_rig import numbered_chain
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engine_half import SHARD_BYTES, WAIT_SECONDS, EngineHalf, start_engine

MakeEngine = Callable[..., EngineHalf]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="64MiB", slab_bytes="16MiB") as running:
        yield running


@pytest.fixture
def make_engine(daemon: RunningDaemon) -> Iterator[MakeEngine]:
    made: list[EngineHalf] = []

    def make(*, weights: str = "v1", shard_count: int = 1, on_gpu: bool = False) -> EngineHalf:
        made.append(
            start_engine(daemon.socket, weights=weights, shard_count=shard_count, on_gpu=on_gpu)
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "fake GPU"])
@pytest.mark.parametrize("shard_count", [1, 2])
def test_second_engine_onboards_the_bytes_of_the_first(
    make_engine: MakeEngine, shard_count: int, on_gpu: bool
) -> None:
    chain = numbered_chain(40)
    first = make_engine(shard_count=shard_count, on_gpu=on_gpu)
    first.fill(len(chain), seed=1)
    first.offload("a", chain)
    second = make_engine(shard_count=shard_count, on_gpu=on_gpu)
    assert second.onboard("b", chain) == StepOutcome(onboarded=("b",))
    for mine, theirs in zip(second.copiers, first.copiers, strict=True):
        assert np.array_equal(mine.blocks[: len(chain)], theirs.blocks[: len(chain)])
    assert second.scheduler.stats().onboarded_bytes == len(chain) * SHARD_BYTES * shard_count


def test_other_weights_never_match(make_engine: MakeEngine) -> None:
    chain = numbered_chain(4)
    first = make_engine()
    first.fill(len(chain), seed=2)
    first.offload("a", chain)
    other = make_engine(weights="v2")
    other.scheduler.on_new_request("b", chain)
    answer = other.scheduler.get_onboard_count("b", 0)
    while answer is None:  # Ends with the connector's own deadline.
        other.step()
        answer = other.scheduler.get_onboard_count("b", 0)
    assert answer == 0


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "fake GPU"])
def test_killed_daemon_costs_no_hook_any_time_and_comes_back(
    make_engine: MakeEngine, daemon: RunningDaemon, on_gpu: bool
) -> None:
    chain = numbered_chain(20)
    engine = make_engine(on_gpu=on_gpu)
    engine.fill(len(chain), seed=3)
    engine.offload("a", chain)
    daemon.kill()
    slowest = 0.0
    for index in range(50):
        start = time.monotonic()
        engine.scheduler.on_new_request(f"r{index}", chain)
        engine.scheduler.get_onboard_count(f"r{index}", 0)
        engine.scheduler.on_blocks_full(f"r{index}", chain, list(range(20)))
        engine.step()
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.002)
    assert slowest < 0.07, "a hook waited for a daemon that is not there"
    for index in range(50):
        engine.scheduler.request_finished(f"r{index}")
    daemon.start()
    for client in engine.clients:
        assert client.wait_connected(WAIT_SECONDS)
    engine.wait(lambda: engine.scheduler.stock_count > 0)
    engine.offload("again", chain)
    want = engine.copiers[0].blocks[:20].copy()
    engine.copiers[0].blocks[:] = 0
    assert engine.onboard("c", chain) == StepOutcome(onboarded=("c",))
    assert np.array_equal(engine.copiers[0].blocks[:20], want)


def test_hung_daemon_turns_into_a_miss_by_the_deadline(
    make_engine: MakeEngine, daemon: RunningDaemon
) -> None:
    chain = numbered_chain(8)
    engine = make_engine()
    engine.fill(len(chain), seed=4)
    engine.offload("a", chain)
    daemon.stop()
    try:
        begun, answer = time.monotonic(), None
        engine.scheduler.on_new_request("b", chain)
        slowest = time.monotonic() - begun
        while answer is None:
            start = time.monotonic()
            answer = engine.scheduler.get_onboard_count("b", 0)
            engine.step()
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.001)
        assert answer == 0
        assert time.monotonic() - begun < 5.0 + 1.0
        assert slowest < 0.07, "a hook waited for a daemon that hangs"
    finally:
        daemon.resume()
    engine.scheduler.request_finished("b")
    assert engine.wait(lambda: engine.clients[0].connected) is not None
    engine.wait(lambda: engine.scheduler.stock_count > 0)
    assert engine.onboard("c", chain) == StepOutcome(onboarded=("c",))
