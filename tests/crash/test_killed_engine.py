"""kill -9 of an engine that is offloading: nothing wrong, nothing lost that was acknowledged."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.known_blocks import chain_hashes
from tests.support.observer import Observer, observing
from tests.support.processes import Engine, engine_processes, need_pid_namespaces

# 4 slabs of 64 slots. A round's blocks are fewer than half of them, so that none of a round is
# evicted before it is read back; the rounds together fill the pool many times.
OPTIONS = {"lease.grace_seconds": "0.1"}
CHAINS_A_ROUND = 24
HITS_MIN_FULL = 1_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="32MiB", slab_bytes="8MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


def kill_in_mid_offload(engine: Engine, rng: random.Random) -> dict[str, int]:
    """Let it offload for a random time, kill it; chain -> blocks acknowledged by then."""
    seed = rng.randrange(1 << 60)
    engine.ask("churn", seed=seed, chain_count=CHAINS_A_ROUND, pause_seconds=0.002, others=[])
    time.sleep(rng.uniform(0.0, 0.5))
    engine.kill()
    assert engine.of_kind("wrong") == []
    acked: dict[str, int] = {f"{seed}:{n}": 0 for n in range(1, CHAINS_A_ROUND + 1)}
    for event in engine.of_kind("acked"):
        acked[event["label"]] = event["count"]
    return acked


def read_back(observer: Observer, acked: dict[str, int], rng: random.Random) -> int:
    """Read the whole of every chain, acknowledged or not; how many acknowledged blocks hit."""
    hits = 0
    for label, count in acked.items():
        found = observer.read(chain_hashes(label, 8))
        hits += min(count, found)
        if found and rng.random() < 0.1:
            assert observer.get_chain(label, found) == found
    return hits


@pytest.mark.full_form
@pytest.mark.timeout(3000)
def test_what_a_killed_engine_committed_is_right_and_stays(daemon: RunningDaemon) -> None:
    rng = random.Random(5)
    round_count = rounds(short=8, full=200)
    acked_count = hit_count = in_flight_rounds = 0
    with engine_processes() as engines, observing(daemon.socket) as observer:
        upcoming = engines.launch(daemon.socket)
        for number in range(round_count):
            engine = upcoming.wait_started()
            if number + 1 < round_count:
                upcoming = engines.launch(daemon.socket)  # Starts while this one is read back.
            acked = kill_in_mid_offload(engine, rng)
            taken = observer.dram()
            in_flight_rounds += bool(taken.reserved_count or taken.quarantined_count)
            hit_count += read_back(observer, acked, rng)
            acked_count += sum(acked.values())
            observer.wait_settled()
    state_finding(
        f"{round_count} rounds, {in_flight_rounds} killed with slots reserved; {acked_count} "
        f"blocks acknowledged, {hit_count} of them hits; {observer.hit_count} verified in all"
    )
    assert in_flight_rounds >= round_count // 4, "few rounds were killed in mid-offload"
    assert acked_count >= (HITS_MIN_FULL if is_torture() else 40)
    assert hit_count >= 0.95 * acked_count, f"{hit_count} hits of {acked_count} acknowledged"


def reserve_and_scribble(engine: Engine, count: int) -> list[int]:
    """The engine is in a copy that never ends; its slots."""
    given = engine.ask("reserve", count=count)
    engine.ask("begin_copy", slots=given["slots"], session=given["session"])
    return list(given["slots"])


@pytest.mark.full_form
def test_death_is_seen_across_a_pid_namespace(daemon: RunningDaemon) -> None:
    need_pid_namespaces()
    salt = "pid-namespace"
    with engine_processes() as engines, observing(daemon.socket, salt) as observer:
        for number in range(rounds(short=2, full=20)):
            engine = engines.start(daemon.socket, salt=salt, pid_namespace=True)
            assert engine.of_kind("started")[0]["pid"] == 1, "not in a PID namespace of its own"
            label = f"inside-{number}"
            assert engine.ask("offload", label=label, count=3)["count"] == 3
            slots = reserve_and_scribble(engine, 2)
            assert observer.dram().reserved_count == len(slots)
            engine.kill()
            observer.wait_settled()
            assert observer.read_chain(label, 3) == 3
