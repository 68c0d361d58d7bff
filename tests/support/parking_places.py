"""Where a daemon can park: a holder process, and a fake of systemd's FD store."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path


class HolderProcess:
    """`python -m kvtier.cli.main hold` on a socket of its own."""

    def __init__(self, path: Path, *, count_max: int = 4096) -> None:
        self.path = path
        program = (
            "import sys; from pathlib import Path; from kvtier.server.holder import hold; "
            "sys.exit(hold(Path(sys.argv[1]), count_max=int(sys.argv[2])))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(count_max)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None, "started with a pipe"
        self.ready_line = self.process.stdout.readline()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None, "started with a pipe"
        self.process.stdout.close()
        return self.process.wait(10)


class FakeFdStore:
    """Does with sd_notify messages what systemd does with them (FDNAME, FDSTORE, FDSTOREREMOVE)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[tuple[str, int]] = []
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._connection.bind(str(path))
        self._lock = threading.Lock()
        self.unpolled: set[str] = set()

    def read(self) -> None:
        """Work off what was sent so far."""
        with self._lock:
            while True:
                try:
                    data, ancillary, _, _ = self._connection.recvmsg(
                        4096, socket.CMSG_SPACE(16), socket.MSG_DONTWAIT
                    )
                except BlockingIOError:
                    return
                fields = dict(line.split("=", 1) for line in data.decode().splitlines())
                fds = array.array("i")
                for _, _, payload in ancillary:
                    fds.frombytes(payload)
                self._apply(fields, fds.tolist())

    def hand_over(self) -> list[tuple[str, int]]:
        """What the next start would be passed."""
        self.read()
        return [(name, os.dup(fd)) for name, fd in self._kept]

    def close(self) -> None:
        for _, fd in self._kept:
            os.close(fd)
        self._connection.close()

    def _apply(self, fields: dict[str, str], fds: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if "FDSTOREREMOVE" in fields:
            for one in [one for one in self._kept if one[0] == name]:
                self._kept.remove(one)
                os.close(one[1])
        if "FDSTORE" in fields:
            self._kept.extend((name, fd) for fd in fds)
            if fields.get("FDPOLL") == "0":
                self.unpolled.add(name)


class Killed(Exception):
    """The daemon ended here."""


class MemoryParking:
    """A parking place in this process, for lives that end between any two of its requests."""

    def __init__(self, kept: dict[str, int], *, requests_max: int | None = None) -> None:
        """`kept` is shared by all lives; the request after `requests_max` is never sent."""
        self.kept = kept
        self.requests_max = requests_max
        self.error: Exception | None = None  # Raised by the next requests.

    def park(self, name: str, fd: int) -> None:
        self.count()
        self._close(name)
        self.kept[name] = os.dup(fd)

    def unpark(self, name: str) -> None:
        self.count()
        self._close(name)

    def take_all(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.kept.items()}

    def close(self) -> None:
        pass

    def count(self) -> None:
        """One step of the story."""
        if self.error is not None:
            raise self.error
        if self.requests_max is not None:
            if self.requests_max == 0:
                raise Killed
            self.requests_max -= 1

    def _close(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))
