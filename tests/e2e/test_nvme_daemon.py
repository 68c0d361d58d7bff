"""NVMe in the daemon: blocks outlive it, come up when asked for, and a disk ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.types import Cut, TierName
from tests.e2e.client.conftest import eventually
from tests.support.daemon import DaemonFailed, RunningDaemon, running_daemon
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.known_blocks import (
    chain_hashes,
    check_payload,
    offload,
    onboard,
    read_leased,
    spec_of,
)
from tests.support.nvme_daemon import (
    client_of,
    got_count,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_metric,
    wait_state,
)

COUNT = 20
HIT = 'kvtier_hit_blocks_total{{call="{}",tier="nvme"}}'

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    make_pool(path)
    return path


def opened(client: Client, salt: str = "") -> Namespace:
    namespace = client.open_namespace(spec_of(salt))
    assert client.wait_namespace(namespace, 10)
    return namespace


def mapped(client: Client, salt: str = "") -> Namespace:
    namespace = opened(client, salt)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
    return namespace


def end_in_order(daemon: RunningDaemon) -> None:
    assert daemon.terminate() == 0


def end_at_once(daemon: RunningDaemon) -> None:
    daemon.kill()


@pytest.mark.parametrize("end", [end_in_order, end_at_once])
def test_blocks_outlive_the_daemon(pool: Path, end: Callable[[RunningDaemon], None]) -> None:
    hashes = chain_hashes("kept", COUNT)
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        end(daemon)
        daemon.start()
        wait_state(daemon, "on")
        assert daemon.metrics()["kvtier_nvme_recovered_blocks"] == COUNT
        with client_of(daemon) as client:
            namespace = opened(client)
            found = client.match(namespace, hashes)
            assert (found.matched_count, found.memory_count) == (COUNT, 0)
            assert got_count(client, namespace, hashes) == COUNT
            metrics = daemon.metrics()
            assert metrics[HIT.format("get")] == COUNT
            assert client.match(namespace, hashes).memory_count == COUNT
            assert not client.check().violations
            [_, nvme] = client.stats().tiers
            assert (nvme.tier, nvme.ready_count) == ("nvme", COUNT)


def test_acquire_that_waits_brings_blocks_up_and_one_that_does_not_is_cut(pool: Path) -> None:
    hashes = chain_hashes("awaited", COUNT)
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        daemon.restart()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = mapped(client)
            lease = client.acquire(namespace, hashes)
            assert (lease.leased_count, lease.cut) == (0, Cut.DEADLINE)
            lease = client.acquire(namespace, hashes, wait_seconds=5.0, lease_seconds=20.0)
            assert (lease.leased_count, lease.cut) == (COUNT, Cut.NONE)
            assert lease.tiers == ((TierName.NVME, COUNT),)
            found = read_leased(client, namespace, lease)
            assert found is not None
            for one, data in zip(hashes, found, strict=True):
                check_payload(one, data, "onboarded from NVMe")
            client.release([lease])
            assert onboard(client, namespace, hashes) == COUNT
            assert daemon.metrics()[HIT.format("acquire")] == COUNT
            assert not client.check().violations


def test_prefetch_brings_blocks_up_before_anybody_asks(pool: Path) -> None:
    hashes = chain_hashes("ahead", COUNT)
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        daemon.restart()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = mapped(client)
            begun = client.prefetch(namespace, hashes)
            assert begun.memory_count == 0
            assert 0 < begun.promoting_count <= COUNT
            eventually(
                lambda: client.match(namespace, hashes).memory_count == begun.promoting_count
            )


def test_cleared_namespace_does_not_come_back_and_the_others_do(pool: Path) -> None:
    hashes = chain_hashes("cleared", COUNT)
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            gone, kept = opened(client, "gone"), opened(client, "kept")
            put_all(client, gone, hashes)
            put_all(client, kept, hashes)
            wait_below(daemon, 2 * COUNT)
            client.clear(gone)
        daemon.restart()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            gone, kept = opened(client, "gone"), opened(client, "kept")
            assert client.match(gone, hashes).matched_count == 0
            assert got_count(client, gone, hashes) == 0
            assert got_count(client, kept, hashes) == COUNT


@pytest.mark.parametrize("held", [None, b"somebody's data"])
def test_path_that_is_no_pool_is_refused_in_one_line(tmp_path: Path, held: bytes | None) -> None:
    path = tmp_path / "none"
    if held is not None:
        path.write_bytes(held)
    with (
        pytest.raises(DaemonFailed, match="kvtier format") as caught,
        running_daemon(options={"nvme.paths": str(path)}),
    ):
        raise AssertionError("it started")
    [line] = str(caught.value).strip().splitlines()
    assert "nvme.paths" in line
    assert (path.read_bytes() if path.exists() else None) == held


def test_pool_is_made_at_the_start_when_its_size_is_said(tmp_path: Path) -> None:
    path = tmp_path / "made"
    hashes = chain_hashes("made", COUNT)
    with running_nvme_daemon(path, options={"nvme.bytes": "512MiB"}) as daemon:
        assert path.stat().st_blocks * 512 >= 512 << 20, "capacity must not run out later"
        with client_of(daemon) as client:
            put_all(client, opened(client), hashes)
            wait_below(daemon, COUNT)
        assert daemon.terminate() == 0
        daemon.start()
        wait_state(daemon, "on")
        assert daemon.metrics()["kvtier_nvme_recovered_blocks"] == COUNT


def test_pool_in_use_by_another_daemon_is_refused(pool: Path) -> None:
    with (
        running_nvme_daemon(pool),
        pytest.raises(DaemonFailed, match="in use"),
        running_daemon(options={"nvme.paths": str(pool)}),
    ):
        raise AssertionError("it started")


# -------------------------------------------------------------------------------- disks in trouble


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: what is written into it is what the disk does from then on."""
    path = tmp_path / "fault"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.mark.parametrize(("word", "state"), [("eio", "read_only"), ("gone", "off")])
