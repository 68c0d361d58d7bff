"""A client that is closed leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

from tests.e2e.client.conftest import (
    MakeClient,
    StartDaemon,
    eventually,
    hashes,
    ready,
    session_of,
)
from tests.support.fake_daemon import FakeDaemon

ROUNDS = 5


def counts() -> tuple[int, int]:
    """(descriptors, threads of the client)."""
    gc.collect()
    mine = [one for one in threading.enumerate() if one.name.startswith(("kvtier", "Channel"))]
    return len(os.listdir("/proc/self/fd")), len(mine)


def assert_level(run: Callable[[], None]) -> None:
    """Descriptors and threads are the same after each round as after the first."""
    run()  # gRPC keeps what it opens once.
    before = counts()
    for _ in range(ROUNDS):
        run()
    eventually(lambda: counts()[0] <= before[0] and counts()[1] <= before[1], 5)


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> FakeDaemon:
    return start_daemon()


def test_clients_that_work_leave_nothing(daemon: FakeDaemon, make_client: MakeClient) -> None:
    def run() -> None:
        client = make_client()
        namespace = ready(client)
        client.match(namespace, hashes(3))
        client.put(namespace, [(hashes(1)[0], bytes(100_000))])
        client.get(namespace, hashes(1))
        client.acquire(namespace, hashes(1))
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
        client.arena(namespace).view(0, session_of(client))
        client.close()

    assert_level(run)


def test_reconnecting_leaves_nothing(daemon: FakeDaemon, make_client: MakeClient) -> None:
    client = make_client()
    namespace = ready(client)

    def run() -> None:
        hello_count = len(daemon.sent("hello"))
        daemon.break_connections()
        daemon.wait_sent("hello", hello_count + 1)
        assert client.wait_namespace(namespace, 10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0)

    assert_level(run)


def test_clients_without_a_daemon_leave_nothing(make_client: MakeClient) -> None:
    def run() -> None:
        client = make_client()
        client.wait_connected(0.05)
        client.close()

    assert_level(run)


def test_by_value_clients_leave_nothing(daemon: FakeDaemon, make_client: MakeClient) -> None:
    def run() -> None:
        client = make_client(f"tcp://127.0.0.1:{daemon.port}")
        ready(client)
        client.close()

    assert_level(run)


def test_descriptors_of_refused_messages_are_closed(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(offer="cut_off")
    client = make_client()
    namespace = ready(client)

    def run() -> None:
        hello_count = len(daemon.sent("hello"))
        daemon.break_connections()
        daemon.wait_sent("hello", hello_count + 1)
        assert client.wait_namespace(namespace, 10)
        eventually(lambda: client.by_value)

    assert_level(run)
