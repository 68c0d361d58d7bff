"""The call lane of a real daemon, by hand and by the client."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator

import grpc
import pytest

from kvtier.client import Client
from kvtier.lane import HEAD, LANE_CALLS, pack
from kvtier.namespace import NamespaceSpec
from kvtier.paths import lane_socket_path
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=4096)
MATCH = LANE_CALLS.index("Match")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(options={"lease.margin_seconds": "0.5"}) as running:
        running.wait_populated()
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket, name="lane") as made:
        assert made.wait_connected(10)
        yield made


def connect(daemon: RunningDaemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(lane_socket_path(daemon.socket)))
    return connection


def ask(connection: socket.socket, number: int, payload: bytes) -> tuple[grpc.StatusCode, bytes]:
    connection.sendall(pack(number, payload))
    length, status = HEAD.unpack(connection.recv(HEAD.size, socket.MSG_WAITALL))
    answer = connection.recv(length, socket.MSG_WAITALL) if length else b""
    return next(code for code in grpc.StatusCode if code.value[0] == status), answer


@pytest.mark.parametrize(
    ("number", "payload", "status", "text"),
    [
        (99, b"", grpc.StatusCode.INVALID_ARGUMENT, b"BadRequest: the lane has no call 99"),
        (MATCH, b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, b"BadRequest: the bytes are no"),
        (MATCH, b"", grpc.StatusCode.UNAUTHENTICATED, b"Unauthenticated: "),
        (
            MATCH,
            pb.MatchRequest(token=b"wrong" * 8).SerializeToString(),
            grpc.StatusCode.UNAUTHENTICATED,
            b"Unauthenticated: ",
        ),
    ],
)
def test_a_bad_call_is_refused_by_name_and_the_connection_goes_on(
    daemon: RunningDaemon, number: int, payload: bytes, status: grpc.StatusCode, text: bytes
) -> None:
    with connect(daemon) as connection:
        for _ in range(2):
            code, answer = ask(connection, number, payload)
            assert code is status
            assert answer.startswith(text)


def test_a_client_passes_by_the_lane_and_is_counted_like_any_call(
    daemon: RunningDaemon, client: Client
) -> None:
    namespace = client.open_namespace(SPEC)
    assert client.wait_namespace(namespace, 10)
    before = daemon.metrics()
    assert client.match(namespace, [b"h" * 32], timeout_seconds=10).matched_count == 0
    after = daemon.metrics()
    grown = {name for name in after if after[name] != before.get(name) and "Match" in name}
    assert grown, "the lane's calls are in the metrics"
    assert client._link.session is not None
    assert client._link.session.rpc._lane is not None


def test_without_the_lanes_socket_calls_pass_by_grpc(daemon: RunningDaemon) -> None:
    path = lane_socket_path(daemon.socket)
    hidden = path.with_suffix(".hidden")
    path.rename(hidden)
    try:
        with Client(daemon.socket) as client:
            namespace = client.open_namespace(SPEC)
            assert client.wait_namespace(namespace, 10)
            assert client.match(namespace, [b"h" * 32], timeout_seconds=10).matched_count == 0
    finally:
        hidden.rename(path)


def test_noise_on_the_lane_harms_nobody(daemon: RunningDaemon, client: Client) -> None:
    chance = random.Random(5)
    namespace = client.open_namespace(SPEC)
    assert client.wait_namespace(namespace, 10)
    for _ in range(rounds(short=200, full=5000)):
        with connect(daemon) as connection:
            noise = chance.randbytes(chance.randrange(1, 200))
            if chance.random() < 0.5:  # A whole frame of noise.
                noise = pack(chance.randrange(8), noise)
            connection.sendall(noise)
            if chance.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
    assert client.match(namespace, [b"h" * 32], timeout_seconds=10).matched_count == 0
    assert client.check().violations == []


def test_a_client_that_hangs_up_in_mid_call_leaves_no_lease_behind(
    daemon: RunningDaemon, client: Client
) -> None:
    namespace = client.open_namespace(SPEC)
    assert client.wait_namespace(namespace, 10)
    chain = [bytes([index]) * 32 for index in range(8)]
    deadline = time.monotonic() + 30
    while not (count := len((reservation := client.reserve(namespace, len(chain))).slots)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.commit(
        namespace,
        chain[:count],
        reservation.slots,
        session=reservation.session,
        epoch=reservation.epoch,
    )
    state, session = namespace.state, client._link.session
    assert state is not None
    assert session is not None
    request = pb.AcquireRequest(
        token=session.token,
        namespace_id=state.namespace_id,
        hashes=b"".join(chain[:count]),
        deadline_ns=time.monotonic_ns() + 1_000_000_000,
    )
    for _ in range(50):
        with connect(daemon) as connection:
            connection.sendall(pack(LANE_CALLS.index("Acquire"), request.SerializeToString()))
    # An answer that was on its way when the client went is a lease until its deadline, no more.
    deadline = time.monotonic() + 60
    while client.stats().tiers[0].pinned_count:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert client.check().violations == []


def test_clients_without_a_token_cannot_use_up_the_connections() -> None:
    with running_daemon(options={"grpc.calls_max": "16"}) as daemon:
        idle = [connect(daemon) for _ in range(40)]
        with Client(daemon.socket) as client:
            namespace = client.open_namespace(SPEC)
            assert client.wait_namespace(namespace, 10)
            for _ in range(5):
                assert client.match(namespace, [b"h" * 32], timeout_seconds=10).matched_count == 0
        for connection in idle:
            connection.close()


def test_a_client_that_finds_no_room_on_the_lane_uses_grpc() -> None:
    with running_daemon(options={"grpc.calls_max": "1"}) as daemon:
        with Client(daemon.socket) as first, Client(daemon.socket) as second:
            for client in (first, second, first, second):
                namespace = client.open_namespace(SPEC)
                assert client.wait_namespace(namespace, 10)
                assert client.match(namespace, [b"h" * 32], timeout_seconds=10).matched_count == 0
                assert client.connected
        assert "too many lane connections" in daemon.log_text
