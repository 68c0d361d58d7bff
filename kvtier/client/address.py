"""Where a client was told to connect; pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

TCP_SCHEME = "tcp://"


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """A session socket: slots and shared memory."""

    path: Path


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A gRPC port: by value only."""

    target: str  # As gRPC spells it.


def parse_address(text: Path | str) -> SocketAddress | TcpAddress:
    """A path, or "tcp://HOST:PORT"."""
    if isinstance(text, str) and text.startswith(TCP_SCHEME):
        target = text.removeprefix(TCP_SCHEME)
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{text!r} is no address: write tcp://HOST:PORT")
        return TcpAddress(target)
    return SocketAddress(Path(text))
