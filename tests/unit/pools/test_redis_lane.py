"""A lane to Redis over a socket that takes as few bytes as it likes: all arrive, in order."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome, Value
from kvtier.pools.remote.redis_lane import RedisLane

DONE = RemoteOutcome.DONE
CLOCK = SystemClock()


class FewBytes(socket.socket):
    """Takes so many bytes a call, in turn; never all that it is given."""

    counts: Iterator[int]
    call_count = 0

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        self.call_count += 1
        return self.send(b"".join(map(bytes, buffers))[: next(self.counts)])


class Connection:
    """What a lane needs of one of the `redis` package's."""

    def __init__(self, end: socket.socket) -> None:
        self._sock = end

    def disconnect(self) -> None:
        self._sock.close()


class Server(threading.Thread):
    """Reads so many bytes as `read` likes, and then answers so many values."""

    def __init__(
        self, end: socket.socket, count_bytes: int, answers: int, read: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True)
        self._end, self._left, self._answers, self._read = end, count_bytes, answers, read
        self.received = bytearray()

    def run(self) -> None:
        while self._left:
            self._read()
            piece = self._end.recv(min(self._left, 64 << 10))
            self.received += piece
            self._left -= len(piece)
        self._end.sendall(b"+OK\r\n" * self._answers)


@contextmanager
def ends(kind: type[socket.socket] = socket.socket) -> Iterator[tuple[Any, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs, kind(fileno=ours.detach()) as ours_again:
        ours_again.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield ours_again, theirs


def values_of(*lengths: Sequence[int]) -> list[tuple[RemoteKey, Value]]:
    """By the lengths of their parts; no two bytes near each other are alike."""
    return [
        (RemoteKey(f"key-{n}"), [(np.arange(length) % 251).astype(np.uint8) for length in parts])
        for n, parts in enumerate(lengths)
    ]


def command_of(key: RemoteKey, value: Value) -> bytes:
    payload = b"".join(part.tobytes() for part in value)
    words = [b"SET", key.encode(), payload]
    return b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


@pytest.mark.parametrize(
    "counts", [[1], [3, 1, 40], [200, 7]], ids=["byte by byte", "across parts", "several parts"]
)
def test_all_parts_arrive_in_order_however_few_bytes_the_socket_takes(counts: list[int]) -> None:
    values = values_of([128, 500, 300], [128, 1], [700])
    wanted = b"".join(command_of(key, value) for key, value in values)
    with ends(FewBytes) as (ours, theirs):
        ours.counts = cycle(counts)
        server = Server(theirs, len(wanted), len(values), lambda: None)
        server.start()
        lane = RedisLane(Connection(ours), CLOCK)
        assert lane.put(values, (), deadline=CLOCK.now() + 20.0) == [DONE] * 3
        server.join()
        assert bytes(server.received) == wanted
        assert ours.call_count >= len(wanted) // max(counts)


def test_a_put_sends_nothing_behind_its_values() -> None:
    values = values_of([128, 500], [128])
    with ends(FewBytes) as (ours, theirs):
        ours.counts = cycle([1 << 20])
        server = Server(theirs, sum(len(command_of(*one)) for one in values), 2, lambda: None)
        server.start()
        lane = RedisLane(Connection(ours), CLOCK)
        assert lane.put(values, (), deadline=CLOCK.now() + 20.0) == [DONE] * 2
        server.join()
        assert ours.call_count == 1


def test_all_arrives_when_the_kernel_is_interrupted_in_the_middle() -> None:
    """A signal ends a call of the kernel that has sent a part of what it should."""
    values = values_of([128, 1 << 20], [128, 300_000, 300_000])
    wanted = b"".join(command_of(key, value) for key, value in values)
    caller = threading.get_ident()
    interrupts = iter(range(50))

    def interrupt() -> None:
        if next(interrupts, None) is not None:
            time.sleep(0.001)  # It waits for room.
            signal.pthread_kill(caller, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with ends() as (ours, theirs):
            server = Server(theirs, len(wanted), len(values), interrupt)
            server.start()
            lane = RedisLane(Connection(ours), CLOCK)
            assert lane.put(values, (), deadline=CLOCK.now() + 20.0) == [DONE] * 2
            server.join()
            assert bytes(server.received) == wanted
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_server_that_takes_nothing_more_costs_the_deadline() -> None:
    with ends() as (ours, _):
        lane = RedisLane(Connection(ours), CLOCK)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            lane.put(values_of([1 << 20]), (), deadline=CLOCK.now() + 0.1)
        assert 0.05 < time.monotonic() - began < 5.0
