"""Law 2, measured: whatever the daemon does, a call returns within its deadline + 20 ms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.errors import KVTierError, Unavailable
from tests.e2e.client.conftest import (
    SPEC,
    MakeClient,
    Stall,
    StartDaemon,
    eventually,
    hashes,
    ready,
)
from tests.support.daemon import RunningDaemon, running_daemon

HASTY = ClientSettings(
    timeout_seconds=0.05,
    stream_timeout_seconds=0.1,
    admin_timeout_seconds=0.1,
    retry_seconds_max=0.1,
)
SLACK_SECONDS = 0.02
BREAKER_OPEN_SECONDS_MAX = 0.002

Call = Callable[[Client, Namespace], object]

CALLS: dict[str, tuple[float, Call]] = {
    "match": (0.05, lambda c, n: c.match(n, hashes(64))),
    "acquire": (0.05, lambda c, n: c.acquire(n, hashes(64))),
    "waiting acquire": (0.1, lambda c, n: c.acquire(n, hashes(64), wait_seconds=0.05)),
    "reserve": (0.05, lambda c, n: c.reserve(n, 1)),
    "get": (0.1, lambda c, n: c.get(n, hashes(2))),
    "put": (0.1, lambda c, n: c.put(n, [(hashes(1)[0], bytes(100_000))])),
    "stats": (0.1, lambda c, n: c.stats()),
}


def seconds_of(call: Call, client: Client, namespace: Namespace) -> float:
    """How long the call took to fail."""
    started = time.monotonic()
    with pytest.raises(Unavailable):
        call(client, namespace)
    return time.monotonic() - started


@pytest.fixture
def daemon_process() -> Iterator[RunningDaemon]:
    """The real daemon, to be stopped and killed."""
    with running_daemon(dram_bytes="8MiB", slab_bytes="2MiB") as daemon:
        yield daemon


def connected_to(daemon: RunningDaemon, make_client: MakeClient) -> tuple[Client, Namespace]:
    """A hasty client whose slots can be used."""
    client = make_client(daemon.socket, settings=HASTY)
    namespace = ready(client)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
    return client, namespace


def test_an_absent_daemon_costs_microseconds(directory: Path, make_client: MakeClient) -> None:
    started = time.monotonic()
    client = make_client()
    namespace = client.open_namespace(SPEC)
    assert time.monotonic() - started < 0.05
    assert not client.wait_connected(0.1)
    took = sorted(seconds_of(CALLS["match"][1], client, namespace) for _ in range(100))
    assert took[50] < 0.0005, f"{took[50] * 1e6:.0f} us"


def test_a_daemon_that_comes_later_is_found(
    directory: Path, make_client: MakeClient, start_daemon: StartDaemon
) -> None:
    client = make_client()
    namespace = client.open_namespace(SPEC)
    assert not client.wait_connected(0.2)
    start_daemon()
    assert client.wait_namespace(namespace, 10)
    assert client.match(namespace, hashes(1)).matched_count == 0


@pytest.mark.parametrize("name", list(CALLS))
def test_a_stopped_daemon_holds_no_call_beyond_its_deadline(
    daemon_process: RunningDaemon, make_client: MakeClient, name: str
) -> None:
    client, namespace = connected_to(daemon_process, make_client)
    deadline, call = CALLS[name]
    daemon_process.stop()
    try:
        with Stall() as stall:
            first = seconds_of(call, client, namespace)
        # The breaker is open now, whatever is called.
        later = [
            seconds_of(other, client, namespace) for _ in range(20) for _, other in CALLS.values()
        ]
    finally:
        daemon_process.resume()
    assert first <= deadline + SLACK_SECONDS + stall.seconds, f"{first * 1000:.1f} ms"
    assert sorted(later)[len(later) // 2] < BREAKER_OPEN_SECONDS_MAX
    assert client.wait_namespace(namespace, 10), "the daemon goes on, and is not used"
    assert client.match(namespace, hashes(1)).matched_count == 0


def test_a_killed_daemon_fails_calls_at_once_and_its_successor_is_used(
    daemon_process: RunningDaemon, make_client: MakeClient
) -> None:
    client, namespace = connected_to(daemon_process, make_client)
    old = client.session
    daemon_process.kill()
    with Stall() as stall:
        took = [seconds_of(call, client, namespace) for _, call in CALLS.values()]
    assert max(took) <= HASTY.timeout_seconds + SLACK_SECONDS + stall.seconds
    daemon_process.start()
    assert client.wait_namespace(namespace, 10)
    assert client.session is not None
    assert old is not None
    assert client.session.generation != old.generation
    assert client.match(namespace, hashes(1)).matched_count == 0


def test_calls_during_restarts_end_in_time(
    daemon_process: RunningDaemon, make_client: MakeClient
) -> None:
    client, namespace = connected_to(daemon_process, make_client)
    took: list[float] = []
    answered_count = 0

    def call_for(seconds: float) -> None:
        nonlocal answered_count
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.monotonic()
            try:
                client.match(namespace, hashes(8))
                answered_count += 1
            except KVTierError:
                time.sleep(0.001)
            took.append(time.monotonic() - started)

    with Stall() as stall:
        for _ in range(2):
            call_for(0.1)
            daemon_process.kill()
            call_for(0.1)
            daemon_process.start()
            assert client.wait_namespace(namespace, 10)
        call_for(0.1)
    assert answered_count > 30
    took.sort()
    longest = HASTY.timeout_seconds + SLACK_SECONDS + stall.seconds
    assert took[-1] <= longest, f"{took[-1] * 1000:.1f} ms"


# ------------------------------------------------------------------------- what a timeout means


def test_a_match_that_times_out_keeps_the_session(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client(settings=HASTY)
    namespace = ready(client, daemon)
    session = client.session
    daemon.script.hang = ["Match"]
    seconds_of(CALLS["match"][1], client, namespace)
    assert not client.connected
    daemon.script.hang = []
    daemon.released.set()
    assert client.wait_connected(10)
    assert client.session == session
    assert len(daemon.sent("hello")) == 1


@pytest.mark.parametrize("name", ["Acquire", "Reserve"])
def test_a_change_that_times_out_ends_the_session(
    start_daemon: StartDaemon, make_client: MakeClient, name: str
) -> None:
    daemon = start_daemon()
    client = make_client(settings=HASTY)
    namespace = ready(client, daemon)
    old = client.session
    assert old is not None
    daemon.script.hang = [name]
    seconds_of(CALLS[name.lower()][1], client, namespace)
    # Match still answers, so the probe is answered: a new session names the old one.
    assert client.wait_namespace(namespace, 10)
    hello = daemon.wait_sent("hello", 2)[1]
    assert hello.old_session_id == old.session_id
    assert len(hello.old_token) == 32
    assert daemon.wait_sent("quiet")[0].session_id == old.session_id
    assert client.session != old
    daemon.released.set()


def test_a_probe_that_is_not_answered_keeps_the_breaker_open(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client(settings=HASTY)
    namespace = ready(client, daemon)
    daemon.script.hang = ["Match", "Reserve"]
    seconds_of(CALLS["reserve"][1], client, namespace)
    assert not client.wait_connected(0.3)
    assert len(daemon.sent("hello")) == 1
    daemon.script.hang = []
    daemon.released.set()
    eventually(lambda: client.connected)
