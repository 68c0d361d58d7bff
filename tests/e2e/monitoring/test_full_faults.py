"""The alerts that take longer, or a daemon of their own, fire for real faults as well."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.types import Worth
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, offload, onboard, spec_of
from tests.support.nvme_daemon import make_pool, wait_metric, wait_state
from tests.support.processes import eventually
from tests.support.prometheus_server import PrometheusServer, needs_prometheus, scraping
from tests.support.raw_client import RawCalls, open_session, wait_reserved

pytestmark = [pytest.mark.torture, needs_prometheus]
PATIENT = ClientSettings(timeout_seconds=10.0)


@contextmanager
def watched(
    folder: Path,
    options: Mapping[str, str] | None = None,
    *,
    dram_bytes: str = "16MiB",
    program: Sequence[str] | None = None,
) -> Iterator[tuple[RunningDaemon, PrometheusServer]]:
    with running_daemon(
        dram_bytes=dram_bytes, slab_bytes="2MiB", options=options, program=program
    ) as daemon:
        daemon.wait_populated()
        with scraping(folder / "prometheus", daemon.ready["admin"]) as prometheus:
            yield daemon, prometheus


@contextmanager
def connected(daemon: RunningDaemon) -> Iterator[tuple[Client, object]]:
    with Client(daemon.socket, settings=PATIENT) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_namespace(namespace, 20)
        yield client, namespace


def test_cxl_memory_that_is_not_to_be_had_is_told_of(tmp_path: Path) -> None:
    """The kernel refuses every slab of the tier; the daemon goes on without it."""
    options = {"cxl.emulate": "4GB/s,400ns", "cxl.bytes": "128MiB", "cxl.slab_bytes": "64MiB"}
    serve = [sys.executable, "-m", "kvtier.cli.main", "serve"]
    limited = ["prlimit", f"--fsize={32 << 20}", *serve]
    with (
        watched(tmp_path, options, program=limited) as (daemon, prometheus),
        connected(daemon) as (client, namespace),
    ):
        prometheus.wait_firing("KvtierCxlOff", 30.0)
        assert "the cxl tier is off: it has no memory" in daemon.log_text
        assert offload(client, namespace, chain_hashes("without", 2)) == 2


def test_bytes_scribbled_over_are_told_of(tmp_path: Path) -> None:
    with watched(tmp_path) as (daemon, prometheus), connected(daemon) as (client, namespace):
        hashes = chain_hashes("scribbled", 2)
        offload(client, namespace, hashes)
        wait_metric(daemon, "kvtier_checksummed_blocks_total", 2)
        # Two scrapes: an increase is seen between two of them.
        eventually(lambda: bool(prometheus.query("kvtier_corrupt_blocks_total")), "a scrape")
        lease = client.acquire(namespace, hashes)
        client.arena(namespace).view(int(lease.slots[0]), lease.session)[100] ^= 1
        client.release([lease])
        assert client.get(namespace, hashes) == []
        prometheus.wait_firing("KvtierCorruptBlocks")


def test_slots_of_a_session_that_is_gone_are_told_of(tmp_path: Path) -> None:
    with watched(tmp_path) as (daemon, prometheus):
        session = open_session(daemon.socket)
        opened = session.open_namespace()
        session.map_slab()
        with RawCalls(daemon.grpc_address) as stub:
            wait_reserved(stub, session.token, opened.namespace_id, 2)
        session.close()  # And its process, which is this one, lives on.
        prometheus.wait_firing("KvtierSlotsWithheld")


def test_lease_that_is_kept_is_told_of(tmp_path: Path) -> None:
    with watched(tmp_path) as (daemon, prometheus), connected(daemon) as (client, namespace):
        hashes = chain_hashes("kept", 2)
        offload(client, namespace, hashes)
        client.acquire(namespace, hashes, lease_seconds=59.0)
        prometheus.wait_firing("KvtierLeaseOld", 45.0)


def test_limit_that_is_reached_is_told_of(tmp_path: Path) -> None:
    with (
        watched(tmp_path, {"server.namespaces_max": "1"}) as (daemon, prometheus),
        connected(daemon),
    ):
        prometheus.wait_firing("KvtierLimitNear")


def test_daemon_that_is_held_up_is_told_of(tmp_path: Path) -> None:
    with watched(tmp_path) as (daemon, prometheus):
        ends = threading.Event()

        def hold_up() -> None:
            while not ends.wait(0.15):
                os.kill(daemon.process.pid, signal.SIGSTOP)
                time.sleep(0.3)
                os.kill(daemon.process.pid, signal.SIGCONT)

        thread = threading.Thread(target=hold_up)
        thread.start()
        try:
            prometheus.wait_firing("KvtierLoopLate")
        finally:
            ends.set()
            thread.join()


def test_onboards_that_cost_more_than_they_save_are_told_of(tmp_path: Path) -> None:
    with watched(tmp_path) as (daemon, prometheus), connected(daemon) as (client, namespace):
        hashes = chain_hashes("slow", 2)
        offload(client, namespace, hashes)

        def lose() -> bool:
            lease = client.acquire(namespace, hashes)
            client.release([lease], Worth(prefill_seconds=0.01, onboard_seconds=0.5))
            return "KvtierLosesTime" in prometheus.firing()

        eventually(lose, "KvtierLosesTime", step=0.1)


def test_memory_that_is_too_small_is_told_of(tmp_path: Path) -> None:
    with (
        watched(tmp_path, dram_bytes="4MiB") as (daemon, prometheus),
        connected(daemon) as (client, namespace),
    ):
        chains = [chain_hashes(f"round {n}", 8) for n in range(3 * (4 << 20) // SHARD_BYTES // 8)]

        def go_round() -> bool:
            for hashes in chains:
                if onboard(client, namespace, hashes) < len(hashes):
                    offload(client, namespace, hashes)
            return "KvtierTooSmall" in prometheus.firing()

        eventually(go_round, "KvtierTooSmall")


def test_disk_written_beyond_its_endurance_is_told_of(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool", pool_bytes=32 << 20)
    options = {
        "nvme.paths": str(tmp_path / "pool"),
        "nvme.write_bytes_per_hour": "1TiB",
        "nvme.endurance_bytes_per_day": "1MiB",
    }
    with watched(tmp_path, options) as (daemon, prometheus):
        wait_state(daemon, "on")
        with connected(daemon) as (client, namespace):
            hashes = chain_hashes("worn", 32)
            offload(client, namespace, hashes)
            onboard(client, namespace, hashes)
            prometheus.wait_firing("KvtierNvmeWear")


def test_disk_that_reports_errors_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fault"))
    make_pool(tmp_path / "pool", pool_bytes=32 << 20)
    options = {"nvme.paths": str(tmp_path / "pool"), "nvme.write_bytes_per_hour": "1TiB"}
    with watched(tmp_path, options, program=PROGRAM) as (daemon, prometheus):
        wait_state(daemon, "on")
        with connected(daemon) as (client, namespace):
            (tmp_path / "fault").write_text("eio")
            hashes = chain_hashes("lost", 8)
            offload(client, namespace, hashes)
            onboard(client, namespace, hashes)
            prometheus.wait_firing("KvtierNvmeDegraded")
