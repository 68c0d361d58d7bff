"""Acquires that wait for promotion: they hold nobody up, and leave no lease behind."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvtier.client import AsyncClient, Client, ClientSettings, Lease, Namespace
from kvtier.errors import Draining, Unavailable
from kvtier.types import PrefixMatch, TierName
from tests.e2e.client.conftest import (
    PATIENT,
    SPEC,
    MakeClient,
    Stall,
    StartDaemon,
    eventually,
    hashes,
    ready,
    session_of,
)
from tests.support.fake_daemon import FakeDaemon

HASTY = ClientSettings(timeout_seconds=0.05, retry_seconds_max=0.1)
# The call's own deadline is no matter here, and a busy machine none of the client's.
CALM = ClientSettings(timeout_seconds=0.4, retry_seconds_max=0.1)


def filled(daemon: FakeDaemon, client: Client, count: int = 2) -> Namespace:
    namespace = ready(client, daemon)
    daemon.blocks.update((one, bytes(100_000)) for one in hashes(count))
    return namespace


def waiting(pool: ThreadPoolExecutor, client: Client, namespace: Namespace) -> Future[Lease]:
    return pool.submit(client.acquire, namespace, hashes(2), wait_seconds=20.0)


def test_a_wait_holds_up_no_other_call(start_daemon: StartDaemon, make_client: MakeClient) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_waits=True)
    client = make_client()
    namespace = filled(daemon, client)
    with ThreadPoolExecutor(8) as pool:
        waits = [waiting(pool, client, namespace) for _ in range(8)]
        eventually(lambda: daemon.calls.count("Acquire") == 8)
        assert client.match(namespace, hashes(2)).matched_count == 2
        assert client.acquire(namespace, hashes(2)).leased_count == 2
        assert client.reserve(namespace, 1).slots.tolist() == [0]
        assert not any(one.done() for one in waits)
        daemon.promoted.set()
        assert [one.result(10).leased_count for one in waits] == [2] * 8
    assert len(daemon.sent("hello")) == 1


def test_a_wait_may_take_far_longer_than_a_call(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_waits=True)
    client = make_client(settings=CALM)
    namespace = filled(daemon, client)
    session = session_of(client)
    threading.Timer(2 * CALM.timeout_seconds, daemon.promoted.set).start()
    assert client.acquire(namespace, hashes(2), wait_seconds=20.0).leased_count == 2
    assert client.session == session
    assert daemon.ended_leases == []


def test_a_wait_that_is_not_ended_in_time_releases_its_lease_and_keeps_the_session(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_waits=True)
    client = make_client(settings=CALM)
    namespace = filled(daemon, client)
    session = session_of(client)
    started = time.monotonic()
    with Stall() as stall, pytest.raises(Unavailable, match="wait"):
        client.acquire(namespace, hashes(2), wait_seconds=0.1)
    took = time.monotonic() - started
    assert 0.5 <= took <= 0.65 + stall.seconds
    assert client.session == session, "the breaker is open"
    eventually(lambda: daemon.ended_leases == [9])
    eventually(lambda: daemon.cancelled_count == 1)
    assert client.match(namespace, hashes(2)).matched_count == 2
    assert len(daemon.sent("hello")) == 1


def test_a_release_that_is_not_answered_either_ends_the_session(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_waits=True, hang=["Release"])
    client = make_client(settings=CALM)
    namespace = filled(daemon, client)
    old = session_of(client)
    with pytest.raises(Unavailable):
        client.acquire(namespace, hashes(2), wait_seconds=0.1)
    assert daemon.wait_sent("quiet")[0].session_id == old.session_id
    assert client.wait_namespace(namespace, 10)
    assert client.session != old


@pytest.mark.parametrize(
    ("ending", "error"), [("badly", Draining), ("unheard", Unavailable)], ids=["badly", "unheard"]
)
def test_a_lease_whose_call_does_not_end_well_is_not_used_but_released(
    start_daemon: StartDaemon,
    make_client: MakeClient,
    ending: str,
    error: type[Exception],
) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_ends=ending)
    client = make_client()
    namespace = filled(daemon, client)
    with pytest.raises(error):
        client.acquire(namespace, hashes(2), wait_seconds=1.0)
    eventually(lambda: daemon.ended_leases == [9])
    assert client.match(namespace, hashes(2)).matched_count == 2
    assert len(daemon.sent("hello")) == 1


def test_a_cancelled_wait_releases_its_lease_and_keeps_the_session(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(acquire_pending_count=1, acquire_waits=True)

    async def body() -> None:
        async with AsyncClient(daemon.socket_path, settings=PATIENT) as client:
            namespace = client.open_namespace(SPEC)
            assert await client.wait_namespace(namespace, 10)
            daemon.blocks.update((one, bytes(100_000)) for one in hashes(2))
            session = client.session
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.acquire(namespace, hashes(2), wait_seconds=20.0)
            assert client.session == session, "the breaker is open"
            await asyncio.to_thread(eventually, lambda: daemon.ended_leases == [9])
            await asyncio.to_thread(eventually, lambda: daemon.cancelled_count == 1)
            assert (await client.match(namespace, hashes(2))).matched_count == 2
            waits = [client.acquire(namespace, hashes(2), wait_seconds=20.0) for _ in range(2)]
            threading.Timer(0.1, daemon.promoted.set).start()
            assert [one.leased_count for one in await asyncio.gather(*waits)] == [2, 2]

    asyncio.run(body())
    assert len(daemon.sent("hello")) == 1


def test_what_lies_below_memory_is_told_by_match_and_prefetch(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(memory_count=2)
    client = make_client()
    namespace = filled(daemon, client, count=5)
    tiers = ((TierName.DRAM, 2), (TierName.NVME, 3))
    assert client.match(namespace, hashes(6)) == PrefixMatch(5, 2, tiers)
    found = client.prefetch(namespace, hashes(6))
    assert (found.memory_count, found.promoting_count) == (2, 3)
