"""A live daemon's decisions under load are made again from its recording, by another process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from kvtier.recording.replaying import recorded_batches
from tests.support import known_blocks
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.four_tiers import four_tier_options, wait_four_tiers
from tests.support.hot_restart import TAKEN_OVER, kept_daemon, running_holder
from tests.support.mixed_load import LoadPlan, MixedLoad
from tests.support.nvme_daemon import wait_metric

EVENTS_MIN = rounds(short=1500, full=100_000)
SECONDS_MAX = rounds(short=20, full=1200)
LIFE_EVENTS, LIFE_SECONDS = 5000, 100


def _leave_and_come(client: Client, namespace: Namespace, seed: int, ends: threading.Event) -> None:
    """Short leases and reservations that come to nothing, as fast as they go."""
    hashes = known_blocks.chain_hashes(f"{seed}:1", 8)
    while not ends.is_set():
        try:
            client.release([client.acquire(namespace, hashes)])
            given = client.reserve(namespace, 2)
            client.abort(namespace, given.slots, session=given.session)
        except KVTierError:
            time.sleep(0.01)


def _load(
    daemon: RunningDaemon, seconds_max: float, events_min: int, *, clears: bool = True
) -> float:
    """Until there are events enough; the seconds that took."""
    ends, began = threading.Event(), time.monotonic()
    clients = [Client(daemon.socket) for _ in range(4)]
    threads = []
    for seed, client in enumerate(clients):
        namespace = client.open_namespace(known_blocks.spec_of())
        load = MixedLoad(client, namespace, LoadPlan(seed, 0.0, [0, 1], clears), lambda **_: None)
        args: tuple[object, ...] = (client, namespace, seed, ends)
        work = threading.Thread(target=load.run, args=(ends,))
        if seed >= 2:
            work = threading.Thread(target=_leave_and_come, args=args)
        work.start()
        threads.append(work)
    while _event_count(daemon) < events_min and time.monotonic() - began < seconds_max:
        time.sleep(0.4)
    ends.set()
    for work in threads:
        work.join()
    for client in clients:
        client.close()
    return time.monotonic() - began


def replayed(first: Path) -> dict[str, Any]:
    """By another process; every decision is the same."""
    command = [sys.executable, "-m", "kvtier.cli.main", "replay", "--json", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["difference"] is None
    assert found["wrong"] == []
    return found


def events_of(first: Path) -> set[str]:
    """Names of the kinds of events in a recording."""
    return {
        type(one.event).__name__
        for _, batch in recorded_batches(first)
        for one in (batch.events if batch is not None else ())
    }


def _event_count(daemon: RunningDaemon) -> float:
    """Slices that the core has worked off."""
    found = daemon.metrics()
    return next(value for name, value in found.items() if name.startswith(SLICES))


SLICES = "kvtier_core_slice_seconds_count"


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(rounds(short=120, full=2400))
def test_a_live_daemon_under_load_decides_the_same_again(tmp_path: Path) -> None:
    options = {
        "recorder.folder": str(tmp_path / "rec"),
        "dram.policy": "curves",
        "nvme.paths": str(tmp_path / "pool"),
        "nvme.bytes": "512MiB",
    }
    with running_daemon(dram_bytes="8MiB", slab_bytes="2MiB", options=options) as daemon:
        seconds = _load(daemon, SECONDS_MAX, EVENTS_MIN)
        (whole, *_) = json.loads(daemon.http("/advice.json"))["curves"]
        assert whole["samples"] > 0
        assert whole["points"], "nothing was asked for twice"
        daemon.terminate()
    (first,) = (tmp_path / "rec").glob("*-000000.kvrec")
    found = replayed(first)
    assert found["events"] >= EVENTS_MIN
    state_finding(
        f"recorder: {found['events']:,} events of {seconds:.0f} s were replayed alike in "
        f"{found['replay_seconds']:.0f} s"
    )


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.timeout(900)
def test_with_all_tiers_and_across_a_hot_restart_each_life_decides_the_same_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "rec"
    options = four_tier_options(tmp_path, cxl_bytes=16 << 20, nvme_bytes=32 << 20)
    options |= {
        "recorder.folder": str(folder),
        "dram.policy": "curves",
        "remote.write_bytes_per_hour": "1GiB",
    }
    with (
        running_holder() as holder,
        kept_daemon(holder, options, dram_bytes="8MiB", slab_bytes="2MiB") as daemon,
    ):
        lives = []
        for _ in range(2):
            wait_four_tiers(daemon)
            _load(daemon, LIFE_SECONDS, LIFE_EVENTS, clears=False)
            for tier in ("dram", "cxl", "nvme", "remote"):
                wait_metric(daemon, f'kvtier_tier_blocks{{tier="{tier}"}}', 1)
            daemon.terminate()
            lives.append(set(folder.glob("*-000000.kvrec")))
            if len(lives) == 1:
                daemon.start()
        assert TAKEN_OVER in daemon.log_text
    (first,), (second,) = lives[0], lives[1] - lives[0]
    counts = [replayed(one)["events"] for one in (first, second)]
    assert {"Demoted", "LowerOpened"} <= events_of(first) & events_of(second)
    assert {"SlabsAdopted", "BlocksAdopted", "AdoptionEnded"} <= events_of(second)
    state_finding(f"recorder: two lives with four tiers, {counts} events, were replayed alike")
