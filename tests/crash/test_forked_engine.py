"""A forked child of an engine changes nothing: neither its life nor its death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes
from tests.support.observer import Observer, observing
from tests.support.processes import Engine, engine_processes


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    options = {"lease.grace_seconds": "0.1"}
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=options) as running:
        running.wait_populated()
        yield running


@pytest.fixture
def observer(daemon: RunningDaemon) -> Iterator[Observer]:
    with observing(daemon.socket) as found:
        yield found


def mapped_slab_count(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


def socket_count(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    return sum(str(one.readlink()).startswith("socket:") for one in folder.iterdir())


def begin_copy(engine: Engine, count: int) -> None:
    given = engine.ask("reserve", count=count)
    engine.ask("begin_copy", slots=given["slots"], session=given["session"])


# "bare" is a fork of C code, such as subprocess does: no handler of ours runs in the child, and it
# inherits the session socket.
@pytest.mark.parametrize("kind", ["python", "bare"])
def test_slots_return_though_a_child_of_the_dead_engine_lives_on(
    daemon: RunningDaemon, observer: Observer, kind: str
) -> None:
    with engine_processes() as engines:
        engine = engines.start(daemon.socket)
        assert engine.ask("offload", label=kind, count=3)["count"] == 3
        child = engine.ask("fork", kind=kind)
        engines.adopt_child(child["pid"])
        assert mapped_slab_count(engine.pid) > 0
        assert mapped_slab_count(child["pid"]) == 0
        if kind == "python":
            assert child["errors"] == ["Unavailable"] * 4
        begin_copy(engine, 2)
        assert observer.dram().reserved_count == 2
        engine.kill()
        observer.wait_settled()
        assert Path(f"/proc/{child['pid']}").exists(), "the child lives on"
        assert kind == "python" or socket_count(child["pid"]) > 0, "and has the session socket"
        assert observer.read_chain(kind, 3) == 3


@pytest.mark.parametrize("kind", ["python", "bare"])
def test_death_of_a_child_does_not_end_the_engines_session(
    daemon: RunningDaemon, observer: Observer, kind: str
) -> None:
    with engine_processes() as engines:
        engine = engines.start(daemon.socket)
        before = engine.ask("session")
        given = engine.ask("reserve", count=2)
        engine.ask("end_child", pid=engine.ask("fork", kind=kind)["pid"])
        assert engine.ask("session") == before
        hashes = [one.hex() for one in chain_hashes(f"parent-{kind}", 2)]
        assert engine.ask("commit", hashes=hashes, **given)["outcomes"] == ["READY"] * 2
        assert (
            observer.client.match(
                observer.namespace, chain_hashes(f"parent-{kind}", 2)
            ).matched_count
            == 2
        )
        engine.end()
    observer.wait_settled()
