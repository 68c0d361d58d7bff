"""Servers that a benchmark starts for itself: free ports, private folders, gone with it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.cli.interrupts import deferred_interrupts
from kvtier.cli.private_daemon import end_process
from kvtier.errors import Unavailable

_HOST = "127.0.0.1"
_START_SECONDS = 20.0
_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("LENDS" if code == 0 else code, flush=True)
sys.stdin.read()  # Ends with whoever started us.
"""


def redis_binary() -> str | None:
    return shutil.which("valkey-server") or shutil.which("redis-server")


def mooncake_binary() -> Path | None:
    """The master's, in the wheel."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        return None
    binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
    return binary if binary.exists() else None


def free_port() -> int:
    """One that nobody listens on now. Below the range for outgoing connections, as the bus port of
    a Redis cluster (10000 above) must be one, too."""
    while True:  # Ends: few of these ports are taken.
        port = 11_000 + int.from_bytes(os.urandom(2), "big") % 9_000
        with contextlib.closing(socket.socket()) as tried, contextlib.suppress(OSError):
            tried.bind((_HOST, port))
            return port


@contextlib.contextmanager
def apart() -> Iterator[set[int]]:
    """Cores for servers; the calling thread, and those that it starts meanwhile, have the others.

    As if they were machines of their own. Else the scheduler decides a figure: a sender and its
    server on one core, though another was idle, took 40 ms for what took 24 on two. With one core
    that is left as it is.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) // 2
    ours, theirs = (cores[:-count], cores[-count:]) if count else (cores, cores)
    with _on(set(ours)):
        yield set(theirs)


@contextlib.contextmanager
def redis_server(binary: str, folder: Path, cores: set[int] | None = None) -> Iterator[int]:
    """The port of one without a disk, on these cores."""
    port = free_port()
    words = [binary, "--bind", _HOST, "--port", str(port), "--dir", str(folder)]
    words += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    with _process(words, folder / "redis.log", cores) as process:
        _wait_listening(process, port, folder / "redis.log")
        yield port


@contextlib.contextmanager
def mooncake_cluster(
    binary: Path, folder: Path, segment_bytes: int, cores: set[int] | None = None
) -> Iterator[str]:
    """The address of a master; another process lends so much memory, so that bytes take TCP. Both
    on these cores."""
    port = free_port()
    words = [str(binary), f"--rpc_port={port}", f"--rpc_address={_HOST}"]
    words += [f"--metrics_host={_HOST}", f"--metrics_port={free_port()}"]
    log = folder / "mooncake.log"
    with _process(words, log, cores) as master:
        _wait_listening(master, port, log)
        address = f"{_HOST}:{port}"
        lender_words = [sys.executable, "-c", _LENDER, address, str(segment_bytes)]
        with _process(lender_words, folder / "lender.log", cores) as lender:
            assert lender.stdout is not None, "stdout is a pipe"
            if lender.stdout.readline().strip() != b"LENDS":
                raise Unavailable("nobody could lend memory to Mooncake")
            yield address


@contextlib.contextmanager
def _process(
    words: Sequence[str], log: Path, cores: set[int] | None
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
    with deferred_interrupts(), log.open("ab") as errors, _on(cores):
        # Its own session: ctrl-C goes to us alone, and we end it in order.
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if words[0] == sys.executable else errors,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_process(process)


@contextlib.contextmanager
def _on(cores: set[int] | None) -> Iterator[None]:
    """The calling thread, and whom it starts, on these cores; None: as they are."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port)):
            return
        time.sleep(0.02)
    last = log.read_text(errors="replace").splitlines()[-3:]
    raise Unavailable("a server did not start: " + " | ".join(last))
