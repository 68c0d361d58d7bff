"""`kvtier bench transfer`: offload and onboard through an arena, against memcpy.

Two engines on one daemon: this process (A) offloads, a second one (B) onboards. Every round, for
each size, in both processes: memcpy of as many bytes between two buffers of the process, in pieces
of one block, right beside the offload or onboard. The buffers lie on the same kind of pages as the
pool. Each ratio is the median over the rounds of memcpy's time over ours; the best ratio beside it
compares the fastest rounds, those that other programs disturbed least.

An offload counts the copies, Commit, and the Reserve calls beyond the slots that were reserved
ahead (a session may hold 1 / (8 * sessions) of the pool). An onboard counts Acquire, the copies and
Release. B compares what it got with what A wrote, outside of the times.
"""

from __future__ import annotations

import argparse
import secrets
import time
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from kvtier.checksum import shard_checksum
from kvtier.cli import bench_run, measure
from kvtier.cli.connect import connected, open_namespace
from kvtier.cli.output import bytes_text, say
from kvtier.cli.peer import Peer, started_peer
from kvtier.cli.sizes import positive, size
from kvtier.cli.transfer_buffers import BLOCK_BYTES, Buffers, spec_of
from kvtier.client.client import Client
from kvtier.client.values import Reservation
from kvtier.errors import KVTierError, TierFull
from kvtier.io.budget import available_bytes
from kvtier.types import Role

TARGETS = {
    "offload_ratio": measure.Target(at_least=0.85),
    "onboard_ratio": measure.Target(at_least=0.85),
    "offload_ratio_64": measure.Target(at_least=0.75),
    "onboard_ratio_64": measure.Target(at_least=0.75),
}
_MIB = 1 << 20
_WARM_ROUNDS = 2
_WAIT_TRIES = 400
_CHECKSUM_QUEUE = "kvtier_checksum_queue_slots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=9, help="of each size (9)")
    parser.add_argument("--bytes", type=size, default=256 * _MIB, help="large size (256MiB)")
    parser.add_argument("--small-bytes", type=size, default=64 * _MIB, help="small size (64MiB)")
    parser.add_argument(
        "--pool-bytes",
        type=size,
        default=_pool_bytes(),
        help="of the private daemon (4GiB, half of it where memory is short)",
    )


@dataclass(slots=True)
class Timings:
    """Seconds of every round that counts, one list a measure."""

    offload: list[float] = field(default_factory=list)
    offload_memcpy: list[float] = field(default_factory=list)
    onboard: list[float] = field(default_factory=list)
    onboard_memcpy: list[float] = field(default_factory=list)
    reserve_calls: int = 0


