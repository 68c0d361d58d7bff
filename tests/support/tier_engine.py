"""One engine with more chains than any tier holds: it asks, waits, compares, offloads what is
missing, and counts. Used as a program; each second it prints a line of JSON with its counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from kvtier.client import Client, ClientSettings
from kvtier.errors import KVTierError
from kvtier.types import CommitOutcome
from tests.support.daemon import RunningDaemon
from tests.support.known_blocks import (
    chain_hashes,
    check_payload,
    payload_of,
    read_leased,
    spec_of,
)

WAIT_SECONDS = 0.5
LEASE_SECONDS = 10.0
TELL_SECONDS = 0.5
HOT_SHARE, HOT_CHANCE = 0.04, 0.6  # So many of the chains get so many of the calls.
HOT_HASHES_LABEL = "always"
PROBE_SECONDS = 0.02
# What an engine starves without; told is for how many turns on end at most, "_hungry_max".
FED = ("dram_hits", "nvme_hits", "offloaded")
NICENESS = 10


@dataclass(frozen=True)
class Work:
    """What this engine does."""

    salt: str
    shard_bytes: int
    chain_count: int
    chain_blocks: int
    seed: int
    is_prober: bool  # Asks for one chain in memory, and does nothing else.


class Worker:
    """Runs until its process is killed."""

    def __init__(self, socket: str, work: Work) -> None:
        self._work = work
        self._rng = random.Random(work.seed)
        settings = ClientSettings(timeout_seconds=5.0)
        self._client = Client(socket, settings=settings)
        self._namespace = self._client.open_namespace(spec_of(work.salt, work.shard_bytes))
        self._counts: Counter[str] = Counter()
        self._fed_turn: Counter[str] = Counter()  # The last turn in which a count rose.
        self._told_at = 0.0

    def run(self) -> None:
        assert self._client.wait_namespace(self._namespace, 30)
        if self._work.is_prober:
            self._offload(chain_hashes(HOT_HASHES_LABEL, 1), 0)
        while True:  # Until this process is killed.
            if self._work.is_prober:
                self._probe()
                time.sleep(PROBE_SECONDS)
            else:
                self._turn()
            now = time.monotonic()
            if now - self._told_at >= TELL_SECONDS:
                self._told_at = now
                sys.stdout.write(json.dumps(self._counts) + "\n")
                sys.stdout.flush()

    def _turn(self) -> None:
        """One request: what is resident is onboarded, the rest offloaded."""
        label = f"{self._work.salt}/{self._chain()}"
        hashes = chain_hashes(label, self._work.chain_blocks)
        before = self._counts.copy()
        try:
            done = self._onboard(hashes)
            self._offload(hashes, done)
        except KVTierError as error:
            self._counts[f"refused_{type(error).__name__}"] += 1
        self._counts["turns"] += 1
        for name in FED:
            if self._counts[name] > before[name]:
                self._fed_turn[name] = self._counts["turns"]
            if self._counts[name]:  # Nobody has hits in empty tiers.
                hungry = self._counts["turns"] - self._fed_turn[name]
                most = f"{name}_hungry_max"
                self._counts[most] = max(self._counts[most], hungry)

    def _chain(self) -> int:
        count = self._work.chain_count
        if self._rng.random() < HOT_CHANCE:
            return self._rng.randrange(max(1, int(count * HOT_SHARE)))
        return self._rng.randrange(count)

    def _onboard(self, hashes: list[bytes]) -> int:
        client, namespace = self._client, self._namespace
        lease = client.acquire(
            namespace, hashes, wait_seconds=WAIT_SECONDS, lease_seconds=LEASE_SECONDS
        )
        try:
            found = read_leased(client, namespace, lease)
        finally:
            client.release([lease])
        for one, data in zip(hashes, found or [], strict=False):
            check_payload(one, data, "onboarded")
        for tier, count in lease.tiers:
            self._counts[f"{tier}_hits"] += count
        self._counts["asked"] += len(hashes)
        self._counts[f"cut_{lease.cut.name.lower()}"] += 1
        return lease.leased_count

    def _offload(self, hashes: list[bytes], done: int) -> None:
        client, namespace = self._client, self._namespace
        while done < len(hashes):
            began = time.monotonic()
            while not len((given := client.reserve(namespace, len(hashes) - done)).slots):
                self._note_max("reserve_ms_max", began)
                time.sleep(0.005)
            self._note_max("reserve_ms_max", began)
            now = hashes[done : done + len(given.slots)]
            with client.arena(namespace).hold(given.slots, given.session) as views:
                for view, one in zip(views, now, strict=True):
                    view[:] = payload_of(one, len(view))
            outcomes = client.commit(
                namespace,
                now,
                given.slots,
                parent=hashes[done - 1] if done else None,
                session=given.session,
                epoch=given.epoch,
            )
            self._counts["offloaded"] += outcomes.count(CommitOutcome.READY)
            done += len(now)
            if CommitOutcome.READY not in outcomes and CommitOutcome.PRESENT not in outcomes:
                return  # The parent has gone meanwhile.

    def _probe(self) -> None:
        hashes = chain_hashes(HOT_HASHES_LABEL, 1)
        began = time.monotonic()
        lease = self._client.acquire(self._namespace, hashes)
        self._note_max("probe_ms_max", began)
        self._client.release([lease])
        self._counts["probes"] += 1
        if not lease.leased_count:  # Its slab was given to the other namespace.
            self._counts["probe_misses"] += 1
            self._offload(hashes, self._onboard(hashes))

    def _note_max(self, name: str, began: float) -> None:
        self._counts[name] = max(self._counts[name], int(1000 * (time.monotonic() - began)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("work", help="JSON")
    options = parser.parse_args()
    work = Work(**json.loads(options.work))
    if not work.is_prober:
        os.nice(NICENESS)  # It is the daemon's work that is measured, not who gets the cores.
    with contextlib.suppress(KeyboardInterrupt):
        Worker(options.socket, work).run()


# ---------------------------------------------------------------------------- in the test's process


@dataclass
class TierEngine:
    """A process that works, and every line of counts that it has told, with the time."""

    work: Work
    process: subprocess.Popen[str]
    told: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return self.told[-1][1] if self.told else {}

    def longest_still(self, name: str, since: float) -> float:
        """For how many seconds at most this count did not rise."""
        longest, risen_at, count = 0.0, since, 0
        for at, counts in self.told:
            if counts.get(name, 0) > count:
                longest = max(longest, at - risen_at)
                risen_at, count = max(since, at), counts[name]
        return max(longest, time.monotonic() - risen_at)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append((time.monotonic(), json.loads(line)))


@contextlib.contextmanager
def running_engine(daemon: RunningDaemon, work: Work) -> Iterator[TierEngine]:
    """Such a process, killed at the end; it must not end before."""
    words = [sys.executable, "-m", __name__, str(daemon.socket), json.dumps(asdict(work))]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    one = TierEngine(work, process)
    listener = threading.Thread(target=one.listen, name="listener")
    listener.start()
    try:
        yield one
        assert process.poll() is None, "an engine has ended: wrong bytes, or an error"
    finally:
        process.kill()
        process.wait()
        listener.join()
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    main()
