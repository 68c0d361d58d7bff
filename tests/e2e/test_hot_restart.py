"""What is in memory outlives the daemon where a holder keeps it: killed, told to end, upgraded.

Engines are processes with real clients; what they read is right for its hash, or the test fails.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvtier.cli.main import main
from tests.support.daemon import RunningDaemon
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.four_tiers import four_tier_options
from tests.support.hot_restart import (
    COUNT,
    TAKEN_OVER,
    check,
    end,
    kept_daemon,
    kill,
    running_holder,
    wait_mapped,
    wait_matched,
)
from tests.support.known_blocks import SHARD_BYTES, chain_hashes
from tests.support.kv_subscriber import Subscriber
from tests.support.nvme_daemon import wait_metric, wait_state
from tests.support.other_build import NEXT_VERSION, make_next_build
from tests.support.parking_places import HolderProcess
from tests.support.processes import Engine, Engines, engine_processes, eventually

pytestmark = pytest.mark.slow
rare = pytest.mark.torture  # `make test` has eight seconds for all of this.

LOAD_SHARD_BYTES = 8 << 10
LOAD_BLOCKS = 60  # Of each engine, between two upgrades.
DEADLINE_SECONDS = 1.0
SLACK_SECONDS = 0.05
POOL_COUNT = (16 << 20) // SHARD_BYTES


@pytest.fixture
def holder() -> Iterator[HolderProcess]:
    with running_holder() as holder:
        yield holder


@pytest.fixture
def engines() -> Iterator[Engines]:
    with engine_processes() as engines:
        yield engines


def slab_addresses(engine: Engine) -> set[str]:
    """Where the engine's process has mapped slabs."""
    lines = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return {line.split("-")[0] for line in lines if "kvtier-slab" in line}


@pytest.mark.parametrize("ending", [kill, pytest.param(end, marks=rare)])
def test_blocks_outlive_the_daemon_and_an_engine_goes_on_with_them(
    holder: HolderProcess, engines: Engines, ending: Callable[[RunningDaemon], None]
) -> None:
    with kept_daemon(holder) as daemon:
        generation = daemon.ready["generation"]
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        before = engine.ask("session")["session"]
        mapped_at = slab_addresses(engine)
        ending(daemon)
        daemon.start()
        assert daemon.ready["generation"] == generation
        wait_matched(daemon, "a")
        wait_mapped(engine)
        after = engine.ask("session")["session"]
        assert after[0] == before[0]
        assert after[1] > before[1]
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == COUNT
        assert slab_addresses(engine) == mapped_at, "slabs were mapped anew"
        assert engine.ask("offload", label="b", count=COUNT)["count"] == COUNT
        check(daemon)


@rare
def test_slots_that_an_engine_was_filling_are_nobody_elses_until_it_is_dead(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder, dram_bytes="16MiB", slab_bytes="16MiB") as daemon:
        engine = engines.start(daemon.socket)
        given = engine.ask("reserve", count=4)
        engine.ask("begin_copy", slots=given["slots"], session=given["session"])
        engine.stop()
        daemon.restart()
        other = engines.start(daemon.socket)
        time.sleep(1.5)  # Longer than any lease.
        taken = other.ask("fill", label="b", count=POOL_COUNT)["slots"]
        assert set(range(POOL_COUNT)) - set(taken) == set(given["slots"])
        engine.kill()
        eventually(
            lambda: (
                set(other.ask("fill", label="c", count=POOL_COUNT)["slots"]) >= set(given["slots"])
            ),
            "the slots come back",
            5.0,
        )
        check(daemon)


@rare
@pytest.mark.parametrize("is_killed", [True, False])
def test_slots_come_back_of_a_process_that_died_meanwhile_and_of_one_that_is_quiet(
    holder: HolderProcess, engines: Engines, is_killed: bool
) -> None:
    with kept_daemon(holder, dram_bytes="16MiB") as daemon:
        engine = engines.start(daemon.socket)
        given = set(engine.ask("reserve", count=4)["slots"])
        daemon.kill()
        if is_killed:
            engine.kill()
        daemon.start()
        other = engines.start(daemon.socket)
        eventually(
            lambda: given <= set(other.ask("fill", label="b", count=POOL_COUNT)["slots"]),
            "the slots come back",
            5.0,
        )
        check(daemon)


