"""The client's end of the call lane (kvtier/lane.py): a few connections, one call at a time each.

A deadline that passes closes the connection, which cancels the call; whoever called learns the same
as from gRPC: DEADLINE_EXCEEDED, or UNAVAILABLE when the daemon is not there.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import grpc

from kvtier.clock import Clock
from kvtier.lane import HEAD, PAYLOAD_BYTES_MAX, REFUSED, pack

# Threads of one process that are in a call at the same moment; more open and close their own.
IDLE_CONNECTIONS_MAX = 8
_SEND_BUFFER_BYTES = 1 << 20  # A long list of hashes passes without waiting for the reader.
_READ_BYTES = 64 << 10

_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class LaneFailure(grpc.RpcError):
    """A call by the lane that failed; looks like gRPC's own failures."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class LaneRefused(LaneFailure):
    """The daemon certainly ran nothing: gRPC may be tried for what is left of the time."""

    def __init__(self, why: str, left_seconds: float) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, why)
        self.left_seconds = left_seconds


class Lane:
    """Thread-safe; belongs to one session."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = str(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = False

    def call(self, number: int, payload: bytes, *, timeout_seconds: float) -> bytes:
        """The answer's payload. Raises LaneFailure, LaneRefused when nothing was run."""
        deadline = self._clock.now() + timeout_seconds
        connection = self._take(timeout_seconds)
        is_whole = False
        try:
            self._send(connection, pack(number, payload), deadline)
            status, answer = self._receive(connection, deadline)
            is_whole = status != REFUSED
        except TimeoutError:
            raise LaneFailure(
                grpc.StatusCode.DEADLINE_EXCEEDED, "no answer from the daemon in time"
            ) from None
        except OSError as error:
            raise LaneFailure(
                grpc.StatusCode.UNAVAILABLE, f"the daemon is not there: {error}"
            ) from None
        finally:
            self._give_back(connection, is_whole=is_whole)
        if status == REFUSED:
            raise LaneRefused("no room for a connection", deadline - self._clock.now())
        if status:
            code = _STATUS.get(status, grpc.StatusCode.UNKNOWN)
            raise LaneFailure(code, answer.decode("utf-8", errors="replace"))
        return answer

    def close(self) -> None:
        """Ends calls under way: they raise UNAVAILABLE."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                # Only wakes its thread, which closes it: the number must not be reused before.
                _shut(connection)
            while self._idle:
                self._idle.pop().close()

    def close_in_child(self) -> None:
        """After a fork, without shutdown: the connections are the parent's."""
        for connection in [*self._idle, *self._busy]:
            connection.close()

    def _take(self, timeout_seconds: float) -> socket.socket:
        with self._lock:
            if self._closed:
                raise LaneFailure(grpc.StatusCode.UNAVAILABLE, "the session was replaced")
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        try:
            connection = self._connect(timeout_seconds)
        except OSError as error:
            raise LaneRefused(f"the daemon is not there: {error}", timeout_seconds) from None
        with self._lock:
            self._busy.add(connection)
        self._end_if_closed(connection)
        return connection

    def _connect(self, timeout_seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.settimeout(max(timeout_seconds, 0.001))
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection

    def _end_if_closed(self, connection: socket.socket) -> None:
        """`close` may have come while we connected."""
        with self._lock:
            if self._closed:
                _shut(connection)

    def _give_back(self, connection: socket.socket, *, is_whole: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if is_whole and not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _send(self, connection: socket.socket, frame: bytes, deadline: float) -> None:
        connection.settimeout(self._left(deadline))
        try:
            connection.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            # The frame did not get there whole, and only whole ones are run.
            raise LaneRefused(f"the daemon hung up: {error}", self._left(deadline)) from None

    def _receive(self, connection: socket.socket, deadline: float) -> tuple[int, bytes]:
        received = self._read(connection, deadline)
        while len(received) < HEAD.size:
            received += self._read(connection, deadline)
        payload_bytes, status = HEAD.unpack_from(received)
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise OSError(f"an answer of {payload_bytes} bytes")
        parts = [received[HEAD.size :]]
        missing_bytes = payload_bytes - len(parts[0])
        while missing_bytes > 0:
            parts.append(self._read(connection, deadline))
            missing_bytes -= len(parts[-1])
        if missing_bytes:
            raise OSError("an answer that is longer than it says")
        return status, b"".join(parts)

    def _read(self, connection: socket.socket, deadline: float) -> bytes:
        connection.settimeout(self._left(deadline))
        received = connection.recv(_READ_BYTES)
        if not received:
            raise OSError("it closed the connection")
        return received

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock.now()
        if left <= 0:
            raise TimeoutError
        return left


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The daemon was faster.
