"""The holder refuses what it must, and says why; what it keeps when is in contract/."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.server import holder as module
from kvtier.server import parking
from kvtier.server.holder import close_all, is_name, listen
from kvtier.server.parking import HolderParking, ParkingFailed, systemd_keeps
from tests.support.parking_places import HolderProcess


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HolderProcess]:
    running = HolderProcess(tmp_path / "hold.sock", count_max=2)
    yield running
    if running.process.poll() is None:
        running.end()


def null_fd() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def test_it_says_ready_and_its_socket_is_for_its_owner_only(held: HolderProcess) -> None:
    assert held.ready_line == f"READY socket={held.path} count_max=2\n"
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o600


def test_it_ends_on_sigterm_and_leaves_no_socket(held: HolderProcess) -> None:
    assert held.end() == 0
    assert not held.path.exists()


def test_the_socket_of_a_killed_one_is_in_nobodys_way(held: HolderProcess) -> None:
    held.end(signal.SIGKILL)
    assert held.path.exists()
    again = HolderProcess(held.path)
    assert again.ready_line.startswith("READY")
    assert again.end() == 0


def test_where_one_listens_no_second_one_starts(held: HolderProcess) -> None:
    with pytest.raises(FileExistsError, match="listens at"):
        listen(held.path)


def test_it_never_has_the_sets_of_two_daemons(
    held: HolderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "OWN_SECONDS", 0.1)
    first = HolderParking(held.path)
    with pytest.raises(ParkingFailed, match="another daemon"):
        HolderParking(held.path)
    first.close()
    HolderParking(held.path).close()


def test_more_than_it_may_keep_is_refused_and_what_it_has_stays(held: HolderProcess) -> None:
    life = HolderParking(held.path)
    fd = null_fd()
    for name in ("one", "two", "two"):
        life.park(name, fd)
    with pytest.raises(ParkingFailed, match="count-max"):
        life.park("three", fd)
    taken = life.take_all()
    assert list(taken) == ["one", "two"]
    close_all([fd, *taken.values()])
    life.close()


def test_a_killed_holder_is_told_in_one_error(held: HolderProcess) -> None:
    life = HolderParking(held.path)
    held.end(signal.SIGKILL)
    fd = null_fd()
    with pytest.raises(ParkingFailed, match="holder"):
        life.park("one", fd)
    os.close(fd)
    life.close()


def test_no_holder_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(ParkingFailed, match="no holder answers"):
        HolderParking(tmp_path / "nothing.sock")


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b"no JSON",
        b'{"do": "own", "do": "park"}',
        b'{"do": "take", "first": 0}',
        b'{"do": "unpark", "name": ["x"]}',
    ],
)
def test_garbage_is_answered_and_changes_nothing(held: HolderProcess, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        connection.connect(str(held.path))
        connection.send(data)
        assert "error" in json.loads(connection.recv(4096))
    life = HolderParking(held.path)
    assert life.take_all() == {}
    life.close()


def test_descriptors_that_belong_to_no_request_are_closed(held: HolderProcess) -> None:
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        connection.connect(str(held.path))
        module.send(connection, {"do": "own"}, [writer, writer])
        os.close(writer)
        assert json.loads(connection.recv(4096))["ok"]
    assert os.read(reader, 1) == b"", "the holder keeps them"
    os.close(reader)


def test_somebody_else_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        assert module._may_use(left)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert module._may_use(left) is (os.getuid() == 0)


def test_names_are_those_that_systemd_takes_too() -> None:
    assert all(map(is_name, ("slab-12", "table", "session-1.worker_0", "x" * 200)))
    assert not any(map(is_name, ("", "a:b", "a\nb", "ä", "x" * 201, 7, None)))


def test_systemd_keeps_only_where_it_says_so() -> None:
    assert systemd_keeps({"NOTIFY_SOCKET": "/run/n", "FDSTORE": "4096"})
    assert not systemd_keeps({"NOTIFY_SOCKET": "/run/n"})
    assert not systemd_keeps({"FDSTORE": "4096"})
