"""A scripted daemon and clients that are closed in any case."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import pytest

from kvtier.client import Client, ClientSettings, Namespace, SessionRef
from kvtier.namespace import NamespaceSpec
from tests.support.fake_daemon import FakeDaemon, Script

SPEC = NamespaceSpec("model", "weights", "bfloat16", "nhd", 16, 100_000)
PATIENT = ClientSettings(timeout_seconds=1.0, retry_seconds_max=0.2)

StartDaemon = Callable[..., FakeDaemon]
MakeClient = Callable[..., Client]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because a socket's path may have 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="kvt"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start_daemon(directory: Path) -> Iterator[StartDaemon]:
    started: list[FakeDaemon] = []

    def start(**script: object) -> FakeDaemon:
        started.append(FakeDaemon(directory, Script(**script)))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def make_client(directory: Path) -> Iterator[MakeClient]:
    made: list[Client] = []

    def make(address: Path | str | None = None, **options: object) -> Client:
        options.setdefault("settings", PATIENT)
        made.append(Client(address or directory / "kvtier.sock", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.close()


def ready(client: Client, daemon: FakeDaemon | None = None) -> Namespace:
    """The namespace, open; with a daemon, its slab mapped as well."""
    namespace = client.open_namespace(SPEC)
    assert client.wait_namespace(namespace, 10), "the namespace was not opened"
    if daemon is not None:
        daemon.wait_sent("slab_mapped")
    return namespace


def hashes(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed]) + index.to_bytes(31, "big") for index in range(count)]


def session_of(client: Client) -> SessionRef:
    assert client.session is not None, "there is no session"
    return client.session


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


class Stall:
    """Bracket that notes the longest time a thread of this process was not let run.

    On a busy machine a call returns late because nothing runs; that is not the client's doing, and
    a test of deadlines leaves it out.
    """

    seconds = 0.0

    def __enter__(self) -> Stall:
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        step = 0.001
        while not self._has_ended.is_set():
            started = time.monotonic()
            time.sleep(step)
            self.seconds = max(self.seconds, time.monotonic() - started - step)
