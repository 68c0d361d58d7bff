"""One long life of one daemon: sixteen clients come, go and are killed, tiers are in trouble, and
nothing that the daemon takes up grows.

Four tiers, filled in the warm-up, so that what is compared is a daemon that forgets as much as it
learns. Every byte is compared by who reads it. What is there by the daemon's own events is asked
for, and must come. test_soak.py is its counterpart: there the daemon itself is hung and killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from kvtier.pools.remote.files import MARK_NAME
from kvtier.types import Role
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.forms import is_torture, state_finding
from tests.support.four_tiers import four_tier_options, wait_four_tiers
from tests.support.known_blocks import chain_hashes, onboard, spec_of
from tests.support.kv_subscriber import Subscriber
from tests.support.mixed_load import CHAIN_BLOCKS_MAX
from tests.support.observer import SETTINGS
from tests.support.processes import Engine, Engines, engine_processes, eventually
from tests.support.session_churn import BLOCK_BYTES
from tests.support.vital_signs import Bounds, Sample, growth_of, take_sample, window_of

SESSIONS = 16
SALTS = [f"tenant {number}" for number in range(6)]
CLEARED = SALTS[0]
HOLDS = ("reserved", "held")
KNOWN_MAX = 3000  # Chains that the books are compared with.
USEFUL_SHARE_MIN = 0.95
SETTLED_FDS_MAX = 0  # More than before the clients came.
SETTLE_SECONDS_MAX = 30.0  # gRPC closes connections of who was killed in its own time.


@dataclass(frozen=True)
class Form:
    """How long, how many at once and how often; the tiers' sizes are what the warm-up can fill."""

    seconds: float
    processes: int
    pause_seconds: float
    life_seconds: float
    fault_seconds: float
    sample_seconds: float
    turn_seconds: float
    warm_share: float
    window_share: float
    scale: int  # Of the tiers.
    bounds: Bounds


SHORT = Form(
    7.0, 4, 0.15, 3.0, 0.7, 0.3, 0.02, 0.45, 0.25, 1, Bounds(0.02, 4 << 20, 24, math.inf, 0.0)
)
FULL_SECONDS = float(os.environ.get("KVTIER_LIFE_SECONDS", "3600"))
FULL = Form(
    FULL_SECONDS, 16, 0.45, 30.0, 4.0, 5.0, 0.1, 0.2, 0.15, 2, Bounds(0.02, 0, 8, 0.5, 0.002)
)


def options(folder: Path, scale: int) -> dict[str, str]:
    """Tiers of so many MiB; what is kept for replay and for `kvtier explain` is soon full."""
    tiers = four_tier_options(
        folder,
        cxl_bytes=scale * (4 << 20),
        nvme_bytes=scale * (12 << 20),
        remote_bytes=scale * (16 << 20),
        segment_bytes=1 << 20,
    )
    return {
        **tiers,
        "remote.known_bytes": f"{64 * scale}MiB",
        "remote.timeout_seconds": "1",
        "kv_events.bind": f"ipc://{folder}/events",
        "kv_events.replay_bind": f"ipc://{folder}/replay",
        "kv_events.buffer_bytes": "1MiB",
        "log.history_bytes": "256KiB",
        "lease.grace_seconds": "0.1",
        "lease.seconds_max": "10",
        "lease.margin_seconds": "0.5",
    }


