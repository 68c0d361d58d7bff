"""Three lives of a daemon on one disk: all that the NVMe tier does, step by step, and what came of
it. Every call of the engine is timed and must not raise; every byte is compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.config import Config, load
from kvtier.errors import ConfigError
from kvtier.metrics.labels import NVME_STATES
from kvtier.server.leasing import GET_WAIT_SECONDS
from tests.e2e.client.conftest import Stall, eventually
from tests.support.inner_daemon import live
from tests.support.known_blocks import (
    chain_hashes,
    check_payload,
    offload,
    onboard,
    payload_of,
    read_leased,
    spec_of,
)
from tests.support.nvme_daemon import got_count
from tests.support.troubled_disk import Disk, Trouble

CHAIN = 5
PREFETCHED_MIN = 4
FIRST = ["first0", "first1", "first2", "first3", "first4", "first5", "put"]
SECOND = ["second0", "second1"]
# Longer than a busy machine takes; shorter than a stall, where there is one.
WAIT_SECONDS = 3.0
STALLED_WAIT_SECONDS = 0.5
SETTLE_SECONDS_MAX = 10.0
TROUBLED_SECONDS = 0.5
HOT_PAUSE_SECONDS = 0.005
TIMEOUT_SECONDS = 20.0  # Of a busy machine: how long calls take is told by `overtime`.


@dataclass
class Life:
    """What one life told."""

    hits: dict[str, int] = field(default_factory=dict)  # By chain that was asked for: blocks.
    state: str = ""  # Of the tier, at the end; empty when the start was refused.
    refusal: str = ""
    was_hit: bool = False  # The trouble had come by its end, before the close.
    log_lines: list[str] = field(default_factory=list)  # Of the tier, about trouble.

    @property
    def short(self) -> list[str]:
        """Chains of which a part was missing."""
        return [name for name, count in self.hits.items() if count < CHAIN]


@dataclass
class Told:
    """What one run told."""

    lives: list[Life] = field(default_factory=list)
    safe: list[str] = field(default_factory=list)  # On the disk, by all signs, before the trouble.
    overtime: dict[str, float] = field(default_factory=dict)  # By call: beyond what it may take.
    hot_seconds: float = 0.0  # The slowest acquire of what is in memory.
    hot_hits: int = 0
    hot_misses: int = 0
    pause_seconds: float = 0.0  # The longest time for which this machine did not let us run.


class Script:
    """`run` once; `disk` says what goes wrong."""

    def __init__(self, directory: Path, disk: Disk, pool: Path) -> None:
        self.told = Told()
        self._directory = directory
        self._disk = disk
        self._client: Client
        self._namespace: Namespace
        self._config = _config(directory, pool)

    def run(self) -> Told:
        self._live(1, self._fill_and_read)
        self._live(2, self._read_and_go_on)
        self._disk.heal()
        self._live(3, self._read_all)
        return self.told

    # ----------------------------------------------------------------------------------- lives

    def _live(self, life: int, steps: Callable[[], None]) -> None:
        self._disk.life = life
        self.told.lives.append(Life())

        def script() -> None:
            with self._connected():
                steps()
                self._end_life()

        with Stall() as pauses, _logged(self._life.log_lines):
            try:
                live(self._config, self._disk.open_driver, script)
            except ConfigError as error:
                self._life.refusal = str(error)
        self.told.pause_seconds = max(self.told.pause_seconds, pauses.seconds)

    @property
    def _life(self) -> Life:
        return self.told.lives[-1]

    def _fill_and_read(self) -> None:
        with self._asking_for_hot():
            for one, name in enumerate(FIRST[:-1]):
                self._offload(name)
                assert self._onboard(name) == CHAIN, "it has just been put into memory"
                if one % 2:
                    self._settle(FIRST[: one + 1])
            self._put(FIRST[-1])
            self._settle(FIRST)
            self._acquire(FIRST[0])  # Evicted by now, as the next ones are.
            self._get(FIRST[1])
            self._prefetch(FIRST[2])
            self._match(FIRST[3])

    def _read_and_go_on(self) -> None:
        self._acquire(FIRST[5])
        with self._asking_for_hot():
            self._get(FIRST[4])
            self._acquire(FIRST[3])
            for name in SECOND:
                self._offload(name)
            self._settle([*FIRST, *SECOND])
            assert self._onboard(SECOND[-1]) == CHAIN, "it has just been put into memory"

    def _read_all(self) -> None:
        for name in [*FIRST, *SECOND]:
            self._get(name)

    # ----------------------------------------------------------------------------------- steps

    def _offload(self, name: str) -> None:
        hashes = chain_hashes(name, CHAIN)
        done = offload(self._client, self._namespace, hashes)
        assert done == CHAIN, f"{name}: {done} blocks were taken"

    def _put(self, name: str) -> None:
        blocks = [(one, payload_of(one)) for one in chain_hashes(name, CHAIN)]
        with self._timed("put", 0.0):
            done = self._client.put(self._namespace, blocks)
        assert done.ready_count == CHAIN, done

    def _onboard(self, name: str) -> int:
        with self._timed("acquire", 0.0):
            return onboard(self._client, self._namespace, chain_hashes(name, CHAIN))

    def _acquire(self, name: str) -> None:
        """Wait for what must come up."""
        hashes = chain_hashes(name, CHAIN)
        seconds = STALLED_WAIT_SECONDS if self._disk.trouble is Trouble.STALL else WAIT_SECONDS
        with self._timed("acquire and wait", seconds):
            lease = self._client.acquire(self._namespace, hashes, wait_seconds=seconds)
        found = read_leased(self._client, self._namespace, lease)
        self._client.release([lease])
        for one, data in zip(hashes, found or [], strict=False):
            check_payload(one, data, "onboarded from NVMe")
        self._note(name, lease.leased_count)

    def _get(self, name: str) -> None:
        with self._timed("get", GET_WAIT_SECONDS):
            count = got_count(self._client, self._namespace, chain_hashes(name, CHAIN))
        self._note(name, count)

    def _prefetch(self, name: str) -> None:
        hashes = chain_hashes(name, CHAIN)
        with self._timed("prefetch", 0.0):
            self._client.prefetch(self._namespace, hashes)
        deadline = time.monotonic() + WAIT_SECONDS
        # A prefetch may have an eighth of the memory, which is a block less than a chain.
        want_count = PREFETCHED_MIN
        while (found := self._match_of(hashes)[1]) < want_count and time.monotonic() < deadline:
            time.sleep(0.01)
        self._note(name, CHAIN if found >= want_count else found)

    def _match(self, name: str) -> None:
        self._note(name, self._match_of(chain_hashes(name, CHAIN))[0])

    def _match_of(self, hashes: list[bytes]) -> tuple[int, int]:
        with self._timed("match", 0.0):
            found = self._client.match(self._namespace, hashes)
        return found.matched_count, found.memory_count

    def _settle(self, names: list[str]) -> None:
        """Until nothing is on its way to the disk, or nothing can be any more. What then is on it
        is safe unless the trouble has come before."""
        began = time.monotonic()
        want_count = CHAIN * len(names) + self._disk.life  # And what is hot.
        while not self._disk.is_stalling and self._state() == "on":
            found = self._client.stats().counters
            below_count = found['kvtier_tier_blocks{tier="nvme"}']
            # After trouble it may never become clean, or not all of them come down.
            seconds_max = TROUBLED_SECONDS if self._disk.is_hit else SETTLE_SECONDS_MAX
            if below_count >= want_count and found["kvtier_nvme_unwritten_table_bytes"] == 0:
                break
            if time.monotonic() > began + seconds_max:
                assert self._disk.is_hit, f"{below_count} of {want_count} blocks went down"
                break
            time.sleep(0.01)
        if not self._disk.is_hit:
            self.told.safe = names

    # --------------------------------------------------------------------------------- helpers

    @contextmanager
    def _connected(self) -> Iterator[None]:
        settings = ClientSettings(
            timeout_seconds=TIMEOUT_SECONDS, admin_timeout_seconds=TIMEOUT_SECONDS
        )
        with Client(self._directory / "socket", settings=settings) as self._client:
            self._namespace = self._client.open_namespace(spec_of())
            assert self._client.wait_namespace(self._namespace, TIMEOUT_SECONDS), "not opened"
            arena = self._client.arena(self._namespace)
            eventually(lambda: arena.mapped_slot_count > 0)
            eventually(lambda: self._state() != "recovering")
            yield

    @contextmanager
    def _asking_for_hot(self) -> Iterator[None]:
        """An engine whose block is in memory: whatever the disk does, it is served."""
        hashes = chain_hashes(f"hot{self._disk.life}", 1)
        offload(self._client, self._namespace, hashes)
        over = threading.Event()
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                while not over.wait(HOT_PAUSE_SECONDS):
                    began = time.monotonic()
                    hit_count = onboard(self._client, self._namespace, hashes)
                    seconds = time.monotonic() - began
                    self.told.hot_seconds = max(self.told.hot_seconds, seconds)
                    self.told.hot_hits += hit_count
                    self.told.hot_misses += hit_count < 1
            except BaseException as error:  # noqa: BLE001  # Raised again below.
                failed.append(error)

        asker = threading.Thread(target=ask, name="hot")
        asker.start()
        try:
            yield
        finally:
            over.set()
            asker.join()
        if failed:
            raise failed[0]

    @contextmanager
    def _timed(self, what: str, seconds_max: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        over = time.monotonic() - began - seconds_max
        self.told.overtime[what] = max(over, self.told.overtime.get(what, over))

    def _note(self, name: str, count: int) -> None:
        self._life.hits[name] = count

    def _end_life(self) -> None:
        violations = self._client.check().violations
        assert not violations, violations
        self._life.state = self._state()
        self._life.was_hit = self._disk.is_hit and self._disk.trouble is not None

    def _state(self) -> str:
        """The tier's, as the metric has it."""
        found = self._client.stats().counters
        [state] = [one for one in NVME_STATES if found[f'kvtier_nvme_state{{state="{one}"}}'] == 1]
        return state


@contextmanager
def _logged(lines: list[str]) -> Iterator[None]:
    """Note what the daemon's log says of a tier in trouble."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Notes(logging.ERROR)
    logger = logging.getLogger("kvtier.server")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _config(directory: Path, pool: Path) -> Config:
    return load(
        None,
        {
            "server.socket": str(directory / "socket"),
            "server.state_dir": str(directory / "state"),
            "server.drain_seconds": "1",
            "dram.bytes": "4MiB",  # 32 blocks, of 42.
            "dram.slab_bytes": "2MiB",
            "nvme.paths": str(pool),
            "nvme.depth": "2",  # One may hang.
            "nvme.table_seconds": "0.05",
            "nvme.write_bytes_per_hour": "1TiB",
            "lease.grace_seconds": "0.1",
            "admin.address": "off",
        },
    )
