"""Whatever happens to what is kept, or to who keeps it: right bytes or a miss, and a daemon that
starts. What engines read is right for its hash, or the test fails."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.client import Client
from kvtier.io.memory import create_memfd
from kvtier.server.holder import close_all
from kvtier.server.inventory import HALF_BYTES
from kvtier.server.keeping import INVENTORY, TABLE, TRIES_MAX
from kvtier.server.parking import HolderParking
from kvtier.types import Role
from tests.support.daemon import DaemonFailed, RunningDaemon, running_daemon
from tests.support.hot_restart import (
    COUNT,
    OPTIONS,
    PATIENT,
    TAKEN_OVER,
    check,
    end,
    kept_daemon,
    kill,
    matched,
    running_holder,
    wait_mapped,
    wait_matched,
)
from tests.support.known_blocks import chain_hashes
from tests.support.kv_subscriber import Subscriber
from tests.support.nvme_daemon import make_pool, wait_state
from tests.support.parking_places import HolderProcess
from tests.support.processes import Engine, Engines, engine_processes, eventually

pytestmark = [pytest.mark.slow, pytest.mark.torture, pytest.mark.timeout(600)]

CHAINS = [f"chain {number}" for number in range(4)]


@pytest.fixture
def holder() -> Iterator[HolderProcess]:
    with running_holder() as holder:
        yield holder


@pytest.fixture
def engines() -> Iterator[Engines]:
    with engine_processes() as engines:
        yield engines


def fill(engine: Engine) -> None:
    for label in CHAINS:
        assert engine.ask("offload", label=label, count=COUNT)["count"] == COUNT


def read(engine: Engine) -> int:
    """How many blocks of all chains were hits, each with its right bytes."""
    wait_mapped(engine)
    return sum(int(engine.ask("onboard", label=label, count=COUNT)["count"]) for label in CHAINS)


def wait_read(engine: Engine, count: int) -> None:
    eventually(lambda: read(engine) == count, f"{count} blocks are hits")


def check_goes_on(daemon: RunningDaemon, engine: Engine) -> None:
    """It keeps what it is given now, over one more restart too."""
    wait_mapped(engine)
    assert engine.ask("offload", label="afterwards", count=COUNT)["count"] == COUNT
    assert engine.ask("onboard", label="afterwards", count=COUNT)["count"] == COUNT
    check(daemon)


def begin_start(daemon: RunningDaemon) -> subprocess.Popen[bytes]:
    """A start that nobody waits for."""
    with (daemon.directory / "daemon.log").open("a") as log:
        return subprocess.Popen(daemon.command(), stdout=subprocess.DEVNULL, stderr=log)


def kill_in_start(daemon: RunningDaemon, seconds: float) -> None:
    """kill -9 of a life that is `seconds` old."""
    process = begin_start(daemon)
    try:
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kill_count", [TRIES_MAX - 1, 2 * TRIES_MAX])
def test_lives_that_are_killed_while_they_take_over_cost_nothing_but_their_number(
    holder: HolderProcess, engines: Engines, kill_count: int
) -> None:
    """Too many of them in a row, and memory is let go of."""
    chance = random.Random(kill_count)
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        daemon.start()
        seconds = daemon.start_seconds
        daemon.kill()
        for _ in range(kill_count - 1):  # The one just killed was one of them.
            kill_in_start(daemon, chance.uniform(0.5, 1.1) * seconds)
        daemon.start()
        if kill_count < TRIES_MAX:
            wait_read(engine, len(CHAINS) * COUNT)
        else:  # Some may have been too young to have begun.
            assert read(engine) in (0, len(CHAINS) * COUNT)
        check_goes_on(daemon, engine)


def kill_holder(holder: HolderProcess) -> None:
    holder.end(signal.SIGKILL)


def stop_holder(holder: HolderProcess) -> None:
    """It hangs until the end of the test."""
    holder.process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("harm", [kill_holder, stop_holder])
def test_a_holder_that_ends_or_hangs_while_a_daemon_starts_costs_blocks_at_worst(
    holder: HolderProcess, engines: Engines, harm: Callable[[HolderProcess], None], part: float
) -> None:
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        trouble = threading.Timer(part * daemon.start_seconds, harm, [holder])
        trouble.start()
        daemon.start()
        trouble.join()
        assert read(engine) <= len(CHAINS) * COUNT
        check_goes_on(daemon, engine)
        daemon.restart()
        assert "memory will not outlive this daemon" in daemon.log_text
        wait_mapped(engine)
        assert read(engine) == 0
        check_goes_on(daemon, engine)


def test_both_killed_at_once_cost_all_blocks_and_nothing_else(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        holder.end(signal.SIGKILL)
        second = HolderProcess(holder.path)
        try:
            daemon.start()
            assert read(engine) == 0
            check_goes_on(daemon, engine)
            daemon.restart()
            wait_matched(daemon, "afterwards")
        finally:
            second.end(signal.SIGKILL)


# ------------------------------------------------------------------------------- what was kept


def garble(fd: int, length: int, chance: random.Random, count: int = 64) -> None:
    for _ in range(count):
        os.pwrite(fd, chance.randbytes(16), chance.randrange(max(1, length)))


def garbled_inventory(kept: dict[str, int], place: HolderParking) -> None:
    for half in range(2):
        os.pwrite(kept[INVENTORY], b"garbled", half * HALF_BYTES + 40)


def older_inventory(kept: dict[str, int], place: HolderParking) -> None:
    """Only one half: as after a kill in the middle of writing."""
    os.pwrite(kept[INVENTORY], b"garbled", 40)


def empty_inventory(kept: dict[str, int], place: HolderParking) -> None:
    fd = create_memfd("empty", 0)
    place.park(INVENTORY, fd)
    os.close(fd)


def pipe_as_inventory(kept: dict[str, int], place: HolderParking) -> None:
    ends = os.pipe()
    place.park(INVENTORY, ends[0])
    for fd in ends:
        os.close(fd)


def no_inventory(kept: dict[str, int], place: HolderParking) -> None:
    place.unpark(INVENTORY)


def no_table(kept: dict[str, int], place: HolderParking) -> None:
    place.unpark(TABLE)


def short_table(kept: dict[str, int], place: HolderParking) -> None:
    fd = create_memfd("short", 4096 + 128)
    place.park(TABLE, fd)
    os.close(fd)


def empty_table(kept: dict[str, int], place: HolderParking) -> None:
    fd = create_memfd("empty", 0)
    place.park(TABLE, fd)
    os.close(fd)


def garbled_table(kept: dict[str, int], place: HolderParking) -> None:
    garble(kept[TABLE], 128 * len(CHAINS) * COUNT, random.Random(1))


def _a_slab(kept: dict[str, int]) -> str:
    return next(name for name in kept if name.startswith("slab-"))


def short_slab(kept: dict[str, int], place: HolderParking) -> None:
    fd = create_memfd("short", 2 << 20)
    place.park(_a_slab(kept), fd)
    os.close(fd)


def long_slab(kept: dict[str, int], place: HolderParking) -> None:
    fd = create_memfd("long", 64 << 20)
    place.park(_a_slab(kept), fd)
    os.close(fd)


def no_slab(kept: dict[str, int], place: HolderParking) -> None:
    place.unpark(_a_slab(kept))


ALL = len(CHAINS) * COUNT
HARMS: Mapping[Callable[[dict[str, int], HolderParking], None], tuple[int, int, str]] = {
    garbled_inventory: (0, 0, "the inventory is torn, or none"),
    older_inventory: (0, ALL, ""),  # The half before may have named no set yet.
    empty_inventory: (0, 0, "the inventory is torn, or none"),
    pipe_as_inventory: (0, 0, "the inventory cannot be read"),
    no_inventory: (0, 0, "there is no inventory of it"),
    no_table: (0, 0, "its slot table is missing"),
    short_table: (0, 0, "its slot table has 4224 bytes"),
    empty_table: (0, 0, "its slot table has 0 bytes"),
    garbled_table: (0, ALL - 1, TAKEN_OVER),
    short_slab: (0, 0, "its slots lie in another way"),
    long_slab: (0, 0, "its slots lie in another way"),
    no_slab: (0, 0, "one of its slabs is missing"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_was_kept_and_is_not_right_is_a_miss_and_told_in_the_log(
    holder: HolderProcess,
    engines: Engines,
    harm: Callable[[dict[str, int], HolderParking], None],
) -> None:
    hits_min, hits_max, line = HARMS[harm]
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        place = HolderParking(holder.path)
        kept = place.take_all()
        harm(kept, place)
        place.close()
        close_all(list(kept.values()))
        daemon.start()
        eventually(lambda: line in daemon.log_text, line)
        assert hits_min <= read(engine) <= hits_max
        check_goes_on(daemon, engine)
        daemon.restart()
        wait_matched(daemon, "afterwards")


def test_what_is_announced_after_a_restart_is_what_can_be_fetched(
    holder: HolderProcess, engines: Engines
) -> None:
    folder = holder.path.parent
    binds = (f"ipc://{folder}/events", f"ipc://{folder}/replay")
    options = {"kv_events.bind": binds[0], "kv_events.replay_bind": binds[1]}
    with kept_daemon(holder, options) as daemon:
        fill(engines.start(daemon.socket))
        daemon.kill()
        place = HolderParking(holder.path)
        kept = place.take_all()
        garble(kept[TABLE], 128 * ALL, random.Random(2), count=12)
        place.close()
        close_all(list(kept.values()))
        daemon.start()
        eventually(lambda: TAKEN_OVER in daemon.log_text, "it is read")
        with Client(daemon.socket, role=Role.TOOL, settings=PATIENT) as client:
            counts = {label: matched(client, label) for label in CHAINS}
        fetched = {one for label, count in counts.items() for one in chain_hashes(label, count)}
        assert 0 < len(fetched) < ALL
        with Subscriber(*binds) as reader:

            def are_the_same() -> bool:
                reader.next_of.clear()
                reader.ask_replay(0)
                return reader.books["CPU", "LOCAL"] == fetched

            eventually(are_the_same, "what is announced is what is there")


# ------------------------------------------------------------------------------ two, or another


def test_a_second_daemon_gets_nothing_of_what_the_first_one_owns(
    holder: HolderProcess, engines: Engines
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        rival = RunningDaemon(folder, {**OPTIONS, "restart.holder": str(holder.path)})
        rival.set_option("dram.bytes", "64MiB")
        rival.set_option("dram.slab_bytes", "16MiB")
        rival.set_option("admin.address", "off")
        starts = [threading.Thread(target=one.start) for one in (daemon, rival)]
        for one in starts:
            one.start()
        for one in starts:
            one.join()
        logs = [daemon.log_text, rival.log_text]
        refusal = "another daemon's connection owns the set"
        assert sum(refusal in text.rpartition(TAKEN_OVER)[0] + text for text in logs) == 1
        found = read(engine)
        assert found in (0, ALL)
        assert (found == ALL) == (refusal in rival.log_text)
        check_goes_on(daemon, engine)
        rival.kill()
    shutil.rmtree(folder)


def test_a_second_daemon_on_the_same_state_is_refused_and_costs_nothing(
    holder: HolderProcess, engines: Engines
) -> None:
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.restart()
        twin = RunningDaemon(daemon.directory, {})
        twin.state_dir = daemon.state_dir
        twin.set_option("restart.holder", str(holder.path))
        with pytest.raises(DaemonFailed):
            twin.start()
        wait_read(engine, ALL)
        daemon.restart()
        wait_read(engine, ALL)
        check(daemon)


@pytest.mark.parametrize("ending", [kill, end])
@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"dram.bytes": "16MiB"}, None),
        ({"dram.bytes": "128MiB"}, ALL),
        ({"dram.slab_bytes": "8MiB"}, 0),
        ({"lease.seconds_max": "2"}, ALL),
        ({"restart.keep": "off"}, 0),
    ],
)
def test_another_configuration_keeps_what_fits_and_misses_the_rest(
    holder: HolderProcess,
    engines: Engines,
    changes: Mapping[str, str],
    count: int | None,
    ending: Callable[[RunningDaemon], None],
) -> None:
    with kept_daemon(holder, dram_bytes="32MiB", slab_bytes="16MiB") as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        engine.ask("fill", label="both sets", count=128)
        ending(daemon)
        for name, value in changes.items():
            daemon.set_option(name, value)
        daemon.start()
        if count is None:
            assert "the budget is smaller now" in daemon.log_text
            eventually(lambda: TAKEN_OVER in daemon.log_text, "it is read")
            assert read(engine) <= ALL
        else:
            wait_read(engine, count)
        time.sleep(1.5)  # Leases of the former life, and of a longer one.
        wait_mapped(engine)
        eventually(
            lambda: engine.ask("offload", label="afterwards", count=COUNT)["count"] == COUNT,
            "there is room again",
        )
        assert engine.ask("onboard", label="afterwards", count=COUNT)["count"] == COUNT
        check(daemon)


def test_a_tier_that_comes_or_goes_lays_slots_in_another_way_or_keeps_all(
    holder: HolderProcess, engines: Engines, tmp_path: Path
) -> None:
    """Blocks of whole pages lie alike with and without NVMe."""
    make_pool(tmp_path / "pool", pool_bytes=32 << 20)
    with kept_daemon(holder) as daemon:
        engine = engines.start(daemon.socket)
        fill(engine)
        daemon.kill()
        daemon.set_option("nvme.paths", str(tmp_path / "pool"))
        daemon.start()
        wait_state(daemon, "on")
        wait_read(engine, ALL)
        daemon.kill()
        daemon.set_option("nvme.paths", "")
        daemon.start()
        wait_read(engine, ALL)
        check_goes_on(daemon, engine)


def test_a_daemon_without_a_holder_says_so_and_goes_on(engines: Engines) -> None:
    options = {**OPTIONS, "restart.holder": "/nowhere/holder.sock"}
    with running_daemon(options=options) as daemon:
        assert "memory will not outlive this daemon" in daemon.log_text
        assert "no holder answers at /nowhere/holder.sock" in daemon.log_text
        check_goes_on(daemon, engines.start(daemon.socket))
