"""Where the daemon's sockets are when nobody says otherwise; shared by both sides."""

from __future__ import annotations

import os
from pathlib import Path

SOCKET_VARIABLE = "KVTIER_SOCKET"


def default_socket_path() -> Path:
    """$KVTIER_SOCKET, else /run/kvtier/kvtier.sock for root, else below $XDG_RUNTIME_DIR or ~."""
    if value := os.environ.get(SOCKET_VARIABLE):
        return Path(value)
    if os.geteuid() == 0:
        return Path("/run/kvtier/kvtier.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path.home() / ".kvtier"
    return base / "kvtier" / "kvtier.sock" if runtime else base / "kvtier.sock"


def grpc_socket_path(session_socket: Path) -> Path:
    """The gRPC socket stands beside the session socket: kvtier.sock -> kvtier.grpc.sock."""
    return session_socket.with_name(session_socket.stem + ".grpc.sock")


def lane_socket_path(session_socket: Path) -> Path:
    """So does the call lane's: kvtier.sock -> kvtier.lane.sock."""
    return session_socket.with_name(session_socket.stem + ".lane.sock")
