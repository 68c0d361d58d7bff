"""Engine B of `kvtier bench transfer`: onboards what A has offloaded."""

from __future__ import annotations

import sys
import time

import numpy as np

from kvtier.checksum import shard_checksum
from kvtier.cli.bench_tree import unpack
from kvtier.cli.connect import TOOL_SETTINGS, open_namespace
from kvtier.cli.peer import Order, serve
from kvtier.cli.transfer_buffers import Buffers, spec_of
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.errors import KVTierError, Unavailable
from kvtier.types import Cut, Role

_MAP_TRIES = 200


class _EngineB:
    """Two orders: open, then onboard as often as wanted."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._namespace: Namespace | None = None
        self._buffers: Buffers | None = None

    def handle(self, order: Order) -> Order:
        if order["what"] == "open":
            self._open(order)
            return {}
        return self._onboard_beside_memcpy(order)

    def _open(self, order: Order) -> None:
        self._buffers = Buffers(int(str(order["count"])))
        self._buffers.fill()
        self._client = Client(
            str(order["socket"]), role=Role.BOTH, name="bench transfer B", settings=TOOL_SETTINGS
        )
        if not self._client.wait_connected(5.0):
            raise Unavailable("engine B found no daemon")
        self._namespace = open_namespace(self._client, spec_of(str(order["salt"])))

    def _onboard_beside_memcpy(self, order: Order) -> Order:
        assert self._buffers is not None, "opened first"
        hashes = unpack(bytes.fromhex(str(order["hashes"])))
        self._wait_mapped(hashes)
        is_memcpy_first = bool(order["is_memcpy_first"])
        memcpy_seconds = self._buffers.memcpy_seconds(len(hashes)) if is_memcpy_first else 0.0
        seconds = self._onboard(hashes)
        checksums = [shard_checksum(view) for view in self._buffers.target[: len(hashes)]]
        if not is_memcpy_first:
            memcpy_seconds = self._buffers.memcpy_seconds(len(hashes))
        return {"seconds": seconds, "memcpy_seconds": memcpy_seconds, "checksums": checksums}

    def _onboard(self, hashes: list[bytes]) -> float:
        assert self._client is not None, "opened first"
        assert self._namespace is not None, "opened first"
        assert self._buffers is not None, "opened first"
        target = self._buffers.target
        arena = self._client.arena(self._namespace)
        started = time.perf_counter()
        lease = self._client.acquire(self._namespace, hashes)
        with arena.hold(lease.slots, lease.session) as views:
            for place, view in enumerate(views):
                np.copyto(target[place], view)
        self._client.release([lease])
        seconds = time.perf_counter() - started
        if lease.leased_count != len(hashes):
            raise KVTierError(f"{lease.leased_count} of {len(hashes)} blocks were leased")
        return seconds

    def _wait_mapped(self, hashes: list[bytes]) -> None:
        """Slabs that A was given a moment ago are mapped here in the background."""
        assert self._client is not None, "opened first"
        assert self._namespace is not None, "opened first"
        for _ in range(_MAP_TRIES):
            lease = self._client.acquire(self._namespace, hashes)
            self._client.release([lease])
            if lease.cut is Cut.NONE:
                return
            time.sleep(0.025)
        raise KVTierError("engine B could not lease the blocks: raise --pool-bytes")


if __name__ == "__main__":
    sys.exit(serve(_EngineB().handle))
