"""Waits for a disk that hangs: whatever ends them, no lease and no session is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client import AsyncClient, Client, ClientSettings
from kvtier.errors import Unavailable
from kvtier.types import Cut
from tests.e2e.client.conftest import eventually, session_of
from tests.support.daemon import RunningDaemon
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.known_blocks import chain_hashes, onboard, spec_of
from tests.support.nvme_daemon import (
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)

pytestmark = pytest.mark.slow

CHAIN = chain_hashes("awaited", 20)
PATIENT = ClientSettings(timeout_seconds=2.0)


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: what is written into it is what the disk does from then on."""
    path = tmp_path / "fault"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def daemon(fault: Path, tmp_path: Path) -> Iterator[RunningDaemon]:
    """It has CHAIN on NVMe only, and its disk hangs."""
    make_pool(tmp_path / "pool")
    with running_nvme_daemon(tmp_path / "pool", program=PROGRAM) as running:
        with Client(running.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            put_all(client, namespace, CHAIN)
            wait_below(running, len(CHAIN))
        running.restart()
        wait_state(running, "on")
        fault.write_text("stall")
        yield running
        fault.unlink(missing_ok=True)


def wait_leases(daemon: RunningDaemon, count: int) -> None:
    eventually(lambda: daemon.metrics()["kvtier_leases"] == count)


def test_a_wait_whose_time_is_over_is_cut_by_the_daemon(daemon: RunningDaemon, fault: Path) -> None:
    with Client(daemon.socket, settings=PATIENT) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_namespace(namespace, 10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
        session, started = session_of(client), time.monotonic()
        lease = client.acquire(namespace, CHAIN, wait_seconds=0.5)
        assert (lease.leased_count, lease.cut) == (0, Cut.DEADLINE)
        assert 0.5 <= time.monotonic() - started < 0.5 + PATIENT.timeout_seconds
        wait_leases(daemon, 0)
        fault.unlink()
        assert client.session == session
        eventually(lambda: onboard(client, namespace, CHAIN) == len(CHAIN))
        assert not client.check().violations


def test_a_cancelled_wait_leaves_no_lease_and_the_session_goes_on(
    daemon: RunningDaemon, fault: Path
) -> None:
    async def body() -> None:
        async with AsyncClient(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert await client.wait_namespace(namespace, 10)
            arena = client.arena(namespace)
            await asyncio.to_thread(eventually, lambda: arena.mapped_slot_count > 0)
            session = client.session
            wait = asyncio.create_task(client.acquire(namespace, CHAIN, wait_seconds=20.0))
            await asyncio.to_thread(wait_leases, daemon, 1)
            assert (await client.match(namespace, CHAIN)).matched_count == len(CHAIN)
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            await asyncio.to_thread(wait_leases, daemon, 0)
            await asyncio.to_thread(fault.unlink)
            assert client.session == session
            lease = await client.acquire(namespace, CHAIN, wait_seconds=20.0)
            assert lease.leased_count == len(CHAIN)
            await client.release([lease])
            assert not (await client.check()).violations

    asyncio.run(body())


def test_a_wait_of_a_client_that_is_closed_leaves_no_lease(daemon: RunningDaemon) -> None:
    client = Client(daemon.socket, settings=PATIENT)
    namespace = client.open_namespace(spec_of())
    assert client.wait_namespace(namespace, 10)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)

    async def body() -> None:
        wait = asyncio.create_task(
            asyncio.to_thread(client.acquire, namespace, CHAIN, wait_seconds=20.0)
        )
        await asyncio.to_thread(wait_leases, daemon, 1)
        await asyncio.to_thread(client.close)
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable):
                await wait

    asyncio.run(body())
    wait_leases(daemon, 0)
