"""Listening sockets from the service manager, and those bound here in their place."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.server.activation import Listeners, PassedFd, take_passed
from kvtier.server.instance import watchdog_seconds

SEQPACKET, STREAM = socket.SOCK_SEQPACKET, socket.SOCK_STREAM


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A path at which the manager listens, and the descriptor that it passes on."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, SEQPACKET) as manager:
        manager.bind(str(path))
        manager.listen(1)
        yield path, os.dup(manager.fileno())


def passing(count: int, names: str = "", process: int | None = None) -> dict[str, str]:
    process = os.getpid() if process is None else process
    return {"LISTEN_PID": str(process), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}


def test_what_was_passed_is_taken_once_with_its_names() -> None:
    # In a process of its own, where 3 and 4 are free.
    program = (
        "import os, socket, sys\n"
        "from kvtier.server.activation import take_passed\n"
        "os.dup2(os.open('/dev/null', os.O_RDONLY), 3); os.dup2(1, 4)\n"
        "env = {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '2', 'LISTEN_FDNAMES': 'slab'}\n"
        "print([(p.name, p.fd, os.get_inheritable(p.fd)) for p in take_passed(env)])\n"
        "print(env, take_passed(env))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "[('slab', 3, False), ('unknown', 4, False)]\n{} []\n", told.stderr


@pytest.mark.parametrize(
    "environment", [{}, passing(2, process=1), {**passing(1), "LISTEN_FDS": "many"}]
)
def test_what_is_meant_for_another_process_is_not_taken(environment: dict[str, str]) -> None:
    assert take_passed(environment) == []
    assert not environment


def test_a_listener_handed_over_is_used_and_stays_when_the_daemon_ends(
    listening: tuple[Path, int],
) -> None:
    path, fd = listening
    assert PassedFd("kvtier.socket", fd).is_listener
    listeners = Listeners([PassedFd("kvtier.socket", fd)])
    listeners.prepare({path: SEQPACKET})
    listener = listeners.take(path, SEQPACKET)
    assert listener.fileno() == fd
    assert not listener.getblocking()
    with listener, socket.socket(socket.AF_UNIX, SEQPACKET) as client:
        client.connect(str(path))
        listener.accept()[0].close()
    listeners.remove(path)
    assert path.is_socket(), "its owner still listens there"


def test_a_socket_is_found_by_another_spelling_of_its_path(
    listening: tuple[Path, int], tmp_path: Path
) -> None:
    """/var/run leads to /run."""
    path, fd = listening
    (tmp_path / "run").symlink_to(tmp_path)
    listeners = Listeners([PassedFd("kvtier.socket", fd)])
    listeners.prepare({tmp_path / "run" / path.name: SEQPACKET})
    with listeners.take(tmp_path / "run" / path.name, SEQPACKET) as listener:
        assert listener.fileno() == fd


def test_a_listener_of_another_kind_or_place_is_refused_and_nothing_is_removed(
    listening: tuple[Path, int], tmp_path: Path
) -> None:
    path, fd = listening
    passed = [PassedFd("kvtier.socket", fd)]
    listeners = Listeners(passed)
    with pytest.raises(ConfigError, match=f"write ListenStream={path}"):
        listeners.prepare({path: STREAM})
    with pytest.raises(ConfigError, match=r"is no socket of this daemon|which is no socket"):
        listeners.prepare({tmp_path / "other": SEQPACKET})
    assert path.is_socket()
    listeners.take(path, SEQPACKET).close()


def test_without_a_manager_sockets_are_bound_for_owner_and_group_and_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "s"
    listeners = Listeners()
    listeners.prepare({path: STREAM})
    with listeners.take(path, STREAM):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    listeners.remove(path)
    listeners.remove(path)
    assert not path.exists()


def test_a_parked_descriptor_is_no_listener(tmp_path: Path) -> None:
    fd = os.memfd_create("slab")
    with socket.socket(socket.AF_UNIX, STREAM) as connection:
        assert not PassedFd("slab", fd).is_listener
        assert not PassedFd("session", connection.fileno()).is_listener
    os.close(fd)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_when_it_is_ours(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert watchdog_seconds(environment) == seconds
