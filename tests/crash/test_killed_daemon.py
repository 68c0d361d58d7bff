"""kill -9 of the daemon while clients offload and onboard; they go on with the next one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import grpc
import pytest

from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.observer import Observer, observing
from tests.support.processes import Engine, engine_processes, eventually
from tests.support.raw_client import RawCalls

# 64 MiB: 512 slots, more than the clients fill in the life of one daemon of this test.
OPTIONS = {"lease.grace_seconds": "0.1"}
RESTARTED_CHAINS = 12


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="64MiB", slab_bytes="8MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


def acked_in(engines: list[Engine], generation: int) -> dict[str, int]:
    """Chain -> blocks that this life of the daemon acknowledged from the first one on."""
    found: dict[str, int] = {}
    for engine in engines:
        for event in engine.of_kind("acked"):
            if event["generation"] == generation:
                found[event["label"]] = event["count"]
    return found


def is_refused(address: str, token: bytes) -> bool:
    """Whether a token of a daemon's earlier life opens nothing."""
    with RawCalls(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Stats(pb.StatsRequest(token=token), timeout=10)
    return caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def kill_and_restart(daemon: RunningDaemon, observer: Observer, engines: list[Engine]) -> None:
    """Between two lives: what was held is refused, and everybody comes back by themselves."""
    held = [engine.ask("reserve", count=1) for engine in engines]
    state = observer.namespace.state
    assert state is not None
    daemon.restart()
    observer.wait_back()
    assert is_refused(daemon.grpc_address, state.token)
    generation = int(daemon.ready["generation"], 16)
    for engine, old in zip(engines, held, strict=True):
        assert old["session"][0] != generation
        eventually(lambda: _is_back(engine, generation), "the engine reconnected by itself")  # noqa: B023
        stale = engine.ask("use_stale", slots=old["slots"], session=old["session"])
        assert stale["errors"] == ["StaleSlot"] * 3


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_engines_go_on_with_the_restarted_daemon(daemon: RunningDaemon) -> None:
    rng = random.Random(6)
    acked_count = hit_count = 0
    with engine_processes() as started, observing(daemon.socket) as observer:
        launched = [started.launch(daemon.socket, timeout_seconds=2.0) for _ in range(2)]
        engines = [engine.wait_started() for engine in launched]
        for number in range(rounds(short=3, full=40)):
            seeds = [rng.randrange(1 << 40) for _ in engines]
            for engine, seed in zip(engines, seeds, strict=True):
                churn = {"seed": seed, "pause_seconds": 0.002, "others": seeds}
                engine.ask("churn", chain_count=10_000 if number % 2 else 40, **churn)
            time.sleep(rng.uniform(0.0, 0.4))
            kill_and_restart(daemon, observer, engines)
            generation = int(daemon.ready["generation"], 16)
            wanted = [len(acked_in([engine], generation)) + 3 for engine in engines]
            for engine, seed in zip(engines, seeds, strict=True):
                churn = {"seed": seed + 1, "pause_seconds": 0.0, "others": seeds}
                engine.ask("churn", chain_count=RESTARTED_CHAINS, **churn)
            for engine, count in zip(engines, wanted, strict=True):
                eventually(
                    lambda: len(acked_in([engine], generation)) >= count,  # noqa: B023
                    "the engine offloads to the restarted daemon",
                )
            for engine in engines:
                engine.ask("end_churn")
                assert engine.of_kind("wrong") == []
            acked = acked_in(engines, generation)
            acked_count += sum(acked.values())
            hit_count += sum(
                min(count, observer.read_chain(label, count)) for label, count in acked.items()
            )
            eventually(lambda: _is_settled(observer), "slots returned")
            observer.check()
    state_finding(f"{acked_count} blocks acknowledged after a restart, {hit_count} of them hits")
    assert acked_count >= 20
    assert hit_count >= 0.95 * acked_count, f"{hit_count} hits of {acked_count} acknowledged"


def _is_back(engine: Engine, generation: int) -> bool:
    found = engine.ask("session")
    ref = found["session"]
    return ref is not None and ref[0] == generation and found["mapped"] > 0


def _is_settled(observer: Observer) -> bool:
    tier = observer.dram()
    return tier.held_count == 0 and tier.quarantined_count == 0