def run(arguments: argparse.Namespace) -> int:
    options = {
        "dram.bytes": str(arguments.pool_bytes),
        "dram.slab_bytes": str(min(256 * _MIB, arguments.pool_bytes // 4 // 2**21 * 2**21)),
        "dram.watermark_stop": "1.0",
    }
    count = max(1, arguments.bytes // BLOCK_BYTES)
    small_count = max(1, arguments.small_bytes // BLOCK_BYTES)
    with (
        bench_run.bench_daemon(arguments, options) as daemon,
        connected(daemon.socket, role=Role.BOTH, name="bench transfer A") as client,
        started_peer("kvtier.cli.bench_transfer_peer") as peer,
    ):
        bench = _TransferBench(client, peer, max(count, small_count))
        bench.prepare(str(daemon.socket))
        large = bench.rounds(count, arguments.rounds)
        small = bench.rounds(small_count, arguments.rounds)
        page_kind = client.stats().tiers[0].page_kind
        figures = {
            **_figures(large, count, ""),
            **_figures(small, small_count, "_64"),
            "wrong_bytes": bench.wrong_count,
            "rounds": arguments.rounds,
            "block_bytes": BLOCK_BYTES,
            "bytes": count * BLOCK_BYTES,
            "small_bytes": small_count * BLOCK_BYTES,
            "pool_bytes": arguments.pool_bytes,
            "buffer_page_kind": bench.buffers.page_kind,
        }
    return bench_run.report(
        arguments, figures, TARGETS, page_kind=page_kind, is_wrong=bench.wrong_count > 0
    )


def _pool_bytes() -> int:
    """With 4 GiB each of two sessions may hold the slots of 256 MiB ahead, which is the rule."""
    available = available_bytes()
    return 2 << 30 if available is not None and available < 10 << 30 else 4 << 30


def _figures(timings: Timings, count: int, suffix: str) -> dict[str, object]:
    def speed(seconds: list[float]) -> float:
        return count * BLOCK_BYTES / median(seconds) / 1e9

    def ratio(ours: list[float], memcpy: list[float]) -> float:
        return median(theirs / mine for mine, theirs in zip(ours, memcpy, strict=True))

    def best_ratio(ours: list[float], memcpy: list[float]) -> float:
        return min(memcpy) / min(ours)

    return {
        f"offload_ratio{suffix}": ratio(timings.offload, timings.offload_memcpy),
        f"onboard_ratio{suffix}": ratio(timings.onboard, timings.onboard_memcpy),
        f"offload_gb_s{suffix}": speed(timings.offload),
        f"offload_memcpy_gb_s{suffix}": speed(timings.offload_memcpy),
        f"onboard_gb_s{suffix}": speed(timings.onboard),
        f"onboard_memcpy_gb_s{suffix}": speed(timings.onboard_memcpy),
        f"offload_best_ratio{suffix}": best_ratio(timings.offload, timings.offload_memcpy),
        f"onboard_best_ratio{suffix}": best_ratio(timings.onboard, timings.onboard_memcpy),
        f"reserve_calls{suffix}": timings.reserve_calls / len(timings.offload),
    }


class _TransferBench:
    def __init__(self, client: Client, peer: Peer, count_max: int) -> None:
        self._client = client
        self._peer = peer
        self._spec = spec_of(secrets.token_hex(8))
        self._namespace = open_namespace(client, self._spec)
        self._arena = client.arena(self._namespace)
        self._turn = 0
        self.buffers = Buffers(count_max)
        self.wrong_count = 0

    def prepare(self, socket: str) -> None:
        """Fill the source, start B, and have the whole pool bound to our namespace and mapped."""
        self.buffers.fill()
        self._peer.ask("open", socket=socket, salt=self._spec.salt, count=len(self.buffers.source))
        for _ in range(_WAIT_TRIES):
            stats = self._client.stats()
            (mine,) = [one for one in stats.namespaces if one.salt == self._spec.salt]
            if mine.slot_count * BLOCK_BYTES >= stats.tiers[0].budget_bytes:
                say(f"the pool stands: {bytes_text(stats.tiers[0].budget_bytes)}")
                return
            # Asking for more than there is makes the namespace grow by a slab. One that has been
            # used for a while has grown so.
            taken = self._client.reserve(self._namespace, mine.slot_count + 1)
            if len(taken.slots):
                self._client.abort(self._namespace, taken.slots, session=taken.session)
            time.sleep(0.05)
        raise TierFull("the daemon's pool was not populated in time, or others use it")

    def rounds(self, count: int, rounds: int) -> Timings:
        say(f"{rounds} rounds of {bytes_text(count * BLOCK_BYTES)}")
        timings = Timings()
        for turn in range(_WARM_ROUNDS + rounds):
            if turn == _WARM_ROUNDS:
                timings = Timings()  # What came before was warming up.
            self._round(count, timings)
        return timings

    def _round(self, count: int, timings: Timings) -> None:
        self._turn += 1
        self.buffers.stamp(self._turn)
        hashes = [secrets.token_bytes(self._spec.hash_bytes) for _ in range(count)]
        ahead = self._reserve_ahead(count)
        # Who goes first changes: whatever the one leaves in the processor's cache helps neither.
        if self._turn % 2:
            timings.offload_memcpy.append(self.buffers.memcpy_seconds(count))
            timings.offload.append(self._offload(hashes, ahead, timings))
        else:
            timings.offload.append(self._offload(hashes, ahead, timings))
            self._wait_checksums()
            timings.offload_memcpy.append(self.buffers.memcpy_seconds(count))
        self._wait_checksums()
        answer = self._peer.ask(
            "onboard",
            hashes=b"".join(hashes).hex(),
            is_memcpy_first=bool(self._turn % 2),
        )
        timings.onboard.append(float(str(answer["seconds"])))
        timings.onboard_memcpy.append(float(str(answer["memcpy_seconds"])))
        wanted = [shard_checksum(self.buffers.source[place]) for place in range(count)]
        self.wrong_count += wanted != answer["checksums"]
        self._evict(hashes)

    def _reserve_ahead(self, count: int) -> Reservation:
        """As many as the stock's bound allows; the first rounds wait for slabs to be mapped."""
        for _ in range(_WAIT_TRIES):
            ahead = self._client.reserve(self._namespace, count)
            if len(ahead.slots) >= min(count, ahead.stock_count_max) and len(ahead.slots):
                return ahead
            if len(ahead.slots):
                self._client.abort(self._namespace, ahead.slots, session=ahead.session)
            time.sleep(0.025)
        raise TierFull("the daemon gives no slots: raise --pool-bytes")

    def _offload(self, hashes: list[bytes], ahead: Reservation, timings: Timings) -> float:
        source = self.buffers.source
        done, parent, stock = 0, None, ahead
        started = time.perf_counter()
        while done < len(hashes):
            if done:
                stock = self._client.reserve(self._namespace, len(hashes) - done)
                timings.reserve_calls += 1
            slots = stock.slots[: len(hashes) - done]
            if not len(slots):
                raise TierFull("the daemon ran out of slots: raise --pool-bytes")
            with self._arena.hold(slots, stock.session) as views:
                for place, view in enumerate(views):
                    np.copyto(view, source[done + place])
            part = hashes[done : done + len(slots)]
            self._client.commit(
                self._namespace,
                part,
                slots,
                parent=parent,
                session=stock.session,
                epoch=stock.epoch,
            )
            parent = part[-1]
            done += len(slots)
        return time.perf_counter() - started

    def _wait_checksums(self) -> None:
        """The daemon's background work for the last offload shall not slow the next measure."""
        for _ in range(_WAIT_TRIES):
            if not bench_run.counter(self._client.stats(), _CHECKSUM_QUEUE):
                return
            time.sleep(0.005)

    def _evict(self, hashes: list[bytes]) -> None:
        evicted_count = 0
        for _ in range(_WAIT_TRIES):
            evicted_count += self._client.evict(self._namespace, hashes).evicted_count
            if evicted_count == len(hashes):
                return
            time.sleep(0.005)  # Pinned for a moment, by the checksums.
        raise KVTierError(f"{evicted_count} of {len(hashes)} blocks could be evicted")
