"""Pool pages are charged to the daemon's control group, never to the engine's.

Two real processes in two real memory groups. Needs the right to make groups (root, or a delegated
subtree); skipped with the reason where that is missing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.io.memory import create_memfd, populate
from kvtier.memory import Mapping
from kvtier.pools.slabs import PageKind, best_page_kind, populate_slab
from kvtier.pools.stock import Outcome, SlabStock
from kvtier.types import SlabId

SLAB_BYTES = 64 << 20
# Page tables, socket buffers, and charges taken in advance, 32 pages a core.
SMALL_BYTES = 8 << 20
# Python and NumPy, one slab, and not a second one.
LIMIT_BYTES = SLAB_BYTES + (60 << 20)
MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """One memory group, of either version."""

    path: Path
    usage_name: str

    def usage_bytes(self) -> int:
        return int((self.path / self.usage_name).read_text())


def own_group() -> tuple[Path, str]:
    """Where our memory group is, and the name of its usage file."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return MOUNT / "memory" / path.strip("/"), "memory.usage_in_bytes"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return MOUNT / line.removeprefix("0::").strip("/"), "memory.current"
    pytest.skip("this process is in no control group")


def make_group(parent: Path, name: str, usage_name: str) -> Group:
    path = parent / f"kvtier-test-{os.getpid()}-{name}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a memory group in {parent}: {error}")
    if not (path / usage_name).exists():
        path.rmdir()
        pytest.skip(f"{parent} gives its groups no memory controller (cgroup.subtree_control)")
    return Group(path, usage_name)


def remove_group(group: Group) -> None:
    # The kernel empties a group of its dead a moment after they were waited for.
    for _ in range(200):
        with contextlib.suppress(OSError):
            group.path.rmdir()
            return
        time.sleep(0.01)


@pytest.fixture
def groups() -> Iterator[tuple[Group, Group]]:
    parent, usage_name = own_group()
    daemon = make_group(parent, "daemon", usage_name)
    try:
        engine = make_group(parent, "engine", usage_name)
    except BaseException:
        remove_group(daemon)
        raise
    yield daemon, engine
    remove_group(daemon)
    remove_group(engine)


def join(group_path: str) -> None:
    Path(group_path, "cgroup.procs").write_text(str(os.getpid()))


def daemon_main(channel: socket.socket, group_path: str, page_kind: str) -> None:
    """Make a slab as the daemon does (or without pages, to be seen failing), and pass it on."""
    join(group_path)
    if page_kind == "none":
        fd = create_memfd("kvtier-test", SLAB_BYTES)
    else:
        kind = best_page_kind() if page_kind == "best" else PageKind(page_kind)
        fd = populate_slab(SlabId(1), SLAB_BYTES, kind, clock=SystemClock()).fd
    socket.send_fds(channel, [b"slab"], [fd])
    channel.recv(1)  # Live until told to end.


def engine_main(channel: socket.socket, group_path: str) -> None:
    """Map the slab as an engine does and write all of it."""
    join(group_path)
    _, (fd,), _, _ = socket.recv_fds(channel, 16, 1)
    mapping = Mapping(fd, SLAB_BYTES)
    os.close(fd)
    channel.sendall(b"m")
    channel.recv(1)
    mapping.array[:] = 1
    populate(mapping, 0, SLAB_BYTES)
    channel.sendall(b"w")
    channel.recv(1)


def limited_main(channel: socket.socket, group_path: str) -> None:
    """Ask for three slabs in a group that has room for one; tell what came."""
    join(group_path)
    outcomes: queue.Queue[Outcome] = queue.Queue()
    stock = SlabStock(
        slab_bytes=SLAB_BYTES,
        slab_count_max=3,
        on_outcome=outcomes.put,
        clock=SystemClock(),
        parallel=1,
        reserve_bytes=0,
    )
    stock.request(3)
    found = [type(outcomes.get(timeout=30)).__name__ for _ in range(3)]
    stock.stop()
    channel.sendall(" ".join(found).encode())


@contextlib.contextmanager
def process(role: str, *arguments: str) -> Iterator[socket.socket]:
    """Runs this file as `role`; leaving closes its channel, which ends it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-m", "tests.e2e.test_cgroup_charge", role, str(theirs.fileno())]
    child = subprocess.Popen([*command, *arguments], pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.wait(60)


def charges(groups: tuple[Group, Group], page_kind: str) -> tuple[int, int]:
    """What daemon and engine were charged for one slab that the engine wrote as a whole."""
    daemon, engine = groups
    with (
        process("daemon", str(daemon.path), page_kind) as daemon_channel,
        process("engine", str(engine.path)) as engine_channel,
    ):
        _, fds, _, _ = socket.recv_fds(daemon_channel, 16, 1)
        socket.send_fds(engine_channel, [b"slab"], fds)
        os.close(fds[0])
        assert engine_channel.recv(1) == b"m"
        before = engine.usage_bytes()
        engine_channel.sendall(b"g")
        assert engine_channel.recv(1) == b"w"
        return daemon.usage_bytes(), engine.usage_bytes() - before


@pytest.mark.parametrize("page_kind", ["best", PageKind.BASE.value])
def test_a_slab_is_charged_to_the_daemon_and_not_to_the_engine_that_fills_it(
    groups: tuple[Group, Group], page_kind: str
) -> None:
    daemon_bytes, engine_bytes = charges(groups, page_kind)
    assert daemon_bytes >= SLAB_BYTES
    assert engine_bytes < SMALL_BYTES


def test_a_slab_without_pages_would_be_charged_to_the_engine(groups: tuple[Group, Group]) -> None:
    """What populating prevents; and that this test would see it."""
    _, engine_bytes = charges(groups, "none")
    assert engine_bytes >= SLAB_BYTES


def test_a_group_without_room_gets_fewer_slabs_and_nobody_is_killed(
    groups: tuple[Group, Group],
) -> None:
    daemon, _ = groups
    is_v1 = daemon.usage_name == "memory.usage_in_bytes"
    limit_name = "memory.limit_in_bytes" if is_v1 else "memory.max"
    (daemon.path / limit_name).write_text(str(LIMIT_BYTES))
    with process("limited", str(daemon.path)) as channel:
        answer = channel.recv(1024).decode()
        assert answer == "Slab PopulateRefused PopulateRefused"


if __name__ == "__main__":
    role, fd, *arguments = sys.argv[1:]
    mains = {"daemon": daemon_main, "engine": engine_main, "limited": limited_main}
    mains[role](socket.socket(fileno=int(fd)), *arguments)
