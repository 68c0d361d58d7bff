"""Packets of the session socket: one frame each, descriptors beside it."""

from __future__ import annotations

import array
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from kvtier.errors import BadFrame
from kvtier.v1 import kvtier_pb2 as pb

FRAME_BYTES_MAX = 64 << 10
FDS_PER_MESSAGE_MAX = 128
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_PER_MESSAGE_MAX * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Packet:
    frame: pb.DaemonFrame
    fds: tuple[int, ...]  # The receiver's to close.
    is_cut_off: bool  # Descriptors were lost on the way (MSG_CTRUNC).


def connect(path: Path, timeout_seconds: float) -> socket.socket:
    """A connected, non-blocking session socket. Raises OSError."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connected.settimeout(timeout_seconds)
        connected.connect(os.fspath(path))
        connected.setblocking(False)
    except BaseException:
        connected.close()
        raise
    return connected


def receive(session_socket: socket.socket) -> Packet | None:
    """The next packet, None at the end. Raises BlockingIOError, OSError, BadFrame."""
    data, ancillary, flags, _ = session_socket.recvmsg(
        FRAME_BYTES_MAX, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    fds = _received_fds(ancillary)
    try:
        if not data and not ancillary:
            return None
        if flags & socket.MSG_TRUNC:
            raise BadFrame(f"a packet of more than {FRAME_BYTES_MAX} bytes")
        frame = pb.DaemonFrame.FromString(data)
    except (DecodeError, BadFrame) as error:
        close_all(fds)
        raise BadFrame(f"the daemon sent no frame: {error}") from None
    return Packet(frame, fds, bool(flags & socket.MSG_CTRUNC))


def send(session_socket: socket.socket, frame: pb.ClientFrame, fds: Sequence[int] = ()) -> None:
    """Raises BlockingIOError when the daemon does not read, OSError when it is gone."""
    data = frame.SerializeToString()
    if len(data) > FRAME_BYTES_MAX:
        raise BadFrame(f"a frame of {len(data)} bytes: at most {FRAME_BYTES_MAX}")
    if fds:
        socket.send_fds(session_socket, [data], list(fds), socket.MSG_NOSIGNAL)
    else:
        session_socket.send(data, socket.MSG_NOSIGNAL)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def descriptor_shortage() -> str | None:
    """A clear message when this process cannot receive a full message of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        open_count = len(os.listdir("/proc/self/fd"))
    except OSError:  # Not even one is left to look at them.
        open_count = limit
    if limit == resource.RLIM_INFINITY or open_count + FDS_PER_MESSAGE_MAX <= limit:
        return None
    return (
        f"RLIMIT_NOFILE is {limit} and {open_count} descriptors are open; "
        f"kvtier needs {FDS_PER_MESSAGE_MAX} free ones: raise it (ulimit -n, LimitNOFILE=)"
    )


def _received_fds(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)
