"""The client and the real daemon."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.checksum import block_checksum
from kvtier.client import AsyncClient, Client, Lease, Namespace
from kvtier.client.values import Reservation
from kvtier.errors import FdPassingUnavailable, NotReserved, StaleSlot, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Cut, TierName
from tests.e2e.client.conftest import MakeClient, eventually, session_of
from tests.e2e.client.test_forks import run_in_child
from tests.support.daemon import RunningDaemon, running_daemon

SHARD_BYTES = 100_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {"grpc.tcp": "127.0.0.1:0", "lease.grace_seconds": "0.1"}
    with running_daemon(dram_bytes="128MiB", slab_bytes="4MiB", options=options) as running:
        running.wait_populated()
        yield running


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    """A namespace of the test's own."""
    return NamespaceSpec("model", request.node.name, "bfloat16", "nhd", 16, SHARD_BYTES)


def chain(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def ready(client: Client, spec: NamespaceSpec) -> Namespace:
    namespace = client.open_namespace(spec)
    assert client.wait_namespace(namespace, 10)
    eventually(lambda: client.by_value or client.arena(namespace).mapped_slot_count > 0)
    return namespace


def reserved(client: Client, namespace: Namespace, count: int) -> Reservation:
    """As soon as the daemon has heard of what is mapped."""
    given: list[Reservation] = []

    def is_given() -> bool:
        given.append(client.reserve(namespace, count))
        return len(given[-1].slots) > 0

    eventually(is_given)
    return given[-1]


def offload(client: Client, namespace: Namespace, hashes: list[bytes]) -> list[bytes]:
    """Fill and commit a block for each hash, as many at a time as slots are given."""
    payloads: list[bytes] = []
    while len(payloads) < len(hashes):
        first = len(payloads)
        reservation = reserved(client, namespace, len(hashes) - first)
        count = len(reservation.slots)
        new = [os.urandom(SHARD_BYTES) for _ in range(count)]
        with client.arena(namespace).hold(reservation.slots, reservation.session) as views:
            for view, payload in zip(views, new, strict=True):
                view[:] = np.frombuffer(payload, np.uint8)
        outcomes = client.commit(
            namespace,
            hashes[first : first + count],
            reservation.slots,
            parent=hashes[first - 1] if first else None,
            session=reservation.session,
            epoch=reservation.epoch,
            checksums=[block_checksum(payload, SHARD_BYTES) for payload in new],
        )
        assert outcomes == [CommitOutcome.READY] * count
        payloads += new
    return payloads


def onboard(client: Client, namespace: Namespace, lease: Lease) -> list[bytes]:
    with client.arena(namespace).hold(lease.slots, lease.session) as views:
        return [view.tobytes() for view in views]


def test_another_client_onboards_what_one_offloaded(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    one, other = make_client(daemon.socket), make_client(daemon.socket)
    here, there = ready(one, spec), ready(other, spec)
    hashes = chain(4)
    payloads = offload(one, here, hashes[:3])
    found = other.match(there, hashes)
    assert (found.matched_count, found.memory_count) == (3, 3)
    assert found.tiers == ((TierName.DRAM, 3),)
    lease = other.acquire(there, hashes, skip_count=1)
    assert (lease.leased_count, lease.cut) == (3, Cut.MISS)
    assert onboard(other, there, lease) == payloads[1:]
    assert other.release([lease]) == 1
    assert other.release([lease]) == 0
    assert other.get(there, hashes) == payloads


def test_put_and_get_over_tcp_meet_the_arenas(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    local = make_client(daemon.socket)
    remote = make_client(f"tcp://{daemon.ready['tcp']}")
    here, there = ready(local, spec), ready(remote, spec)
    assert remote.by_value
    with pytest.raises(FdPassingUnavailable):
        remote.reserve(there, 1)
    hashes = chain(3)
    payloads = offload(local, here, hashes[:1])
    put = [os.urandom(SHARD_BYTES) for _ in range(2)]
    result = remote.put(there, list(zip(hashes[1:], put, strict=True)), parent=hashes[0])
    assert result.ready_count == 2
    assert remote.get(there, hashes) == [*payloads, *put]
    assert onboard(local, here, local.acquire(here, hashes)) == [*payloads, *put]


def test_clear_voids_what_was_reserved_before(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket)
    namespace = ready(client, spec)
    hashes = chain(2)
    offload(client, namespace, hashes[:1])
    reservation = reserved(client, namespace, 1)
    epoch = client.clear(namespace)
    assert epoch != reservation.epoch
    assert client.match(namespace, hashes).matched_count == 0
    outcomes = client.commit(
        namespace,
        hashes[:1],
        reservation.slots,
        session=reservation.session,
        epoch=reservation.epoch,
    )
    assert outcomes == [CommitOutcome.VOID]


def test_hint_prefetch_evict_pin_stats_and_check_are_answered(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket, name="teller")
    namespace = ready(client, spec)
    hashes = chain(2)
    offload(client, namespace, hashes)
    assert client.prefetch(namespace, hashes).memory_count == 2
    assert client.hint(namespace, hashes, session_end=True) in (True, False)
    pin = client.pin(namespace, hashes, hold_seconds=60)
    assert pin.leased_count == 2
    assert client.evict(namespace, hashes).kept_count == 2
    assert client.release([pin]) == 1
    assert client.evict(namespace, hashes).evicted_count == 2
    assert client.match(namespace, hashes).matched_count == 0
    assert "teller" in [one.name for one in client.stats().sessions]
    assert list(client.check().violations) == []


def test_a_foreign_slot_is_refused_by_name(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket)
    namespace = ready(client, spec)
    reservation = reserved(client, namespace, 1)
    with pytest.raises(NotReserved):
        client.abort(namespace, [int(reservation.slots[0]) + 1], session=reservation.session)
    assert client.abort(namespace, reservation.slots, session=reservation.session) == 1


def test_watch_tells_what_is_stored(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket)
    namespace = ready(client, spec)
    seen: list[bytes] = []

    def collect() -> None:
        for event in client.watch(namespace):
            packed = event.stored.hashes
            seen.extend(packed[at : at + 32] for at in range(0, len(packed), 32))

    watcher = threading.Thread(target=collect)
    watcher.start()

    def has_begun() -> bool:
        offload(client, namespace, chain(1))
        return bool(seen)

    eventually(has_begun)
    hashes = chain(2)
    offload(client, namespace, hashes)
    eventually(lambda: set(hashes) <= set(seen))
    client.close()
    watcher.join(5)
    assert not watcher.is_alive(), "a watch outlives its client"


def test_a_suspect_session_is_replaced_and_its_slots_come_back(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket)
    namespace = ready(client, spec)
    old = session_of(client)
    reservation = reserved(client, namespace, 3)
    daemon.stop()
    try:
        with pytest.raises(Unavailable):
            client.reserve(namespace, 1)
    finally:
        daemon.resume()
    assert client.wait_namespace(namespace, 10)
    assert session_of(client) != old
    with pytest.raises(StaleSlot):
        client.arena(namespace).view(int(reservation.slots[0]), old)

    def is_drained() -> bool:
        tier = client.stats().tiers[0]
        return tier.reserved_count == 0 and tier.quarantined_count == 0

    eventually(is_drained)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
    offload(client, namespace, chain(2))
    assert list(client.check().violations) == []


def test_a_forked_child_changes_nothing(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    client = make_client(daemon.socket)
    namespace = ready(client, spec)
    session = session_of(client)

    def is_refused() -> bool:
        try:
            client.reserve(namespace, 1)
        except Unavailable:
            return True
        return False

    assert run_in_child(is_refused)
    offload(client, namespace, chain(1))
    assert session_of(client) == session


def test_the_asyncio_client_meets_the_sync_one(
    daemon: RunningDaemon, make_client: MakeClient, spec: NamespaceSpec
) -> None:
    hashes = chain(2)
    sync = make_client(daemon.socket)
    payloads = offload(sync, ready(sync, spec), hashes)

    async def body() -> None:
        async with AsyncClient(daemon.socket) as client:
            namespace = client.open_namespace(spec)
            assert await client.wait_namespace(namespace, 10)
            arena = client.arena(namespace)
            await asyncio.to_thread(eventually, lambda: arena.mapped_slot_count > 0)
            lease = await client.acquire(namespace, hashes)
            with arena.hold(lease.slots, lease.session) as views:
                assert [view.tobytes() for view in views] == payloads
            assert await client.release([lease]) == 1

    asyncio.run(body())
