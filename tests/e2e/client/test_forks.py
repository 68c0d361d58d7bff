"""A forked child of an engine must not live on in the daemon's books, nor in its memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.client import Client
from kvtier.errors import Unavailable
from tests.e2e.client.conftest import (
    MakeClient,
    StartDaemon,
    eventually,
    hashes,
    ready,
    session_of,
)


def run_in_child(check: Callable[[], bool]) -> bool:
    """Whether the check holds in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def is_unavailable(call: Callable[[], object]) -> bool:
    try:
        call()
    except Unavailable:
        return True
    return False


def mapped_slabs(pid: int | str) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "slab" in line]


def session_sockets() -> int:
    """Connected session sockets among this process's descriptors."""
    table = Path("/proc/net/unix").read_text().splitlines()[1:]
    seqpacket = {line.split()[6] for line in table if line.split()[4] == "0005"}
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        count += target.startswith("socket:[") and target[8:-1] in seqpacket
    return count


def test_every_call_of_a_forked_child_is_unavailable(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, session = client.arena(namespace), session_of(client)
    calls: list[Callable[[], object]] = [
        lambda: client.match(namespace, hashes(1)),
        lambda: client.reserve(namespace, 1),
        lambda: client.release([]),
        client.stats,
        lambda: client.wait_connected(1),
        lambda: client.open_namespace(namespace.spec),
        lambda: client.arena(namespace),
        lambda: arena.view(0, session),
        lambda: arena.views([0], session),
    ]
    assert all(run_in_child(lambda call=call: is_unavailable(call)) for call in calls)  # type: ignore[misc]
    assert client.match(namespace, hashes(1)).matched_count == 0, "the parent is not hurt"
    assert len(daemon.sent("hello")) == 1


def test_a_forked_child_may_drop_and_close_the_client(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client: Client | None = make_client()
    assert client is not None
    namespace = ready(client, daemon)

    def drop() -> bool:
        nonlocal client
        assert client is not None
        client.close()
        client = None
        gc.collect()
        return True

    assert run_in_child(drop)
    assert client.match(namespace, hashes(1)).matched_count == 0
    assert daemon.sent("bye") == []


def test_a_forked_child_has_neither_slabs_nor_session_sockets(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    daemon.slab.close()  # Its own mapping in this process would be found too.
    client = make_client()
    ready(client, daemon)
    assert mapped_slabs("self")
    # The fake daemon's ends of the connection are in the child too: 1 listener, 1 connection.
    in_parent = session_sockets()
    assert run_in_child(lambda: not mapped_slabs("self"))
    assert run_in_child(lambda: session_sockets() == in_parent - 1)


PARENT = """
import os, signal, sys, time
from kvtier.client import Client
from tests.e2e.client.conftest import SPEC

client = Client(sys.argv[1])
namespace = client.open_namespace(SPEC)
assert client.wait_namespace(namespace, 10)
while not client.arena(namespace).mapped_slot_count:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_child_that_outlives_its_parent_keeps_nothing_alive(
    start_daemon: StartDaemon, directory: Path
) -> None:
    daemon = start_daemon()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(daemon.socket_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert len(daemon.connections) == 1
        assert mapped_slabs(parent.pid)
        parent.kill()
        parent.wait()
        # The connection ends although the child lives: it holds no copy of the socket.
        eventually(lambda: not daemon.connections)
        assert Path(f"/proc/{child}").exists()
        assert mapped_slabs(child) == []
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_forking_while_sessions_come_and_go_is_safe(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    daemon.slab.close()
    client = make_client()
    namespace = ready(client, daemon)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        daemon.break_connections()
        for _ in range(5):
            assert run_in_child(lambda: not mapped_slabs("self"))
    assert client.wait_namespace(namespace, 10)
