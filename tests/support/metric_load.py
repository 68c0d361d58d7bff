"""A load that every panel of the dashboards has something to say of: hits in all four tiers, misses
of several reasons, blocks by value, calls that are refused; at a pace that can be doubled."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.errors import KVTierError
from kvtier.types import Worth
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.four_tiers import four_tier_options, wait_four_tiers
from tests.support.known_blocks import chain_hashes, offload, payload_of, read_leased, spec_of

BLOCK_BYTES = 32 << 10
CHAIN = 8
DRAM_BYTES, CXL_BYTES, NVME_BYTES = 4 << 20, 8 << 20, 12 << 20
CHAINS = 88  # More than the tiers on this machine hold.
RECENT, LATELY = 5, 16  # Of each namespace: what DRAM holds, and with it CXL.
SALTS = ("chat", "code")
TURN_SECONDS = 0.04
PATIENT = ClientSettings(timeout_seconds=10.0)


@contextlib.contextmanager
def four_tiers(folder: Path) -> Iterator[RunningDaemon]:
    """DRAM, emulated CXL, NVMe, and a folder as the remote engine; all of them on."""
    options = four_tier_options(
        folder, cxl_bytes=CXL_BYTES, nvme_bytes=NVME_BYTES, segment_bytes=1 << 20
    )
    with running_daemon(dram_bytes=str(DRAM_BYTES), slab_bytes="2MiB", options=options) as daemon:
        wait_four_tiers(daemon)
        yield daemon


class MetricLoad:
    """Threads that each take a turn every TURN_SECONDS, if they can; a client of its own each."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self._daemon = daemon
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.bears_errors = False  # Set before faults are made.

    def fill(self) -> None:
        """Every chain was there once, and was used twice: it is in the lower tiers."""
        with self._client() as client:
            for salt in SALTS:
                namespace = self._open(client, salt)
                for number in range(CHAINS // len(SALTS)):
                    self._turn(client, namespace, chain_hashes(f"{salt} {number}", CHAIN))
                    self._turn(client, namespace, chain_hashes(f"{salt} {number}", CHAIN))

    def start(self) -> None:
        """One more thread."""
        thread = threading.Thread(target=self._run, args=(len(self._threads),))
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """All threads, when they have had their turns."""
        self._ends.set()
        for thread in self._threads:
            thread.join(30)
        assert not self.failures, self.failures

    def _run(self, seed: int) -> None:
        try:
            with self._client() as client:
                namespaces = [self._open(client, salt) for salt in SALTS]
                self._work(client, namespaces, random.Random(seed))
        except BaseException as error:
            self.failures.append(error)
            raise

    def _work(self, client: Client, namespaces: list[Namespace], chance: random.Random) -> None:
        due, number = time.monotonic(), 0
        while not self._ends.is_set():
            number += 1
            salt = chance.randrange(len(SALTS))
            # What was asked for lately is in the tiers above; the rest is far down.
            chain = chance.randrange(chance.choice([RECENT, LATELY, CHAINS // len(SALTS)]))
            hashes = chain_hashes(f"{SALTS[salt]} {chain}", CHAIN)
            if number % 4 == 0:
                hashes = chain_hashes(f"new {chance.random()}", CHAIN)
            try:
                self._turn(client, namespaces[salt], hashes)
                if number % 8 == 0:
                    self._turn_by_value(client, namespaces[salt], str(chance.random()))
            except (KVTierError, TimeoutError):
                if not self.bears_errors:
                    raise
                self._ends.wait(TURN_SECONDS)
            due += TURN_SECONDS
            self._ends.wait(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - TURN_SECONDS)

    def _turn(self, client: Client, namespace: Namespace, hashes: list[bytes]) -> None:
        client.match(namespace, hashes)
        lease = client.acquire(namespace, hashes, wait_seconds=5.0)
        try:
            read_leased(client, namespace, lease)
        finally:
            client.release([lease], Worth(0.01 * lease.leased_count, 0.01))
        if lease.leased_count < len(hashes):
            offload(client, namespace, hashes)

    def _turn_by_value(self, client: Client, namespace: Namespace, label: str) -> None:
        refused_call(client, namespace)
        block = chain_hashes(f"by value {label}", 1)[0]
        client.put(namespace, [(block, payload_of(block, BLOCK_BYTES))])
        client.get(namespace, [block])

    def _client(self) -> Client:
        return Client(self._daemon.socket, settings=PATIENT)

    def _open(self, client: Client, salt: str) -> Namespace:
        namespace = client.open_namespace(spec_of(salt, BLOCK_BYTES))
        assert client.wait_namespace(namespace, 20)
        return namespace


def refused_call(client: Client, namespace: Namespace) -> None:
    """One that ends in BadRequest."""
    with contextlib.suppress(KVTierError):
        client.hint(namespace, chain_hashes("any", 1), turn_kind="x" * 99)


@contextlib.contextmanager
def metric_load(daemon: RunningDaemon) -> Iterator[MetricLoad]:
    """One thread is at work."""
    load = MetricLoad(daemon)
    load.fill()
    load.start()
    try:
        yield load
    finally:
        load.stop()