def test_what_is_leased_by_an_engine_that_hangs_is_not_overwritten_until_its_deadline(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(
        holder, {"lease.seconds_max": "4"}, dram_bytes="16MiB", slab_bytes="16MiB"
    ) as daemon:
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        assert engine.ask("acquire", label="a", count=COUNT)["count"] == COUNT
        engine.stop()
        daemon.restart()
        ready_at = time.monotonic()
        other = engines.start(daemon.socket)
        wait_matched(daemon, "a")
        held = other.ask("fill", label="b", count=POOL_COUNT)["count"]
        assert time.monotonic() - ready_at < 4.0, "too slow to say anything"
        assert held == POOL_COUNT - COUNT
        wait_matched(daemon, "a")
        eventually(
            lambda: other.ask("offload", label="c", count=COUNT)["count"] == COUNT,
            "room once the lease must have ended",
            10.0,
        )
        check(daemon)


@rare
def test_a_holder_that_is_killed_costs_the_next_life_its_blocks_and_nothing_else(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder) as daemon:
        generation = daemon.ready["generation"]
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        holder.end(signal.SIGKILL)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == COUNT
        daemon.restart()
        assert daemon.ready["generation"] != generation
        assert "memory will not outlive this daemon" in daemon.log_text
        wait_mapped(engine)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == 0
        assert engine.ask("offload", label="a", count=COUNT)["count"] == COUNT
        check(daemon)


@rare
def test_a_lost_state_directory_voids_the_blocks_and_their_slots_come_back(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder, dram_bytes="16MiB", slab_bytes="16MiB") as daemon:
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        daemon.kill()
        shutil.rmtree(daemon.state_dir)
        daemon.start()
        wait_mapped(engine)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == 0
        assert engine.ask("offload", label="b", count=COUNT)["count"] == COUNT
        check(daemon)


@rare
def test_memory_that_lies_in_another_way_is_let_go_of(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder, dram_bytes="32MiB", slab_bytes="16MiB") as daemon:
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        daemon.kill()
        daemon.set_option("dram.slab_bytes", "8MiB")
        daemon.start()
        assert "slab set not taken over" in daemon.log_text
        wait_mapped(engine)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == 0
        assert engine.ask("offload", label="a", count=COUNT)["count"] == COUNT
        check(daemon)


@rare
def test_an_upgrade_keeps_the_blocks_and_a_way_back_loses_them_at_worst(
    holder: HolderProcess, engines: Engines, tmp_path: Path
) -> None:
    with kept_daemon(holder) as daemon:
        this_build, next_build = daemon.program, make_next_build(tmp_path)
        generation = daemon.ready["generation"]
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        daemon.program = next_build
        daemon.restart()
        assert daemon.ready["generation"] == generation
        wait_matched(daemon, "a")
        wait_mapped(engine)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == COUNT
        engine.ask("offload", label="b", count=COUNT)
        daemon.restart()  # The next build again, on its own table.
        wait_matched(daemon, "a")
        wait_matched(daemon, "b")
        check(daemon)
        daemon.program = this_build
        daemon.restart()
        assert daemon.ready["generation"] != generation
        assert f"its slot table has version {NEXT_VERSION}" in daemon.log_text
        wait_mapped(engine)
        assert engine.ask("onboard", label="a", count=COUNT)["count"] == 0
        assert engine.ask("offload", label="a", count=COUNT)["count"] == COUNT
        check(daemon)


def acked(engine: Engine) -> dict[str, int]:
    return {one["label"]: one["count"] for one in engine.of_kind("acked")}


@rare
def test_blocks_that_are_taken_over_are_announced_and_counted(
    holder: HolderProcess, engines: Engines
) -> None:
    folder = holder.path.parent
    options = {
        "kv_events.bind": f"ipc://{folder}/events",
        "kv_events.replay_bind": f"ipc://{folder}/replay",
    }
    with kept_daemon(holder, options) as daemon:
        engine = engines.start(daemon.socket)
        engine.ask("offload", label="a", count=COUNT)
        daemon.restart()
        wait_matched(daemon, "a")
        wanted = set(chain_hashes("a", COUNT))
        with Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay") as reader:

            def are_announced() -> bool:
                reader.next_of.clear()
                reader.ask_replay(0)
                return wanted <= reader.books["CPU", "LOCAL"]

            eventually(are_announced, "all blocks are announced", 5.0)
        samples = daemon.metrics()
        assert samples['kvtier_tier_blocks{tier="dram"}'] == COUNT
        check(daemon)


@rare
def test_with_all_four_tiers_memory_is_taken_over_and_the_others_join(
    holder: HolderProcess, engines: Engines, tmp_path: Path
) -> None:
    options = four_tier_options(
        tmp_path, cxl_bytes=16 << 20, nvme_bytes=32 << 20, remote_bytes=1 << 30
    )
    with kept_daemon(holder, options, dram_bytes="16MiB", slab_bytes="2MiB") as daemon:
        wait_state(daemon, "on")
        engine = engines.start(daemon.socket)
        labels = [f"chain {number}" for number in range(4)]
        for label in labels:
            assert engine.ask("offload", label=label, count=COUNT)["count"] == COUNT
            assert engine.ask("onboard", label=label, count=COUNT)["count"] == COUNT
        for tier in ("nvme", "remote"):
            wait_metric(daemon, f'kvtier_tier_blocks{{tier="{tier}"}}', 4 * COUNT)
        end(daemon)  # A kill may lose what the table on NVMe does not hold yet.
        daemon.start()
        wait_state(daemon, "on")
        for tier in ("dram", "nvme"):
            wait_metric(daemon, f'kvtier_tier_blocks{{tier="{tier}"}}', 4 * COUNT)
        wait_mapped(engine)
        for label in labels:
            assert engine.ask("onboard", label=label, count=COUNT)["count"] == COUNT
        check(daemon)


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The chains that have become longer."""
    return {label: count for label, count in now.items() if count > before.get(label, 0)}


def wait_load(busy: Sequence[Engine], ready: Sequence[Mapping[str, int]], count: int) -> None:
    """Until each engine has offloaded `count` blocks more than `ready` says."""
    eventually(
        lambda: all(
            sum(grown(had, acked(engine)).values()) >= count
            for had, engine in zip(ready, busy, strict=True)
        ),
        "a load",
        120.0,
    )


def upgrade(
    daemon: RunningDaemon, build: list[str], busy: Sequence[Engine]
) -> list[dict[str, int]]:
    """The next build, after a kill or in order by turns: five lives that are killed young would be
    taken for the memory's fault. What was READY, by the word of the daemon that was."""
    begun_count = daemon.log_text.count(TAKEN_OVER)
    daemon.program = build
    (end if begun_count % 2 else kill)(daemon)
    ready = [acked(engine) for engine in busy]
    daemon.start()
    eventually(lambda: daemon.log_text.count(TAKEN_OVER) > begun_count, "blocks are taken over")
    return ready


def longest_wait(busy: Sequence[Engine]) -> float:
    """In seconds; none was longer than its deadline, but for what this machine kept a thread."""
    waits = [engine.ask("longest") for engine in busy]
    for wait in waits:
        assert wait["seconds"] < DEADLINE_SECONDS + wait["jitter"] + SLACK_SECONDS, wait
    return max(wait["seconds"] for wait in waits)


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_upgrades_under_load_cost_no_hit_no_byte_and_no_deadline(
    holder: HolderProcess, engines: Engines, tmp_path: Path
) -> None:
    """Each build reads the table that the one before has left in another layout."""
    upgrade_count = rounds(short=1, full=10)
    dram_bytes = "512MiB" if is_torture() else "128MiB"
    with kept_daemon(holder, dram_bytes=dram_bytes, slab_bytes="32MiB") as daemon:
        options = {"timeout_seconds": DEADLINE_SECONDS, "shard_bytes": LOAD_SHARD_BYTES}
        busy = [engines.launch(daemon.socket, **options, watches_jitter=1) for _ in range(2)]
        reader = engines.launch(daemon.socket, shard_bytes=LOAD_SHARD_BYTES)
        for engine in (*busy, reader):
            engine.wait_started()
        load = {"chain_count": 4000, "pause_seconds": 0.002, "others": ["0", "1"]}
        for number, engine in enumerate(busy):
            engine.ask("churn", seed=number, **load)
        ready: list[dict[str, int]] = [{}, {}]
        asked = hit = 0
        for number in range(upgrade_count):
            build = make_next_build(tmp_path / f"{number}", NEXT_VERSION + number)
            wait_load(busy, ready, LOAD_BLOCKS)
            before, ready = ready, upgrade(daemon, build, busy)
            wait_mapped(reader)
            for had, now in zip(before, ready, strict=True):
                chains = grown(had, now)
                asked += sum(chains.values())
                hit += reader.ask("onboard_all", chains=chains)["count"]
        wait_load(busy, ready, 1)
        for engine in busy:
            engine.ask("end_churn")
            assert engine.of_kind("wrong") == []
        assert "is let go" not in daemon.log_text
        whole = {label: count for one in ready for label, count in one.items()}
        assert reader.ask("onboard_all", chains=whole)["count"] >= 0.99 * sum(whole.values())
        assert asked >= 2 * LOAD_BLOCKS * upgrade_count
        assert hit >= 0.99 * asked
        check(daemon)
        state_finding(
            f"{upgrade_count} upgrades: {hit} of {asked} blocks that were READY hit, each with "
            f"its right bytes; the longest call took {longest_wait(busy):.2f} of "
            f"{DEADLINE_SECONDS} s; READY after {daemon.start_seconds:.2f} s"
        )


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(1_000_000, marks=[rare, pytest.mark.timeout(600)])]
)
def test_how_soon_memory_is_there_again_is_measured(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "restart", "--resident", str(count), "--rounds", "1", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    state_finding(f"{count} blocks: READY after {told['ready_s']:.2f} s, all {told['all_s']:.2f} s")
    assert told["found_share"] == 1.0
    assert told["resident_blocks"] == count
    assert told["engine_blocks"] == 128
    assert 0 < told["ready_cpu_s"] < told["all_cpu_s"]
    assert told["ready_s"] < told["all_s"]
