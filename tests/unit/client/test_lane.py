"""The client's end of the lane against a socket that does what the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvtier.client import calls
from kvtier.client.lane import Lane, LaneFailure, LaneRefused
from kvtier.client.rpc import Rpc
from kvtier.clock import SystemClock
from kvtier.lane import HEAD, REFUSED, pack
from kvtier.v1 import kvtier_pb2 as pb

Serve = Callable[[socket.socket], None]


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Callable[[Serve], Lane]]:
    """A lane whose daemon runs `serve` once for each connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(socket_dir / "lane"))
    listener.listen(8)
    lane = Lane(socket_dir / "lane", SystemClock())
    threads: list[threading.Thread] = []

    def run(serve: Serve) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    def begin(serve: Serve) -> Lane:
        threads.append(threading.Thread(target=run, args=(serve,), daemon=True))
        threads[-1].start()
        return lane

    yield begin
    lane.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join(5)


def read_frame(connection: socket.socket) -> tuple[int, bytes]:
    head = connection.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        raise EOFError
    payload_bytes, number = HEAD.unpack(head)
    return number, connection.recv(payload_bytes, socket.MSG_WAITALL) if payload_bytes else b""


def echo(connection: socket.socket) -> None:
    try:
        while True:
            number, payload = read_frame(connection)
            connection.sendall(pack(0, bytes([number]) + payload))
    except (EOFError, OSError):
        return


def test_answers_of_any_size_come_whole_and_by_one_connection(
    start: Callable[[Serve], Lane],
) -> None:
    connections: list[int] = []

    def serve(connection: socket.socket) -> None:
        connections.append(1)
        echo(connection)

    lane = start(serve)
    for payload in (b"", b"x", bytes(300_000), b"y" * 2_000_000):
        assert lane.call(3, payload, timeout_seconds=10) == b"\x03" + payload
    assert len(connections) == 1


def test_a_status_is_a_failure_with_the_daemons_text(start: Callable[[Serve], Lane]) -> None:
    def serve(connection: socket.socket) -> None:
        read_frame(connection)
        connection.sendall(pack(grpc.StatusCode.NOT_FOUND.value[0], b"UnknownNamespace: gone"))

    with pytest.raises(LaneFailure) as failure:
        start(serve).call(0, b"", timeout_seconds=10)
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert failure.value.details() == "UnknownNamespace: gone"


def test_a_deadline_closes_the_connection_so_that_no_late_answer_is_read(
    start: Callable[[Serve], Lane],
) -> None:
    answered = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            _, payload = read_frame(connection)
            if payload == b"slow":
                assert connection.recv(1) == b"", "the client must hang up"
                answered.set()
                return
            connection.sendall(pack(0, payload))
        except OSError:
            answered.set()

    lane = start(serve)
    with pytest.raises(LaneFailure) as failure:
        lane.call(0, b"slow", timeout_seconds=0.05)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answered.wait(5)
    assert lane.call(0, b"quick", timeout_seconds=5) == b"quick"


@pytest.mark.parametrize("answer", [b"", b"\x05", pack(0, b"long")[:-1], pack(0, b"") + b"more"])
def test_an_answer_that_is_no_frame_is_no_answer(
    start: Callable[[Serve], Lane], answer: bytes
) -> None:
    def serve(connection: socket.socket) -> None:
        read_frame(connection)
        connection.sendall(answer)

    with pytest.raises(LaneFailure) as failure:
        start(serve).call(0, b"", timeout_seconds=5)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_refused_connection_says_that_nothing_was_run_and_is_not_used_again(
    start: Callable[[Serve], Lane],
) -> None:
    refusals = iter([True, False])

    def serve(connection: socket.socket) -> None:
        _, payload = read_frame(connection)
        connection.sendall(pack(REFUSED, b"") if next(refusals) else pack(0, payload))

    lane = start(serve)
    with pytest.raises(LaneRefused) as refused:
        lane.call(0, b"", timeout_seconds=5)
    assert 0 < refused.value.left_seconds <= 5
    assert lane.call(0, b"x", timeout_seconds=5) == b"x"


def test_a_daemon_that_hung_up_before_the_frame_came_ran_nothing(
    start: Callable[[Serve], Lane],
) -> None:
    hung_up = threading.Event()

    def serve(connection: socket.socket) -> None:
        _, payload = read_frame(connection)
        connection.sendall(pack(0, payload))
        connection.close()
        hung_up.set()

    lane = start(serve)
    assert lane.call(0, b"x", timeout_seconds=5) == b"x"
    assert hung_up.wait(5)
    with pytest.raises(LaneRefused):
        lane.call(0, b"y", timeout_seconds=5)


def test_nobody_there_is_unavailable_at_once(socket_dir: Path) -> None:
    with pytest.raises(LaneRefused) as failure:
        Lane(socket_dir / "nothing", SystemClock()).call(0, b"", timeout_seconds=60)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def test_close_ends_a_call_under_way(start: Callable[[Serve], Lane]) -> None:
    reached = threading.Event()

    def serve(connection: socket.socket) -> None:
        read_frame(connection)
        reached.set()
        connection.recv(1)

    lane = start(serve)
    raised: list[grpc.StatusCode] = []

    def call() -> None:
        try:
            lane.call(0, b"", timeout_seconds=60)
        except LaneFailure as failure:
            raised.append(failure.code())

    thread = threading.Thread(target=call)
    thread.start()
    assert reached.wait(5)
    lane.close()
    thread.join(5)
    assert raised == [grpc.StatusCode.UNAVAILABLE]
    with pytest.raises(LaneFailure):
        lane.call(0, b"", timeout_seconds=1)


def test_an_answer_that_is_no_message_is_a_failure_like_grpcs(
    start: Callable[[Serve], Lane],
) -> None:
    def serve(connection: socket.socket) -> None:
        read_frame(connection)
        connection.sendall(pack(0, b"\xff\xff\xff"))

    rpc = Rpc("unix:/nowhere", start(serve))
    try:
        with pytest.raises(LaneFailure) as failure:
            rpc.unary(calls.MATCH)(pb.MatchRequest(), timeout=5)
    finally:
        rpc.close()
    assert failure.value.code() is grpc.StatusCode.INTERNAL
