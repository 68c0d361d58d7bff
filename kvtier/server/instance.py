"""One daemon a state directory, one a socket: locks, stale sockets, limits, and telling systemd."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 107  # sun_path, without its final zero.


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """$STATE_DIRECTORY (systemd), else /var/lib/kvtier for root, else ~/.kvtier/state."""
    if given := environment.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/kvtier")
    return Path.home() / ".kvtier" / "state"


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory; the kernel lets go of it when we end, however we end."""
    with _held(state_dir / "lock", f"server.state_dir {state_dir}", folder_mode=0o750):
        yield


@contextmanager
def claimed(socket_path: Path) -> Iterator[None]:
    """Hold the place of the sockets. Of two daemons that start at once neither sees that the other
    listens, and the later one would take the sockets of the earlier one for stale."""
    lock_path = socket_path.with_name(f"{socket_path.name}.lock")
    with _held(lock_path, f"server.socket {socket_path}", flags=os.O_NOFOLLOW):
        yield


@contextmanager
def _held(
    lock_path: Path, what: str, *, folder_mode: int = 0o755, flags: int = 0
) -> Iterator[None]:
    """The file stays when we end: removed, it could be locked twice."""
    try:
        lock_path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o640)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"another daemon (process {holder}) uses {what}: stop it, or give this one its own"
            ) from None
        with suppress(OSError):  # A full disk: only the name of the holder is missing then.
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def clear_way(path: Path, kind: socket.SocketKind) -> None:
    """Make sure a socket can be bound here: remove a stale one, refuse to replace a live one."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} is too long: at most {SOCKET_PATH_BYTES_MAX} bytes are possible"
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"socket path {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"socket path {path} is there and no socket: remove it, or choose another"
        )
    if _is_live(path, kind):
        raise ConfigError(f"a daemon is listening at {path} already: stop it, or choose another")
    path.unlink(missing_ok=True)


def raise_open_files(needed_count: int) -> int:
    """Raise NOFILE to its hard limit; ConfigError when that is too low for the configuration."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed_count:
        raise ConfigError(
            f"open files are limited to {hard}, {needed_count} are needed: raise LimitNOFILE, or "
            "lower server.sessions_max"
        )
    return hard


def notify_systemd(environment: Mapping[str, str], state: str) -> None:
    """Tell the service manager, if it wants to know (sd_notify)."""
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.sendto(state.encode(), target)
        except OSError:
            return  # Nobody listens: nothing depends on it.


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How often the service manager wants a sign of life at least; None: it does not."""
    meant_for = environment.get("WATCHDOG_PID", "")
    limit_us = environment.get("WATCHDOG_USEC", "")
    if meant_for not in ("", str(os.getpid())) or not limit_us.isdecimal() or not int(limit_us):
        return None
    return int(limit_us) / 1e6


def _is_live(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as trial:
        trial.setblocking(False)
        try:
            trial.connect(str(path))
        except OSError as error:
            # Refused: nobody listens. Anything else (busy, another kind of socket, no permission)
            # means that somebody may.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True
