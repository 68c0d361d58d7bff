"""The asyncio face does what the sync one does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvtier.client import AsyncClient, ClientSettings
from kvtier.errors import FdPassingUnavailable, StaleSlot, TierFull, Unavailable
from kvtier.types import CommitOutcome
from tests.e2e.client.conftest import PATIENT, SPEC, Stall, StartDaemon, hashes

HASTY = ClientSettings(timeout_seconds=0.05, admin_timeout_seconds=0.1, retry_seconds_max=0.1)


def run(
    address: Path | str,
    body: Callable[[AsyncClient], Awaitable[None]],
    settings: ClientSettings = PATIENT,
) -> None:
    async def main() -> None:
        async with AsyncClient(address, settings=settings) as client:
            await body(client)

    asyncio.run(main())


def test_offload_and_onboard_round_trip(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(acquire_pending_count=1)

    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        assert await client.wait_namespace(namespace, 10)
        await asyncio.to_thread(daemon.wait_sent, "slab_mapped")
        reservation = await client.reserve(namespace, 2)
        arena = client.arena(namespace)
        with arena.hold(reservation.slots, reservation.session) as views:
            for view in views:
                view[:] = 5
        outcomes = await client.commit(
            namespace,
            hashes(2),
            reservation.slots,
            session=reservation.session,
            epoch=reservation.epoch,
        )
        assert outcomes == [CommitOutcome.READY] * 2
        assert (await client.match(namespace, hashes(3))).matched_count == 2
        lease = await client.acquire(namespace, hashes(3), wait_seconds=0.5)
        assert lease.slots.tolist() == [0, 1]
        assert await client.release([lease]) == 1
        assert await client.get(namespace, hashes(3)) == [b"\5" * 100_000] * 2
        result = await client.put(namespace, [(hashes(3)[2], b"x" * 100_000)])
        assert result.ready_count == 1
        assert await client.abort(namespace, [4], session=reservation.session) == 1
        assert (await client.stats()).generation == 1
        assert await client.clear(namespace) == 4
        with pytest.raises(TierFull):
            await client.reserve(namespace, 1000)

    run(daemon.socket_path, body)
    assert len(daemon.sent("bye")) == 1


def test_a_change_that_times_out_ends_the_session(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(hang=["Reserve"])

    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        assert await client.wait_namespace(namespace, 10)
        old = client.session
        assert old is not None
        started = time.monotonic()
        with Stall() as stall, pytest.raises(Unavailable):
            await client.reserve(namespace, 1)
        assert time.monotonic() - started <= 0.05 + 0.02 + stall.seconds
        with pytest.raises(Unavailable):
            await client.match(namespace, hashes(1))
        assert await client.wait_namespace(namespace, 10)
        assert client.session != old
        with pytest.raises(StaleSlot):
            await client.abort(namespace, [1], session=old)
        assert (await client.match(namespace, hashes(1), timeout_seconds=10)).matched_count == 0
        [quiet] = await asyncio.to_thread(daemon.wait_sent, "quiet")
        assert quiet.session_id == old.session_id

    run(daemon.socket_path, body, HASTY)


def test_a_cancelled_change_ends_the_session_and_a_cancelled_match_does_not(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()

    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        assert await client.wait_namespace(namespace, 10)
        old = client.session
        for name, is_kept in (("Match", True), ("Reserve", False)):
            daemon.script.hang = [name]
            call = client.match(namespace, hashes(1)) if is_kept else client.reserve(namespace, 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await call
            daemon.script.hang = []
            daemon.released.set()
            daemon.released.clear()
            assert await client.wait_namespace(namespace, 10)
            assert (client.session == old) == is_kept

    run(daemon.socket_path, body)


def test_watch_says_that_events_were_lost_after_a_reconnect(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()

    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        kinds = []
        async for event in client.watch(namespace):
            kinds.append(event.WhichOneof("event"))
            if kinds == ["cleared"]:
                daemon.break_connections()
            # "lost" comes again for each try to reconnect that fails.
            if len(kinds) == 10 or (len(kinds) > 1 and kinds[-1] == "cleared"):
                break
        assert [*kinds[:2], kinds[-1]] == ["cleared", "lost", "cleared"]
        assert set(kinds[1:-1]) == {"lost"}

    run(daemon.socket_path, body)


def test_by_value_over_tcp(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()

    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        assert await client.wait_namespace(namespace, 10)
        with pytest.raises(FdPassingUnavailable):
            await client.reserve(namespace, 1)
        await client.put(namespace, [(hashes(1)[0], bytes(100_000))])
        assert await client.get(namespace, hashes(1)) == [bytes(100_000)]

    run(f"tcp://127.0.0.1:{daemon.port}", body)


def test_an_absent_daemon_neither_blocks_nor_leaks(directory: Path) -> None:
    async def body(client: AsyncClient) -> None:
        namespace = client.open_namespace(SPEC)
        assert not await client.wait_connected(0.05)
        with pytest.raises(Unavailable):
            await client.match(namespace, hashes(1))

    run(directory / "kvtier.sock", body)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        run(directory / "kvtier.sock", body)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before
