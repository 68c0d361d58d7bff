"""A daemon whose memory a holder keeps, and what tests of a hot restart ask of it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from kvtier.client import Client, ClientSettings
from kvtier.types import Role
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.parking_places import HolderProcess
from tests.support.processes import Engine, eventually

# Waits of a test, not of a machine: leases of the former life end after a second.
OPTIONS = {"lease.seconds_max": "1", "lease.margin_seconds": "0.2", "lease.grace_seconds": "0.1"}
COUNT = 8
PATIENT = ClientSettings(timeout_seconds=10.0, admin_timeout_seconds=30.0)
TAKEN_OVER = "memory of the former life taken over"


@contextlib.contextmanager
def running_holder() -> Iterator[HolderProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    holder = HolderProcess(folder / "holder.sock")
    try:
        yield holder
    finally:
        if holder.process.poll() is None:
            holder.end(signal.SIGKILL)
        shutil.rmtree(folder)


def kept_daemon(
    holder: HolderProcess,
    options: Mapping[str, str] | None = None,
    *,
    dram_bytes: str = "64MiB",
    slab_bytes: str = "16MiB",
) -> AbstractContextManager[RunningDaemon]:
    kept = {"restart.holder": str(holder.path)}
    return running_daemon(
        dram_bytes=dram_bytes,
        slab_bytes=slab_bytes,
        options={**OPTIONS, **(options or {}), **kept},
    )


def matched(client: Client, label: str) -> int:
    namespace = client.open_namespace(spec_of(""))
    assert client.wait_namespace(namespace, 10)
    return client.match(namespace, chain_hashes(label, COUNT)).matched_count


def wait_matched(daemon: RunningDaemon, label: str, count: int = COUNT) -> None:
    """They are taken in after READY."""
    with Client(daemon.socket, role=Role.TOOL, settings=PATIENT) as client:
        eventually(lambda: matched(client, label) == count, f"{count} blocks of {label}")


def wait_mapped(engine: Engine) -> None:
    """And its calls pass again."""

    def is_back() -> bool:
        found = engine.ask("session")
        return found["session"] is not None and found["mapped"] > 0

    eventually(is_back, "the engine maps slabs")


def check(daemon: RunningDaemon) -> None:
    with Client(daemon.socket, role=Role.TOOL, settings=PATIENT) as client:
        assert client.wait_connected(10)
        assert list(client.check().violations) == []


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()


def end(daemon: RunningDaemon) -> None:
    assert daemon.terminate() == 0
