"""One engine of `kvtier bench churn`: plays turns of conversations against the daemon."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np

from kvtier.cli.connect import TOOL_SETTINGS, open_namespace
from kvtier.cli.peer import Order, serve_engine
from kvtier.client.client import Client
from kvtier.errors import StaleSlot, TierFull, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Role

T = TypeVar("T")

CALLS = ("match", "acquire", "release", "reserve", "commit", "abort", "hint")
_MARK_BYTES = 32  # A block begins with its hash, so that a wrong one is told.
_SAMPLE_COUNT = 5_000  # Times kept a call; above that a random part of them.
_ABORT_SHARE = 0.1
_END_SHARE = 0.05
_POPULAR = 0.5  # Exponent of the Pareto distribution of conversations.
_WAIT_TRIES = 200


class _Engine:
    def __init__(self, order: Order) -> None:
        self._chance = random.Random(int(str(order["seed"])))
        self._conversations = int(str(order["conversations"]))
        self._blocks = int(str(order["blocks"]))
        self._client = Client(
            str(order["socket"]), role=Role.BOTH, name="bench churn", settings=TOOL_SETTINGS
        )
        if not self._client.wait_connected(10.0):
            raise Unavailable("an engine of the benchmark found no daemon")
        spec = _spec_of(int(str(order["block_bytes"])), str(order["salt"]))
        self._namespace = open_namespace(self._client, spec)
        self._arena = self._client.arena(self._namespace)
        self.counts: Counter[str] = Counter()
        self.times_ms: dict[str, list[float]] = {name: [] for name in CALLS}
        self._wait_slots()

    def play(self, seconds: float) -> None:
        """Turns until the time is over; then the session ends in order."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self._turn()
            except (Unavailable, TierFull, StaleSlot):
                self.counts["failed_calls"] += 1
            self.counts["turns"] += 1
        self._client.close()

    # ------------------------------------------------------------------------------------ turns

    def _turn(self) -> None:
        conversation = int(self._chance.paretovariate(_POPULAR)) % self._conversations
        hashes = _chain(conversation, self._blocks)[: self._chance.randint(1, self._blocks)]
        namespace, client = self._namespace, self._client
        found = self._timed("match", lambda: client.match(namespace, hashes))
        self.counts["asked_blocks"] += len(hashes)
        self.counts["hit_blocks"] += found.matched_count
        have = self._onboard(hashes[: found.matched_count]) if found.matched_count else 0
        if have < len(hashes):
            self._offload(hashes, have)
        if self._chance.random() < _END_SHARE:
            self._timed("hint", lambda: client.hint(namespace, hashes, session_end=True))

    def _onboard(self, hashes: list[bytes]) -> int:
        """Lease, read and compare; how many blocks were leased."""
        client = self._client
        lease = self._timed("acquire", lambda: client.acquire(self._namespace, hashes))
        try:
            with self._arena.hold(lease.slots, lease.session) as views:
                for wanted, view in zip(hashes, views, strict=False):
                    self.counts["wrong_blocks"] += bytes(view[:_MARK_BYTES]) != wanted
                    self.counts["read_blocks"] += 1
        finally:
            self._timed("release", lambda: client.release([lease]))
        return lease.leased_count

    def _offload(self, hashes: list[bytes], have: int) -> None:
        """Blocks from position `have` on, as far as there are slots."""
        client, namespace = self._client, self._namespace
        wanted = len(hashes) - have
        taken = self._timed("reserve", lambda: client.reserve(namespace, wanted))
        if not len(taken.slots):
            return
        part = hashes[have : have + len(taken.slots)]
        with self._arena.hold(taken.slots, taken.session) as views:
            for block_hash, view in zip(part, views, strict=True):
                np.copyto(view[:_MARK_BYTES], np.frombuffer(block_hash, dtype=np.uint8))
        if self._chance.random() < _ABORT_SHARE:
            self._timed(
                "abort", lambda: client.abort(namespace, taken.slots, session=taken.session)
            )
            return
        outcomes = self._timed(
            "commit",
            lambda: client.commit(
                namespace,
                part,
                taken.slots,
                parent=hashes[have - 1] if have else None,
                session=taken.session,
                epoch=taken.epoch,
            ),
        )
        self.counts["committed_blocks"] += outcomes.count(CommitOutcome.READY)

    # ---------------------------------------------------------------------------------- helpers

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        answer = call()
        milliseconds = 1e3 * (time.perf_counter() - started)
        self.counts[name] += 1
        times = self.times_ms[name]
        if len(times) < _SAMPLE_COUNT:
            times.append(milliseconds)
        elif (place := self._chance.randrange(self.counts[name])) < _SAMPLE_COUNT:
            times[place] = milliseconds  # Each call has the same chance to be kept.
        return answer

    def _wait_slots(self) -> None:
        for _ in range(_WAIT_TRIES):
            taken = self._client.reserve(self._namespace, 1)
            if len(taken.slots):
                self._client.abort(self._namespace, taken.slots, session=taken.session)
                return
            time.sleep(0.025)
        raise TierFull("the daemon gives no slots: raise --pool-bytes")


def _play(engine: _Engine, order: Order) -> Order:
    engine.play(float(str(order["seconds"])))
    return {"counts": dict(engine.counts), "times_ms": engine.times_ms}


@cache
def _chain(conversation: int, count: int) -> list[bytes]:
    """The same in every engine. Conversations share no prefix."""
    found: list[bytes] = []
    parent = f"conversation {conversation}".encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        found.append(parent)
    return found


def _spec_of(block_bytes: int, salt: str) -> NamespaceSpec:
    return NamespaceSpec(
        model="bench-churn",
        weights="-",
        kv_dtype="bytes",
        layout="none",
        block_tokens=16,
        shard_bytes=max(_MARK_BYTES, block_bytes),
        salt=salt,
    )


if __name__ == "__main__":
    sys.exit(serve_engine(_Engine, _play))
