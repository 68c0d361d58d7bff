"""A million small blocks for benchmarks, committed by a real session run by run."""

from __future__ import annotations

import time

import numpy as np

from kvtier.checksum import block_checksum
from kvtier.cli.bench_tree import HASH_BYTES
from kvtier.client.client import Client
from kvtier.client.values import Namespace, Reservation
from kvtier.errors import TierFull
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome

SLOT_BYTES = 64
SLAB_BYTES = 16 << 20
_COMMIT_COUNT = 4096
_RESERVE_TRIES = 400


def spec_of(block_tokens: int, salt: str) -> NamespaceSpec:
    return NamespaceSpec(
        model="bench-match",
        weights="-",
        kv_dtype="bytes",
        layout="none",
        block_tokens=block_tokens,
        shard_bytes=SLOT_BYTES,
        hash_bytes=HASH_BYTES,
        salt=salt,
    )


class Filler:
    """Commits runs of blocks from a stock of slots."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._namespace = namespace
        self._stock: Reservation | None = None
        self._used = 0
        # The slots are zeros and stay so.
        self._checksum = block_checksum(bytes(SLOT_BYTES), SLOT_BYTES)
        self.committed_count = 0

    def commit_run(self, parent: bytes | None, packed: bytes) -> None:
        step_bytes = _COMMIT_COUNT * HASH_BYTES
        first = 0
        while first < len(packed):
            stock = self._stocked()
            left = stock.slots[self._used :]
            part = packed[first : first + min(step_bytes, len(left) * HASH_BYTES)]
            slots = left[: len(part) // HASH_BYTES]
            outcomes = self._client.commit(
                self._namespace,
                part,
                slots,
                parent=parent,
                session=stock.session,
                epoch=stock.epoch,
                checksums=np.full(len(slots), self._checksum, dtype=np.uint64),
            )
            self.committed_count += outcomes.count(CommitOutcome.READY)
            self._used += len(slots)
            parent = part[-HASH_BYTES:]
            first += len(part)

    def finish(self) -> None:
        """Give back what is left."""
        if self._stock is not None and self._used < len(self._stock.slots):
            left = self._stock.slots[self._used :]
            self._client.abort(self._namespace, left, session=self._stock.session)
        self._stock = None

    def _stocked(self) -> Reservation:
        """A stock with at least one slot; slabs are populated and mapped in the background."""
        if self._stock is not None and self._used < len(self._stock.slots):
            return self._stock
        for _ in range(_RESERVE_TRIES):
            self._stock = self._client.reserve(self._namespace, 4 * _COMMIT_COUNT)
            self._used = 0
            if len(self._stock.slots):
                return self._stock
            time.sleep(0.025)
        raise TierFull("the daemon gives no slots: its pool is too small or was not populated")


def budget_bytes(resident_count: int) -> int:
    """A tenth more than the blocks need, in whole slabs."""
    needed = resident_count * SLOT_BYTES * 11 // 10 + _COMMIT_COUNT * SLOT_BYTES
    slab_bytes = SLAB_BYTES if needed > SLAB_BYTES else 2 << 20
    return -(-needed // slab_bytes) * slab_bytes