def test_disk_that_fails_under_load_costs_the_tier_and_no_engine_a_call(
    pool: Path, fault: Path, word: str, state: str
) -> None:
    first, second = chain_hashes("before", COUNT), chain_hashes("after", COUNT)
    with (
        running_nvme_daemon(pool, program=PROGRAM) as daemon,
        client_of(daemon) as client,
    ):
        namespace = mapped(client)
        offload(client, namespace, first)
        wait_below(daemon, COUNT)
        fault.write_text(word)
        offload(client, namespace, second)
        wait_state(daemon, state)
        fault.unlink()
        for hashes in (first, second):
            assert onboard(client, namespace, hashes) == COUNT
        assert not client.check().violations
        assert daemon.log_text.count("nvme tier is worse off") == 1
        assert daemon.terminate() == 0


def test_disk_that_hangs_delays_an_end_by_seconds_only(pool: Path, fault: Path) -> None:
    hashes = chain_hashes("hung", COUNT)
    with running_nvme_daemon(pool, program=PROGRAM) as daemon:
        with client_of(daemon) as client:
            namespace = mapped(client)
            fault.write_text("stall")
            offload(client, namespace, hashes)
            wait_metric(daemon, 'kvtier_transfer_blocks{direction="demote"}', 1)
            assert onboard(client, namespace, hashes) == COUNT
        assert daemon.terminate(timeout_seconds=10) == 0


def test_mistake_in_a_drivers_thread_ends_the_daemon(pool: Path, fault: Path) -> None:
    with running_nvme_daemon(pool, program=PROGRAM) as daemon:
        with client_of(daemon) as client:
            namespace = mapped(client)
            fault.write_text("bug")
            offload(client, namespace, chain_hashes("bug", 1))
            assert daemon.process.wait(20) == 1
        assert "ZeroDivisionError" in daemon.log_text
