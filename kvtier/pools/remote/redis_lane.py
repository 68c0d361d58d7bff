"""One connection to one Redis node for values: straight between the socket and their memory.

The client of the `redis` package connects, and knows TLS, users and the cluster. But it joins what
it sends and cuts up what it receives under the interpreter's lock, for milliseconds a call, in
which the daemon answers nobody. So values go through its sockets by our own few lines of RESP2:
send and receive without the lock, one thread a lane.

A lane that met trouble other than a reply is closed: nobody knows what would come next on it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.memory import Bytes
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome, Reply, Value
from kvtier.pools.remote.framing import InPlace, bytes_of

_LINE_BYTES_MAX = 64 << 10
_PARTS_MAX = 1024  # IOV_MAX
# Values go together: blocks of 2 MiB by twos reached 0.87 of the bare client, one by one 0.85.
_SENT_BYTES_MIN = 4 << 20
_TIME = struct.Struct("@ll")  # struct timeval

_REFUSED = ("NOAUTH", "WRONGPASS", "MISCONF", "NOPERM", "READONLY")
_UNREACHABLE = ("MOVED", "ASK", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN")


T = TypeVar("T")
Address = tuple[str, int]


class LaneBroken(Exception):
    """Closed by the other end, or not RESP."""


def outcome_of_text(text: str) -> RemoteOutcome:
    """What an error reply means to whoever asked."""
    if text.startswith("OOM"):
        return RemoteOutcome.FULL
    if text.startswith(_REFUSED):
        return RemoteOutcome.REFUSED
    return RemoteOutcome.UNREACHABLE if text.startswith(_UNREACHABLE) else RemoteOutcome.FAILED


class RedisLane:
    """All calls raise TimeoutError, OSError or LaneBroken when the lane must be closed."""

    def __init__(self, connection: Any, clock: Clock) -> None:
        """`connection`: a connected `redis.Connection` with RESP2."""
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        if not self._is_tls:
            # The kernel keeps the time, and takes all parts in one call: Python would ask whether
            # the socket takes more before each piece of it.
            self._socket.setblocking(True)
        self._clock = clock
        self._deadline = 0.0
        self._line = bytearray(_LINE_BYTES_MAX)  # Received and not used yet: of first..last.
        self._first, self._last = 0, 0
        self.has_answered = False

    def greet(self, deadline: float) -> RemoteOutcome:
        """DONE when the server takes our calls. One that does not know us ends the connection at
        the first block, and the reason is lost with it."""
        self._deadline = deadline
        self._send(b"*1\r\n$4\r\nPING\r\n")
        line = self._read_line()
        return outcome_of_text(_text(line)) if line[:1] == b"-" else RemoteOutcome.DONE

    def put(
        self, values: Sequence[tuple[RemoteKey, Value]], more: Sequence[bytes], *, deadline: float
    ) -> list[RemoteOutcome]:
        """ABSENT of a value in place that was not right any more: it is deleted again.

        They are summed when all is sent, while the server still takes in what was sent last.
        """
        self._deadline = deadline
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in more)
        parts: list[bytes | memoryview] = []
        waiting_bytes = 0
        for key, value in values:
            name, length = key.encode(), bytes_of(value)
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (3 + len(more), len(name), name)
            parts += [head + b"$%d\r\n" % length, *(part.data for part in value), end]
            waiting_bytes += length
            if waiting_bytes >= _SENT_BYTES_MIN:
                self._send(*parts)
                parts, waiting_bytes = [], 0
        self._send(*parts)
        wrong = [isinstance(value, InPlace) and not value.is_right() for _, value in values]
        outcomes = [self._read_outcome() for _ in values]
        if any(wrong):
            names = [key.encode() for (key, _), one in zip(values, wrong, strict=True) if one]
            self._send(_commands(b"UNLINK", names))
            for _ in names:
                self._read_line()
        return [
            RemoteOutcome.ABSENT if is_wrong else outcome
            for is_wrong, outcome in zip(wrong, outcomes, strict=True)
        ]

    def _read_outcome(self) -> RemoteOutcome:
        line = self._read_line()
        return outcome_of_text(_text(line)) if line[:1] == b"-" else RemoteOutcome.DONE

    def get(
        self,
        keys: Sequence[RemoteKey],
        *,
        value_bytes_max: int,
        take: Callable[[int], Bytes],
        deadline: float,
    ) -> list[Reply]:
        self._deadline = deadline
        names = [key.encode() for key in keys]
        self._send(_commands(b"GET", names))
        return [self._read_value(value_bytes_max, take) for _ in keys]

    def close(self) -> None:
        self._connection.disconnect()

    def _read_value(self, value_bytes_max: int, take: Callable[[int], Bytes]) -> Reply:
        line = self._read_line()
        if line[:1] == b"-":
            return Reply(outcome_of_text(_text(line)))
        if line[:1] != b"$" or not line[1:].lstrip(b"-").isdigit():
            raise LaneBroken(_text(line))
        count = int(line[1:])
        if count < 0:
            return Reply(RemoteOutcome.ABSENT)
        is_taken = count <= value_bytes_max
        left = count
        value = take(count) if is_taken else None
        while left:
            if value is not None:
                left -= self._receive_into(value[count - left :])
            else:
                left -= self._skip(left)
        if bytes(self._read_line()):
            raise LaneBroken("no end of a value")
        return Reply(RemoteOutcome.FAILED) if value is None else Reply(RemoteOutcome.DONE, value)

    def _receive_into(self, place: Bytes) -> int:
        """Some bytes of a value: those received with the last line first."""
        held = min(self._last - self._first, place.nbytes)
        if held:
            part = memoryview(self._line)[self._first : self._first + held]
            place.data[:held] = part  # gil-ok: at most 64 KiB, of each value once
            self._first += held
            return held
        return self._received(self._receive(place.data, socket.MSG_WAITALL))

    def _skip(self, count: int) -> int:
        if self._first == self._last:
            self._fill()
        skipped = min(self._last - self._first, count)
        self._first += skipped
        return skipped

    def _read_line(self) -> bytes:
        while True:  # Ended by an end of line, or by LaneBroken when none fits.
            end = self._line.find(b"\r\n", self._first, self._last)
            if end >= 0:
                line = bytes(self._line[self._first : end])  # gil-ok: a line
                self._first = end + 2
                return line
            self._fill()

    def _fill(self) -> None:
        if self._first == self._last:
            self._first = self._last = 0
        elif self._last == len(self._line):
            raise LaneBroken("a line without end")
        view = memoryview(self._line)[self._last :]
        self._last += self._received(self._receive(view))

    def _received(self, count: int) -> int:
        if count == 0:
            raise LaneBroken("closed by the server")
        self.has_answered = True
        return count

    def _send(self, *parts: bytes | memoryview) -> None:
        if self._is_tls:
            for part in parts:
                rest = memoryview(part)
                while rest.nbytes:  # A record of 16 KiB at a time, each of which may wait.
                    self._limit_time()
                    rest = rest[self._socket.send(rest) :]
            return
        left = deque(memoryview(part) for part in parts)
        while left:
            self._limit_time()
            try:
                count = self._socket.sendmsg(islice(left, _PARTS_MAX))
            except BlockingIOError:
                raise TimeoutError from None
            while left and count >= left[0].nbytes:
                count -= left.popleft().nbytes
            if count:
                left[0] = left[0][count:]

    def _receive(self, place: memoryview, flags: int = 0) -> int:
        self._limit_time()
        try:
            return self._socket.recv_into(place, 0, 0 if self._is_tls else flags)
        except BlockingIOError:
            raise TimeoutError from None

    def _limit_time(self) -> None:
        """The next call on the socket takes no more time than is left."""
        left = self._deadline - self._clock.now()
        if left <= 0:
            raise TimeoutError
        if self._is_tls:
            self._socket.settimeout(left)
            return
        whole = int(left)
        time_left = _TIME.pack(whole, max(1, int((left - whole) * 1e6)))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, time_left)


def _commands(word: bytes, names: Sequence[bytes]) -> bytes:
    """The same command for each key."""
    head = b"*2\r\n$%d\r\n%b\r\n" % (len(word), word)
    return b"".join(head + b"$%d\r\n%b\r\n" % (len(one), one) for one in names)


def _text(line: bytes) -> str:
    return line[1:].decode(errors="replace")


class RedisLanes:
    """The lanes to all nodes, kept for the next call; for threads."""

    def __init__(
        self,
        connect: Callable[[Address, float], Any],
        outcome_of: Callable[[Exception], RemoteOutcome],
        clock: Clock,
    ) -> None:
        """`connect(address, seconds)` gives a connected `redis.Connection` or raises;
        `outcome_of` says what that was."""
        self._connect = connect
        self._outcome_of = outcome_of
        self._clock = clock
        self._lock = threading.Lock()  # Guards the rest.
        self._idle: dict[Address, list[RedisLane]] = {}
        self._closed = False

    def run(
        self, address: Address, deadline: float, work: Callable[[RedisLane], list[T]]
    ) -> list[T] | RemoteOutcome:
        """What the work returned, or what became of all of it."""
        while True:  # Ended by a lane that is new, at the latest.
            lane = self._take(address)
            is_used = lane is not None
            try:
                if lane is None:
                    seconds = max(0.001, deadline - self._clock.now())
                    lane = RedisLane(self._connect(address, seconds), self._clock)
                    if (greeted := lane.greet(deadline)) is not RemoteOutcome.DONE:
                        lane.close()
                        return greeted
                lane.has_answered = False
                found = work(lane)
            except Exception as error:  # noqa: BLE001  # Whatever the package raises is an outcome.
                if lane is not None:
                    lane.close()
                if isinstance(error, TimeoutError):
                    return RemoteOutcome.TIMED_OUT
                if lane is not None and is_used and not lane.has_answered:
                    continue  # The server has closed it since it was used last.
                if isinstance(error, LaneBroken):
                    return RemoteOutcome.UNREACHABLE
                return self._outcome_of(error)
            self._keep(address, lane)
            return found

    def close(self) -> None:
        """Those in use are closed when their calls end."""
        with self._lock:
            self._closed = True
            idle = [lane for lanes in self._idle.values() for lane in lanes]
            self._idle.clear()
        for lane in idle:
            lane.close()

    def _take(self, address: Address) -> RedisLane | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def _keep(self, address: Address, lane: RedisLane) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(address, []).append(lane)
                return
        lane.close()
