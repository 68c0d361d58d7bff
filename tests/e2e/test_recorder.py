"""A live daemon's decisions under load are made again from its recording, by another process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from tests.support import known_blocks
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.mixed_load import LoadPlan, MixedLoad

EVENTS_MIN = rounds(short=1500, full=100_000)
SECONDS_MAX = rounds(short=20, full=1200)


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


def _load(daemon: RunningDaemon, seconds_max: float) -> float:
    """Until there are events enough; the seconds that took."""
    ends, began = threading.Event(), time.monotonic()
    clients = [Client(daemon.socket) for _ in range(4)]
    threads = []
    for seed, client in enumerate(clients):
        namespace = client.open_namespace(known_blocks.spec_of())
        load = MixedLoad(client, namespace, LoadPlan(seed, 0.0, [0, 1], True), lambda **_: None)
        args: tuple[object, ...] = (client, namespace, seed, ends)
        work = threading.Thread(target=load.run, args=(ends,))
        if seed >= 2:
            work = threading.Thread(target=_leave_and_come, args=args)
        work.start()
        threads.append(work)
    while _event_count(daemon) < EVENTS_MIN and time.monotonic() - began < seconds_max:
        time.sleep(0.4)
    ends.set()
    for work in threads:
        work.join()
    for client in clients:
        client.close()
    return time.monotonic() - began


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
        seconds = _load(daemon, SECONDS_MAX)
        (whole, *_) = json.loads(daemon.http("/advice.json"))["curves"]
        assert whole["samples"] > 0
        assert whole["points"], "nothing was asked for twice"
        daemon.terminate()
    (first,) = (tmp_path / "rec").glob("*-000000.kvrec")
    command = [sys.executable, "-m", "kvtier.cli.main", "replay", "--json", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["difference"] is None
    assert found["wrong"] == []
    assert found["events"] >= EVENTS_MIN
    state_finding(
        f"recorder: {found['events']:,} events of {seconds:.0f} s were replayed alike in "
        f"{found['replay_seconds']:.0f} s"
    )