class LongLife:
    """The clients, the faults, and who watches."""

    def __init__(
        self,
        daemon: RunningDaemon,
        engines: Engines,
        observer: tuple[Client, dict[str, Namespace]],
        folder: Path,
        form: Form,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.asked_count = self.useful_count = 0
        self.samples: list[Sample] = []
        self._daemon = daemon
        self._engines = engines
        self._client, self._namespaces = observer
        self._folder = folder
        self._form = form
        self._rng = random.Random(11)
        self._began = time.monotonic()
        self._chains: dict[str, tuple[str, int]] = {}  # Label -> salt, blocks.
        self._events = Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self._ends: dict[Callable[[], None], float] = {}  # What ends a fault, and when.
        self._processes: list[tuple[Engine, list[int]]] = []
        self._unread: dict[Engine, int] = {}
        for first in range(form.processes):
            self._launch(list(range(first, SESSIONS, form.processes)))
        self._live()
        eventually(self._is_complete, "the clients have begun", 120.0)

    def run(self) -> None:
        """For as long as the form says, from when the clients have begun."""
        form, began = self._form, time.monotonic()
        fault_at = began + form.fault_seconds
        sample_at = began
        while (now := time.monotonic()) < began + form.seconds:
            self._read_said()
            self._events.read(0.0)
            self._end_faults(now)
            if now >= sample_at:
                sample_at += form.sample_seconds
                self.samples.append(take_sample(self._daemon))
                self._daemon.http("/")
            if now >= fault_at:
                fault_at += self._rng.uniform(0.5, 1.5) * form.fault_seconds
                self._make_fault(now)
            self._ask_for_what_is_there()
            time.sleep(form.turn_seconds)

    def finish(self) -> None:
        """The faults end, then the clients, and the subscriber."""
        self._end_faults(float("inf"))
        self._read_said()
        for engine, _ in self._processes:
            engine.kill()
        self._read_said()
        eventually(self._is_settled, "nothing is reserved or held, nobody is there but us", 60.0)
        self._events.__exit__(None, None, None)

    # ---------------------------------------------------------------------------------- faults

    def _make_fault(self, now: float) -> None:
        faults: list[Callable[[float], None]] = [
            *(self.kill_client, self.kill_client, self.stop_client, self.stall_nvme),
            *(self.unmount_share, self.clear, self.explain),
        ]
        fault = self._rng.choice(faults)
        with contextlib.suppress(KVTierError):
            fault(now)
            self.done[fault.__name__] += 1

    def kill_client(self, now: float) -> None:
        number = self._rng.randrange(len(self._processes))
        engine, numbers = self._processes.pop(number)
        self._ends.pop(engine.resume, None)
        engine.kill()
        self._read_of(engine)
        del self._unread[engine]
        self._launch(numbers)
        self._live()

    def stop_client(self, now: float) -> None:
        engine, _ = self._rng.choice(self._processes)
        engine.stop()
        self._ends[engine.resume] = now + self._rng.uniform(0.1, 0.2 + self._form.fault_seconds)

    def stall_nvme(self, now: float) -> None:
        self._fault_file.write_text("stall")
        self._ends[self._heal_nvme] = now + self._rng.uniform(0.1, 0.3 * self._form.fault_seconds)

    def unmount_share(self, now: float) -> None:
        """As unmounted for a while: the breaker of the remote tier opens, and closes again."""
        if self._mount_share not in self._ends:
            (self._folder / "share" / MARK_NAME).rename(self._folder / "mark")
            self._ends[self._mount_share] = now + self._rng.uniform(
                0.1, 0.5 * self._form.fault_seconds
            )

    def clear(self, now: float) -> None:
        self._client.clear(self._namespaces[CLEARED])

    def explain(self, now: float) -> None:
        if self._chains:
            label, (_, count) = self._rng.choice(list(self._chains.items()))
            self._client.explain(block=chain_hashes(label, count)[-1])

    def _end_faults(self, now: float) -> None:
        for end, at in list(self._ends.items()):
            if at <= now:
                del self._ends[end]
                end()

    def _heal_nvme(self) -> None:
        self._fault_file.unlink()

    def _mount_share(self) -> None:
        (self._folder / "mark").rename(self._folder / "share" / MARK_NAME)

    @property
    def _fault_file(self) -> Path:
        return self._folder / "fault"

    # --------------------------------------------------------------------------------- clients

    def _launch(self, numbers: list[int]) -> None:
        engine = self._engines.launch(self._daemon.socket, role="SCHEDULER", name="long life")
        self._processes.append((engine, numbers))

    def _live(self) -> None:
        """Those who have started begin."""
        for engine, numbers in self._processes:
            if engine not in self._unread:
                engine.send(
                    "live",
                    numbers=numbers,
                    session_count=SESSIONS,
                    began=self._began,
                    salts=SALTS,
                    life_seconds=self._form.life_seconds,
                    pause_seconds=self._form.pause_seconds,
                )
                self._unread[engine] = 0

    def _is_complete(self) -> bool:
        """Each process's first session, ours, and most of the others, of which some are between
        two lives."""
        self._read_said()
        live = self._daemon.metrics()['kvtier_sessions{state="live"}']
        return live > self._form.processes + 0.75 * SESSIONS

    def _read_said(self) -> None:
        for engine in list(self._unread):
            self._read_of(engine)

    def _read_of(self, engine: Engine) -> None:
        said = list(engine.events)
        engine.events = []
        for one in said:
            self.said[one["event"]] += one.get("count", 1) if one["event"] == "hits" else 1
            assert one["event"] != "wrong", one
            if one["event"] == "stored" and one["count"]:
                self._chains[one["label"]] = one["salt"], one["count"]
            elif one["event"] == "evicting":
                self._chains.pop(one["label"], None)
        while len(self._chains) > KNOWN_MAX:
            del self._chains[next(iter(self._chains))]

    # -------------------------------------------------------------------------------- watching

    def _ask_for_what_is_there(self) -> None:
        """By the books of a subscriber, which hold what was acknowledged and is not evicted."""
        if not self._chains:
            return
        label = self._rng.choice(list(self._chains))
        salt, count = self._chains[label]
        hashes = chain_hashes(label, count)
        books = list(self._events.books.values())
        if not all(any(one in book for book in books) for one in hashes):
            return
        try:
            got = onboard(self._client, self._namespaces[salt], hashes, wait_seconds=5.0)
        except KVTierError as error:
            self.said[f"observer {type(error).__name__}"] += 1
            got = 0
        self._events.read(0.0)
        books = list(self._events.books.values())
        if got == count or all(any(one in book for book in books) for one in hashes):
            self.asked_count += count
            self.useful_count += got

    def _is_settled(self) -> bool:
        metrics = self._daemon.metrics()
        alone = sum(v for k, v in metrics.items() if k.startswith("kvtier_sessions{")) <= 1
        taken = [metrics[f'kvtier_tier_slots{{state="{one}",tier="dram"}}'] for one in HOLDS]
        return alone and not any(taken)


@pytest.fixture
def folder(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(socket_dir / "fault"))
    return socket_dir


@contextlib.contextmanager
def long_lived(folder: Path, scale: int) -> Iterator[RunningDaemon]:
    with running_daemon(
        dram_bytes=f"{12 * scale}MiB",
        slab_bytes="2MiB",
        options=options(folder, scale),
        program=PROGRAM,
    ) as daemon:
        wait_four_tiers(daemon)
        yield daemon


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(4500)
def test_a_daemon_takes_up_no_more_after_an_hour_than_when_it_was_warm(folder: Path) -> None:
    form = FULL if is_torture() else SHORT
    with long_lived(folder, form.scale) as daemon:
        with (
            Client(daemon.socket, role=Role.BOTH, name="observer", settings=SETTINGS) as client,
            engine_processes() as engines,
        ):
            assert client.wait_connected(30)
            namespaces = {salt: client.open_namespace(spec_of(salt, BLOCK_BYTES)) for salt in SALTS}
            assert all(client.wait_namespace(one, 30) for one in namespaces.values())
            client.check()  # By gRPC, and the next call by the lane: our connections are there.
            client.match(namespaces[CLEARED], chain_hashes("nobody's", 1))
            before = take_sample(daemon)
            life = LongLife(daemon, engines, (client, namespaces), folder, form)
            try:
                life.run()
                life.finish()
            finally:
                state(life, form)  # Of a run that failed, too.
            after = settled_sample(daemon, before.fds + SETTLED_FDS_MAX)
            metrics = daemon.metrics()
        checked = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "check", "--socket", str(daemon.socket)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    count = len(life.samples)
    width = max(2, int(form.window_share * count))
    first = window_of(life.samples[int(form.warm_share * count) :][:width])
    last = window_of(life.samples[-width:])
    grown = growth_of(first, last, form.bounds)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not grown, f"{grown}; first {first}; last {last}"
    kept = Counter(after.fd_kinds) - Counter(before.fd_kinds)
    assert after.fds <= before.fds + SETTLED_FDS_MAX, f"{before.fds} fds, then {after.fds}: {kept}"
    useful_min = USEFUL_SHARE_MIN * life.asked_count - CHAIN_BLOCKS_MAX  # One chain may be late.
    assert life.useful_count >= useful_min, f"{life.useful_count} of {life.asked_count}"
    assert life.asked_count, "nothing was there"
    tiers = ("dram", "cxl", "nvme", "remote")
    hits = {
        one: metrics[f'kvtier_hit_blocks_total{{call="acquire",tier="{one}"}}'] for one in tiers
    }
    assert all(hits.values()) or not is_torture(), hits


def settled_sample(daemon: RunningDaemon, fds_max: int) -> Sample:
    """When so few descriptors are left, or the time is over."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while (sample := take_sample(daemon)).fds > fds_max and time.monotonic() < deadline:
        time.sleep(0.2)
    return sample


def state(life: LongLife, form: Form) -> None:
    """The report: what was done, and each twelfth of the time."""
    done, said = dict(life.done), dict(life.said)
    lines = [f"{form.seconds:.0f} s, {form.processes} processes with {SESSIONS} clients: {done}."]
    lines.append(f"The clients said {said}.")
    lines.append(f"Of {life.asked_count} blocks there by the events {life.useful_count} came.")
    count = len(life.samples)
    edges = [round(place * count / 12) for place in range(13)]
    for low, high in pairwise(edges):
        if high - low >= 2:
            minutes = (life.samples[low].at - life.samples[0].at) / 60
            lines.append(f"From minute {minutes:.1f}: {window_of(life.samples[low:high])}.")
    state_finding("\n".join(lines))
