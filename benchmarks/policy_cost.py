"""What an eviction policy costs the daemon: CPU time of the core for each block that is touched.

`python -m benchmarks.policy_cost` plays the chat trace, its blocks cut into smaller ones of
`--block-tokens`, on one core with `lru` and one with `curves`, in turns, in one thread, with all
that the daemon tells its core: acquire, reserve, commit, release, ticks. No bytes, no transport.
Refits are done in the same thread, and counted; the daemon does them in another one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import numpy as np

from benchmarks.policies import TRACES
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.server.policies import policy_named
from kvtier.sim.replay import APART_SECONDS
from kvtier.sim.traces import TracedRequest
from kvtier.types import NamespaceId, PackedHashes, SlabId

_NS = NamespaceId(1)
_SLOT_BYTES = 4096
_SLAB_SLOTS = 4096
_TICK_SECONDS = 0.25
# So many requests of one core, then of the other.
_TURN_REQUESTS = 20


class Core:
    def __init__(self, policy: str, slot_count: int, block_tokens: int) -> None:
        slabs = -(-slot_count // _SLAB_SLOTS)
        config = ManagerConfig(
            slab_bytes=_SLOT_BYTES * _SLAB_SLOTS, slab_count_max=slabs, stock_divisor=1
        )
        self.manager = BlockManager(config, make_policy=policy_named(policy))
        self.touched_count = self.hit_count = self.cpu_ns = 0
        for slab in range(slabs):
            self._run(ev.SlabPopulated(SlabId(slab + 1)), 0.0)
        self._run(ev.NamespaceOpened(_NS, 1, 32, _SLOT_BYTES, 1, block_tokens=block_tokens), 0.0)
        self._ticked_at = 0.0

    def serve(self, hashes: PackedHashes, now: float) -> None:
        began = time.thread_time_ns()
        self._serve(hashes, now)
        self.cpu_ns += time.thread_time_ns() - began
        self.touched_count += len(hashes)

    def _serve(self, hashes: PackedHashes, now: float) -> None:
        while now - self._ticked_at > _TICK_SECONDS:
            self._ticked_at = max(self._ticked_at + _TICK_SECONDS, now - _TICK_SECONDS)
            self._run(ev.Tick(), self._ticked_at)
        found = self._run(ev.Acquire(DAEMON_SESSION, _NS, hashes, deadline=now + 30), now)
        (lease,) = (one for one in found if isinstance(one, ins.LeaseGranted))
        self.hit_count += lease.leased_count
        absent = hashes[lease.leased_count :]
        if lease.lease is not None:
            self._run(ev.Release(DAEMON_SESSION, (lease.lease,)), now)
        if absent:
            self._store(hashes, lease.leased_count, now)

    def _store(self, hashes: PackedHashes, first: int, now: float) -> None:
        mine = list(hashes[first:])
        parent = hashes[first - 1] if first else None
        found = self._run(ev.Reserve(DAEMON_SESSION, _NS, len(mine)), now)
        (reserved,) = (one for one in found if isinstance(one, ins.SlotsReserved))
        sums = np.ones(len(mine), np.uint64)
        self._run(
            ev.Commit(DAEMON_SESSION, _NS, mine, reserved.slots, parent, 1, checksums=sums), now
        )

    def _run(self, event: ev.Event, now: float) -> list[ins.Instruction]:
        found: list[ins.Instruction] = []
        waiting = [event]
        while waiting:
            for one in self.manager.handle(waiting.pop(), now):
                if isinstance(one, ins.Continue):
                    waiting.append(one.event)
                elif isinstance(one, ins.Refit):
                    result = one.work()
                    waiting.append(ev.Refitted(one.namespace, one.epoch, result))
                else:
                    found.append(one)
        return found


def packed(request: TracedRequest, parts: int) -> PackedHashes:
    """Each block of the trace as so many; unlike the trace's, their numbers look drawn."""
    hashes = b"".join(
        hashlib.blake2b(f"{block}/{part}".encode(), digest_size=32).digest()
        for block in request.blocks.tolist()
        for part in range(parts)
    )
    return PackedHashes(hashes, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--percent", type=float, default=10.0, help="pool, of different blocks")
    asked = parser.parse_args()
    trace = TRACES["chat"]()
    parts = trace.block_tokens // asked.block_tokens
    requests = [one for one in trace.requests if len(one.blocks)][: asked.requests]
    unique = len(np.unique(np.concatenate([one.blocks for one in requests])))
    slots = int(unique * parts * asked.percent / 100)
    cores = {name: Core(name, slots, asked.block_tokens) for name in ("lru", "curves")}
    print(f"load {os.getloadavg()[0]:.1f}; {len(requests)} requests, a pool of {slots} blocks")
    now = -np.inf
    for start in range(0, len(requests), _TURN_REQUESTS):
        turn = []
        for one in requests[start : start + _TURN_REQUESTS]:
            now = max(one.at, now + APART_SECONDS)
            turn.append((now, packed(one, parts)))
        for core in cores.values():
            for at, hashes in turn:
                core.serve(hashes, at)
    report(cores)
    print(f"load {os.getloadavg()[0]:.1f}")


def report(cores: dict[str, Core]) -> None:
    for name, core in cores.items():
        each = core.cpu_ns / 1e3 / core.touched_count
        print(
            f"{name}: {each:.2f} us a touched block, {core.touched_count} touched, "
            f"{core.hit_count / core.touched_count:.4f} hit"
        )


if __name__ == "__main__":
    main()
