"""One engine of `kvtier bench policy`: asks for chains and stores what is missing, at a rate."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace

from kvtier.cli.bench_fill import spec_of
from kvtier.cli.bench_talks import Talks
from kvtier.cli.bench_tree import HASH_BYTES
from kvtier.cli.connect import TOOL_SETTINGS, open_namespace
from kvtier.cli.peer import Order, serve_engine
from kvtier.client.client import Client
from kvtier.client.values import Reservation
from kvtier.errors import TierFull, Unavailable
from kvtier.types import Role

_STOCK_BLOCKS = 256  # Slots reserved ahead, as the connector does.
_STEP_TOKENS = 8_192  # What an engine computes at a time, and then commits.
_LATE_SECONDS_MAX = 0.5  # An engine that is behind does not make up for more.
_WAIT_TRIES = 400


class _Engine:
    def __init__(self, order: Order) -> None:
        block_tokens = int(str(order["block_tokens"]))
        self._talks = Talks(block_tokens=block_tokens, seed=int(str(order["seed"])))
        self._step_blocks = max(1, _STEP_TOKENS // block_tokens)
        self._client = Client(
            str(order["socket"]), role=Role.BOTH, name="bench policy", settings=TOOL_SETTINGS
        )
        if not self._client.wait_connected(10.0):
            raise Unavailable("an engine of the benchmark found no daemon")
        spec = spec_of(block_tokens, str(order["salt"]))
        slot_bytes = int(str(order["slot_bytes"]))
        self._namespace = open_namespace(self._client, replace(spec, shard_bytes=slot_bytes))
        self._stock: Reservation | None = None
        self._used = 0  # Of the stock's slots.
        self._touched_count = 0
        self.counts: Counter[str] = Counter()
        self._wait_slots()

    def play(self, seconds: float, blocks_per_second: float) -> None:
        began = due = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            if now < due:
                time.sleep(min(due, began + seconds) - now)
                continue
            # By what was asked for, not by the clock: every daemon is asked for the same.
            chain = self._talks.next_chain(self._touched_count / blocks_per_second)
            self._ask(chain)
            self.counts["requests"] += 1
            blocks = len(chain) // HASH_BYTES
            self.counts["touched_blocks"] += blocks
            self._touched_count += blocks
            due = max(due, now - _LATE_SECONDS_MAX) + blocks / blocks_per_second

    # --------------------------------------------------------------------------------- helpers

    def _ask(self, chain: bytes) -> None:
        """What an engine does with a request, but for the bytes."""
        client, namespace = self._client, self._namespace
        client.match(namespace, chain)
        lease = client.acquire(namespace, chain)
        self.counts["hit_blocks"] += lease.leased_count
        if lease.lease_id is not None:
            client.release([lease])
        done, step_bytes = lease.leased_count * HASH_BYTES, self._step_blocks * HASH_BYTES
        while done < len(chain):
            part = chain[done : done + step_bytes]
            committed = self._offload(part, chain[done - HASH_BYTES : done] if done else None)
            if not committed:
                self.counts["refused_blocks"] += (len(chain) - done) // HASH_BYTES
                return
            done += committed * HASH_BYTES

    def _offload(self, part: bytes, parent: bytes | None) -> int:
        """Commit of these blocks as many as there are slots for; how many."""
        stock = self._stock
        if stock is None or self._used == len(stock.slots):
            stock = self._client.reserve(self._namespace, _STOCK_BLOCKS)
            self._stock, self._used = stock, 0
        slots = stock.slots[self._used : self._used + len(part) // HASH_BYTES]
        if len(slots):
            self._client.commit(
                self._namespace,
                part[: len(slots) * HASH_BYTES],
                slots,
                parent=parent,
                session=stock.session,
                epoch=stock.epoch,
            )
            self._used += len(slots)
        return len(slots)

    def _wait_slots(self) -> None:
        for _ in range(_WAIT_TRIES):
            self._stock = self._client.reserve(self._namespace, 1)
            if len(self._stock.slots):
                return
            time.sleep(0.025)
        raise TierFull("the daemon gives no slots: raise --pool-blocks")


def _play(engine: _Engine, order: Order) -> Order:
    engine.counts.clear()
    engine.play(float(str(order["seconds"])), float(str(order["blocks_per_second"])))
    return {"counts": dict(engine.counts)}


if __name__ == "__main__":
    sys.exit(serve_engine(_Engine, _play))
