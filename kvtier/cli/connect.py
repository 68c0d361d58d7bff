"""A client for a command: connected within a bound, or one line that says what to do."""

from __future__ import annotations

import argparse
import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvtier.client.address import TCP_SCHEME
from kvtier.client.client import Client
from kvtier.client.settings import ClientSettings
from kvtier.client.tls import ClientTls
from kvtier.client.values import Namespace
from kvtier.errors import ConfigError, KVTierError, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.paths import SOCKET_VARIABLE, default_socket_path
from kvtier.types import Role

CONNECT_SECONDS = 5.0
# A person waits for these, not an engine.
TOOL_SETTINGS = ClientSettings(
    timeout_seconds=5.0, stream_timeout_seconds=120.0, admin_timeout_seconds=30.0
)

_TLS_FILES = {
    "certificate": "your certificate",
    "private-key": "its key",
    "authorities": "who may vouch for the daemon",
}
_TLS_OPTIONS = ", ".join(f"--tls-{name}" for name in _TLS_FILES)


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"session socket of the daemon, or tcp://HOST:PORT (default: ${SOCKET_VARIABLE}, "
        f"else {default_socket_path()})",
    )
    tls = parser.add_argument_group("tcp://HOST:PORT of a daemon that asks for certificates")
    for name, what in _TLS_FILES.items():
        tls.add_argument(f"--tls-{name}", metavar="FILE", type=Path, help=f"PEM file of {what}")


def tool_settings(arguments: argparse.Namespace) -> ClientSettings:
    """Of a command line that `add_socket_argument` has extended; raises ConfigError."""
    files = {name: getattr(arguments, f"tls_{name.replace('-', '_')}") for name in _TLS_FILES}
    if not any(files.values()):
        return TOOL_SETTINGS
    for name, path in files.items():
        if path is None:
            raise ConfigError(f"--tls-{name} is missing: TLS needs all of {_TLS_OPTIONS}")
    tls = ClientTls(files["certificate"], files["private-key"], files["authorities"])
    return replace(TOOL_SETTINGS, tls=tls)


def _try_socket(path: str) -> None:
    """Raises Unavailable when nobody listens: the client would retry, as an engine's must."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET | sockets.SOCK_CLOEXEC) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except BlockingIOError:
            return  # Somebody listens, and is busy.
        except FileNotFoundError:
            reason = "start `kvtier serve`, or name it with --socket"
        except ConnectionRefusedError:
            reason = "its socket was left behind; start `kvtier serve`, or name another --socket"
        except PermissionError:
            reason = "you may not open its socket: are you in the group of `kvtier serve`?"
        except OSError as error:
            reason = f"{error.strerror or error}; --socket names a session socket of `kvtier serve`"
        else:
            return
    raise Unavailable(f"no daemon at {path}: {reason}")


@contextmanager
def connected(
    socket: Path | str | None,
    *,
    role: Role = Role.TOOL,
    name: str = "kvtier",
    settings: ClientSettings = TOOL_SETTINGS,
) -> Iterator[Client]:
    """Raises Unavailable when no daemon answers on the socket."""
    path = str(socket or default_socket_path())
    if not path.startswith(TCP_SCHEME):
        _try_socket(path)
    client = Client(path, role=role, name=name, settings=settings)
    try:
        if not client.wait_connected(CONNECT_SECONDS):
            raise Unavailable(
                f"no answer from the daemon at {path} within {CONNECT_SECONDS:g} s: is "
                f"`kvtier serve` running, and {_doubt(path, settings)}?"
            )
        yield client
    finally:
        client.close()


def _doubt(path: str, settings: ClientSettings) -> str:
    if not path.startswith(TCP_SCHEME):
        return "may you open its socket"
    if settings.tls is None:
        return "does it ask for a certificate (--tls-certificate)"
    return "does it accept your certificate (its log says why not), and do you accept its own"


def open_namespace(
    client: Client, spec: NamespaceSpec, *, timeout_seconds: float = CONNECT_SECONDS
) -> Namespace:
    """Raises the daemon's reason when it refuses the namespace."""
    namespace = client.open_namespace(spec)
    if not client.wait_namespace(namespace, timeout_seconds):
        error: KVTierError | None = namespace.error
        raise error or Unavailable("the daemon did not open the namespace in time: try again")
    return namespace
