"""Engines that are killed, stopped and continued, a daemon that hangs and dies, clears, evictions.

All of it at random, from one seed; every second the invariants are checked, every byte that is read
is compared, and at the end everything is free again and the daemon has not grown.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import KVTierError
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import is_torture, state_finding
from tests.support.known_blocks import chain_hashes, payload_of
from tests.support.observer import Observer, observing
from tests.support.processes import Engine, Engines, engine_processes, eventually

SHORT_SECONDS = 12.0
FULL_SECONDS = float(os.environ.get("KVTIER_SOAK_SECONDS", "300"))
# A stopped engine outlasts its leases: what it read then must not count.
OPTIONS = {
    "lease.grace_seconds": "0.1",
    "lease.seconds_max": "1",
    "lease.margin_seconds": "0.5",
    "server.sessions_max": "64",
}
STOP_SECONDS_MAX = 3.0
SALTS = ["", "", "other"]  # Of the engines that run at once.
RESTART_SHARES = (0.15, 0.3)  # Early: the last daemon must have time to grow, if it does.
FDS_GROWTH_MAX = 8
THREADS_GROWTH_MAX = 12  # What the event loop's pool of threads may grow to.
ANON_GROWTH_MIB_MAX = 64.0
HITS_MIN_PER_SECOND = 5.0


def growth_of(daemon: RunningDaemon) -> dict[str, float]:
    """Descriptors, threads and private memory of the daemon; the pool is shared memory."""
    folder = Path(f"/proc/{daemon.process.pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    return {
        "fds": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "anon_mib": int(status["RssAnon"].split()[0]) / 1024,
    }


class Soak:
    """The world, and what may happen to it."""

    def __init__(
        self, daemon: RunningDaemon, engines: Engines, observers: dict[str, Observer], seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.hit_count = 0
        self._daemon = daemon
        self._engines = engines
        self._observers = observers
        self._running: list[tuple[Engine, str, int]] = []  # With its salt and seed.
        self._starting: list[tuple[Engine, str]] = []
        self._stopped: dict[int, tuple[float, Engine]] = {}  # By pid: when it goes on.
        self._seeds: dict[str, list[int]] = {salt: [] for salt in SALTS}
        self._events: Counter[str] = Counter()
        for salt in SALTS:
            self._launch(salt)

    # ------------------------------------------------------------------------------- happenings

    def step(self) -> None:
        """One thing happens."""
        self._take_started()
        self._resume_due()
        happenings: list[tuple[Callable[[], None], int]] = [
            (self.kill_engine, 3),
            (self.stop_engine, 4),
            (self.hang_daemon, 1),
            (self.clear, 1),
            (self.evict, 3),
            (self.put, 3),
            (self.read, 12),
        ]
        (happen,) = self.rng.choices(*zip(*happenings, strict=True))
        with contextlib.suppress(KVTierError):  # Such as a limit, or the daemon just hung.
            happen()
            self.done[happen.__name__] += 1

    def kill_engine(self) -> None:
        if self._running:
            engine, salt, _ = self._running.pop(self.rng.randrange(len(self._running)))
            self._stopped.pop(engine.pid, None)
            engine.kill()
            self._note(engine)
            self._launch(salt)

    def stop_engine(self) -> None:
        if self._running:
            engine, _, _ = self.rng.choice(self._running)
            engine.stop()
            until = time.monotonic() + self.rng.uniform(0.05, STOP_SECONDS_MAX)
            self._stopped[engine.pid] = (until, engine)

    def hang_daemon(self) -> None:
        """Long enough for the engines' calls to time out, so that they open new sessions."""
        self._daemon.stop()
        time.sleep(self.rng.uniform(0.0, 0.5))
        self._daemon.resume()

    def restart_daemon(self) -> None:
        self._daemon.restart()
        for observer in self._observers.values():
            observer.wait_back(60)
        self.done["restart_daemon"] += 1

    def clear(self) -> None:
        one = self._observer()
        one.client.clear(one.namespace)

    def evict(self) -> None:
        salt, label = self._some_chain()
        one = self._observers[salt]
        one.client.evict(one.namespace, chain_hashes(label, 8))

    def put(self) -> None:
        salt, label = self._some_chain()
        one, hashes = self._observers[salt], chain_hashes(label, 4)
        one.client.put(one.namespace, [(each, payload_of(each).tobytes()) for each in hashes])

    def read(self) -> None:
        salt, label = self._some_chain()
        self.hit_count += self._observers[salt].read_chain(label, 8)
        if self.rng.random() < 0.3:
            self.hit_count += self._observers[salt].get_chain(label, 8)

    # -------------------------------------------------------------------------------- checking

    def check(self) -> None:
        for one in self._observers.values():
            one.check()
        for engine, _, _ in self._running:
            assert engine.process.poll() is None, "an engine died of itself"
            assert engine.of_kind("wrong") == []

    def finish(self) -> None:
        """Everybody goes on and ends: some say Bye, some are killed."""
        for _, engine in self._stopped.values():
            engine.resume()
        self._stopped.clear()
        eventually(self._take_started, "the engines started", 120.0)
        for number, (engine, _, _) in enumerate(self._running):
            if number % 2:
                engine.ask("end_churn")
                engine.end()
            engine.kill()
            self._note(engine)
        for one in self._observers.values():
            one.wait_settled(60.0)

    @property
    def summary(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        events = ", ".join(f"{name} {count}" for name, count in sorted(self._events.items()))
        return f"{done}; {self.hit_count} blocks verified by the observer; engines: {events}"

    # --------------------------------------------------------------------------------- helpers

    def _observer(self) -> Observer:
        return self.rng.choice(list(self._observers.values()))

    def _some_chain(self) -> tuple[str, str]:
        salt = self.rng.choice(SALTS)
        seeds = self._seeds[salt][-4:] or [0]
        return salt, f"{self.rng.choice(seeds)}:{self.rng.randint(1, 60)}"

    def _launch(self, salt: str) -> None:
        options = {"salt": salt, "timeout_seconds": self.rng.choice([0.05, 0.3, 2.0])}
        self._starting.append((self._engines.launch(self._daemon.socket, **options), salt))

    def _take_started(self) -> bool:
        """Let engines that have started begin to churn; whether none is missing."""
        for engine, salt in list(self._starting):
            assert engine.process.poll() is None, "an engine ended instead of starting"
            if engine.of_kind("started"):
                self._starting.remove((engine, salt))
                seed = self.rng.randrange(1 << 40)
                others = self._seeds[salt][-4:]
                self._seeds[salt].append(seed)
                churn = {"seed": seed, "chain_count": 1 << 40, "pause_seconds": 0.004}
                engine.ask("churn", others=others, **churn)
                self._running.append((engine, salt, seed))
        return not self._starting

    def _resume_due(self) -> None:
        for pid, (until, engine) in list(self._stopped.items()):
            if until <= time.monotonic():
                del self._stopped[pid]
                engine.resume()

    def _note(self, engine: Engine) -> None:
        assert engine.of_kind("wrong") == []
        self._events["acked"] += len(engine.of_kind("acked"))
        self._events["hits"] += sum(one["count"] for one in engine.of_kind("hits"))
        self._events["refused"] += len(engine.of_kind("refused"))
        self.hit_count += sum(one["count"] for one in engine.of_kind("hits"))


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="32MiB", slab_bytes="4MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_soak(daemon: RunningDaemon) -> None:
    seconds = FULL_SECONDS if is_torture() else SHORT_SECONDS
    with (
        engine_processes() as engines,
        observing(daemon.socket) as one,
        observing(daemon.socket, "other", needs_slots=False) as other,
    ):
        first = growth_of(daemon)
        soak = Soak(daemon, engines, {"": one, "other": other}, seed=10)
        started = checked_at = time.monotonic()
        restarts = [started + seconds * share for share in RESTART_SHARES]
        while (now := time.monotonic()) < started + seconds:
            soak.step()
            if restarts and now >= restarts[0]:
                del restarts[0]
                soak.restart_daemon()
            if now >= checked_at + 1.0:
                checked_at = now
                soak.check()
            time.sleep(soak.rng.uniform(0.0, 0.1))
        soak.finish()
        last = growth_of(daemon)
    state_finding(f"{seconds:.0f} s: {soak.summary}; the daemon first {first}, last {last}")
    assert last["fds"] <= first["fds"] + FDS_GROWTH_MAX
    assert last["threads"] <= first["threads"] + THREADS_GROWTH_MAX
    assert last["anon_mib"] <= first["anon_mib"] + ANON_GROWTH_MIB_MAX
    assert soak.hit_count >= HITS_MIN_PER_SECOND * seconds
