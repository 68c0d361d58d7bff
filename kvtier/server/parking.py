"""Parking: file descriptors left with somebody who outlives this process.

Two places: systemd's FD store, which hands them back with the listening sockets of the next start,
and a holder process (holder.py). Whoever parks keeps its own descriptor.
"""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvtier.clock import SystemClock
from kvtier.errors import KVTierError
from kvtier.server import holder

# From the event loop: a holder that does not answer by then is not used any more.
ANSWER_SECONDS = 1.0
# The connection of a daemon that was killed a moment ago may not be closed yet.
OWN_SECONDS = 2.0
_OWN_POLL_SECONDS = 0.02


class ParkingFailed(KVTierError):
    """What should outlive this process cannot be left with anybody."""


class Parking(Protocol):
    """Contract: tests/contract/parking_contract.py. Methods raise ParkingFailed."""

    def park(self, name: str, fd: int) -> None:
        """When this returns the file outlives us; a name that was in use names this one now."""
        ...

    def unpark(self, name: str) -> None:
        """Let go of it; an unknown name changes nothing."""
        ...

    def take_all(self) -> dict[str, int]:
        """What the process before us parked; the descriptors are ours, and stay parked too."""
        ...

    def close(self) -> None:
        """What is parked stays parked."""
        ...


class SystemdParking:
    """The FD store of our unit (FileDescriptorStoreMax); implements `Parking`.

    Messages are kept by the kernel in their order and read by systemd before it learns of our
    death, so what was sent counts, however we end.
    """

    def __init__(self, address: str, passed: Iterable[tuple[str, int]]) -> None:
        """`passed`: names and descriptors that systemd handed over at our start, no listeners."""
        self._target = "\0" + address[1:] if address.startswith("@") else address
        self._passed = dict(passed)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._connection.settimeout(ANSWER_SECONDS)

    def park(self, name: str, fd: int) -> None:
        assert holder.is_name(name), f"{name!r} is no name for systemd"
        # FDPOLL=0: systemd would let go of a pidfd at the moment when it tells of the death.
        # REMOVE first: systemd keeps several of one name.
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", fd)

    def unpark(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def take_all(self) -> dict[str, int]:
        taken, self._passed = self._passed, {}
        return taken

    def close(self) -> None:
        holder.close_all(list(self._passed.values()))
        self._passed.clear()
        self._connection.close()

    def _send(self, message: str, fd: int | None = None) -> None:
        beside = []
        if fd is not None:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._connection.sendmsg([message.encode()], beside, 0, self._target)
        except OSError as error:
            raise ParkingFailed(f"systemd does not take it: {error}") from None


class HolderParking:
    """A holder process; implements `Parking`."""

    def __init__(self, path: Path) -> None:
        """Become the owner of its set; raises ParkingFailed."""
        self._path = path
        self._connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        )
        self._connection.settimeout(ANSWER_SECONDS)
        try:
            self._connection.connect(str(path))
            self._become_owner()
        except OSError as error:
            self._connection.close()
            raise ParkingFailed(
                f"no holder answers at {path} ({error}): start `kvtier hold {path}` first, then "
                "the daemon; it asks once"
            ) from None
        except ParkingFailed:
            self._connection.close()
            raise

    def park(self, name: str, fd: int) -> None:
        self._ask({"do": "park", "name": name}, fd)

    def unpark(self, name: str) -> None:
        self._ask({"do": "unpark", "name": name})

    def take_all(self) -> dict[str, int]:
        taken: dict[str, int] = {}
        try:
            while True:
                answer, fds = self._exchange({"do": "take", "first": len(taken)})
                names = _names_in(answer, taken)
                if names is None or len(names) != len(fds):
                    holder.close_all(fds)
                    raise ParkingFailed(f"the holder at {self._path} gave fewer than it named")
                taken.update(zip(names, fds, strict=True))
                if not names or len(taken) >= answer["count"]:
                    return taken
        except BaseException:
            holder.close_all(list(taken.values()))
            raise

    def close(self) -> None:
        self._connection.close()

    def _become_owner(self) -> None:
        clock = SystemClock()
        until = clock.now() + OWN_SECONDS
        while True:
            try:
                self._ask({"do": "own"})
                return
            except ParkingFailed:
                if clock.now() >= until:
                    raise
            threading.Event().wait(_OWN_POLL_SECONDS)

    def _ask(self, request: dict[str, Any], fd: int | None = None) -> None:
        _, fds = self._exchange(request, fd)
        holder.close_all(fds)

    def _exchange(
        self, request: dict[str, Any], fd: int | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            holder.send(self._connection, request, () if fd is None else (fd,))
            data, fds = holder.receive(self._connection)
        except OSError as error:
            raise ParkingFailed(f"the holder at {self._path} is gone: {error}") from None
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = {"error": "the connection ended" if not data else "no answer of a holder"}
        if not isinstance(answer, dict):
            answer = {"error": "no answer of a holder"}
        if not answer.get("ok"):
            holder.close_all(fds)
            raise ParkingFailed(f"the holder at {self._path}: {answer.get('error')}")
        return answer, fds


def _names_in(answer: dict[str, Any], taken: Mapping[str, int]) -> list[str] | None:
    """The names that the answer adds to those taken; None when it makes no sense."""
    names, count = answer.get("names"), answer.get("count")
    if not isinstance(names, list) or not isinstance(count, int):
        return None
    if not all(isinstance(name, str) for name in names):
        return None
    return names if len({*names, *taken}) == len(names) + len(taken) else None


def systemd_keeps(environment: Mapping[str, str]) -> bool:
    """Whether our unit has an FD store: systemd 254 and later say so ($FDSTORE)."""
    return bool(environment.get("NOTIFY_SOCKET")) and environment.get("FDSTORE", "0") != "0"


def is_same_file(left: int, right: int) -> bool:
    one, other = os.fstat(left), os.fstat(right)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
