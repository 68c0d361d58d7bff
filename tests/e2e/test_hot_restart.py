"""What is in memory outlives the daemon where a holder keeps it: killed, told to end, upgraded.

Engines are processes with real clients; what they read is right for its hash, or the test fails.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvtier.client import Client
from kvtier.pools.remote.files import prepare_root
from kvtier.types import Role
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, spec_of
from tests.support.kv_subscriber import Subscriber
from tests.support.nvme_daemon import make_pool, wait_metric, wait_state
from tests.support.other_build import NEXT_VERSION, make_next_build
from tests.support.parking_places import HolderProcess
from tests.support.processes import Engine, Engines, engine_processes, eventually

pytestmark = pytest.mark.slow
rare = pytest.mark.torture  # `make test` has eight seconds for all of this.

# Waits of a test, not of a machine: leases of the former life end after a second.
OPTIONS = {"lease.seconds_max": "1", "lease.margin_seconds": "0.2", "lease.grace_seconds": "0.1"}
COUNT = 8
LOAD_SECONDS = 0.5
POOL_COUNT = (16 << 20) // SHARD_BYTES


@pytest.fixture
def holder() -> Iterator[HolderProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    holder = HolderProcess(folder / "holder.sock")
    yield holder
    if holder.process.poll() is None:
        holder.end()
    shutil.rmtree(folder)


@pytest.fixture
def engines() -> Iterator[Engines]:
    with engine_processes() as engines:
        yield engines


def kept_daemon(
    holder: HolderProcess,
    options: Mapping[str, str] | None = None,
    *,
    dram_bytes: str = "64MiB",
    slab_bytes: str = "16MiB",
) -> AbstractContextManager[RunningDaemon]:
    kept = {"restart.holder": str(holder.path)}
    return running_daemon(
        dram_bytes=dram_bytes,
        slab_bytes=slab_bytes,
        options={**OPTIONS, **(options or {}), **kept},
    )


def matched(client: Client, label: str) -> int:
    namespace = client.open_namespace(spec_of(""))
    assert client.wait_namespace(namespace, 10)
    return client.match(namespace, chain_hashes(label, COUNT)).matched_count


def wait_matched(daemon: RunningDaemon, label: str, count: int = COUNT) -> None:
    """They are taken in after READY."""
    with Client(daemon.socket, role=Role.TOOL) as client:
        eventually(lambda: matched(client, label) == count, f"{count} blocks of {label}", 5.0)


def wait_mapped(engine: Engine) -> None:
    """And its calls pass again."""

    def is_back() -> bool:
        found = engine.ask("session")
        return found["session"] is not None and found["mapped"] > 0

    eventually(is_back, "the engine maps slabs")


def slab_addresses(engine: Engine) -> set[str]:
    """Where the engine's process has mapped slabs."""
    lines = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return {line.split("-")[0] for line in lines if "kvtier-slab" in line}


def check(daemon: RunningDaemon) -> None:
    with Client(daemon.socket, role=Role.TOOL) as client:
        assert client.wait_connected(10)
        assert list(client.check().violations) == []


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()


def end(daemon: RunningDaemon) -> None:
    assert daemon.terminate() == 0


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
    make_pool(tmp_path / "pool", pool_bytes=32 << 20)
    prepare_root(tmp_path / "share")
    options = {
        "cxl.emulate": "4GB/s,400ns",
        "cxl.bytes": "16MiB",
        "cxl.slab_bytes": "2MiB",
        "nvme.paths": str(tmp_path / "pool"),
        "nvme.write_bytes_per_hour": "1TiB",
        "remote.engine": "files",
        "remote.path": str(tmp_path / "share"),
        "remote.capacity_bytes": "1GiB",
    }
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


@pytest.mark.full_form
@pytest.mark.parametrize("round_number", range(rounds(short=1, full=10)))
def test_engines_under_load_read_right_bytes_and_hit_what_was_ready(
    holder: HolderProcess, engines: Engines, round_number: int, tmp_path: Path
) -> None:
    """Even rounds are upgrades: the next daemon is of another build."""
    with kept_daemon(holder, dram_bytes="128MiB", slab_bytes="16MiB") as daemon:
        busy = [engines.start(daemon.socket, timeout_seconds=1.0) for _ in range(2)]
        for number, engine in enumerate(busy):
            engine.ask(
                "churn", seed=number, chain_count=400, pause_seconds=0.002, others=["0", "1"]
            )
        if round_number % 2 == 0:
            daemon.program = make_next_build(tmp_path)
        eventually(lambda: all(len(acked(engine)) > 10 for engine in busy), "a load")
        daemon.kill()
        ready = [acked(engine) for engine in busy]
        daemon.start()
        eventually(lambda: "memory of the former life taken over" in daemon.log_text, "the end")
        time.sleep(LOAD_SECONDS)
        for engine in busy:
            engine.ask("end_churn")
            assert engine.of_kind("wrong") == []
        with Client(daemon.socket, role=Role.TOOL) as client:
            namespace = client.open_namespace(spec_of(""))
            assert client.wait_namespace(namespace, 10)
            asked = hit = 0
            for labels in ready:
                for label, count in labels.items():
                    asked += count
                    hit += client.match(namespace, chain_hashes(label, count)).matched_count
        assert asked > 50
        assert hit >= 0.99 * asked
        check(daemon)
        state_finding(f"{hit} of {asked} blocks hit; READY after {daemon.start_seconds:.2f} s")
