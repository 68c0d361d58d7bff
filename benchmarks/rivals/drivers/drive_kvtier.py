"""Drives kvtier's own daemon through its client and an arena (.venv).

As it is set by default: checksums of everything that is offloaded, compared again on the way to the
disk and back. Hashes are the engine's, as vLLM has them anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

import numpy as np
from serve import BLOCK_BYTES, BLOCK_COUNT, Figures, Unmeasurable, serve, versions

from kvtier.checksum import block_checksum
from kvtier.cli.connect import connected, open_namespace
from kvtier.cli.private_daemon import DIRECTORY, PrivateDaemon
from kvtier.cli.transfer_buffers import Buffers, spec_of
from kvtier.client.client import Client
from kvtier.client.values import Namespace
from kvtier.namespace import NamespaceSpec
from kvtier.types import Role, TierName

_SMALL_BYTES = 64
_SLAB_BYTES = 64 << 20
_SECONDS_MAX = 30.0
_KEYS_A_COMMIT = 4096


class KVTierDriver:
    def __init__(self) -> None:
        self._order: Figures = {}
        self._daemon: PrivateDaemon | None = None
        self._connection = contextlib.ExitStack()
        self._buffers: Buffers | None = None
        self._spec = spec_of(secrets.token_hex(8))
        self._hashes: list[bytes] = []
        self._prompt: list[bytes] = []

    def do_about(self, _: Figures) -> Figures:
        return {
            "versions": versions("kvtier", "grpcio", "numpy"),
            "threads": "its defaults: 2 for memory, 8 calls to the disk at once",
            "match_unit_tokens": 16,
        }

    def do_start(self, order: Figures) -> Figures:
        self._order = order
        options = {
            "dram.bytes": str(order["pool_bytes"]),
            "dram.slab_bytes": str(_SLAB_BYTES),
            "dram.watermark_stop": "1.0",
            "admin.address": "127.0.0.1:0",  # A port for metrics, as the others have.
        }
        if order["disk"]:
            options |= {
                "nvme.paths": f"{DIRECTORY}/pool",
                "nvme.bytes": str(8 * order["pool_bytes"]),
                # Rounds write more in a minute than a disk should be given in a day.
                "nvme.write_bytes_per_hour": "1TiB",
            }
        self._daemon = PrivateDaemon(Path(order["folder"]), options)
        started = time.perf_counter()
        self._daemon.start()
        self._connect()
        seconds = time.perf_counter() - started
        self._wait_populated()
        return {"start_s": seconds, "pids": [self._daemon.pid]}

    def _connect(self) -> None:
        """Returns when it has answered a question."""
        assert self._daemon is not None
        self._connection.close()
        self._client: Client = self._connection.enter_context(
            connected(self._daemon.socket, role=Role.BOTH, name="rivals")
        )
        self._namespace = open_namespace(self._client, self._spec)
        self._client.match(self._namespace, [bytes(self._spec.hash_bytes)])
        self._arena = self._client.arena(self._namespace)

    def _wait_populated(self) -> None:
        """As engines do that have started before the first request: the pool stands."""
        self._until(self._is_populated, "its pool was not populated in time")
        if self._buffers is None:
            self._buffers = Buffers(BLOCK_COUNT)
            self._buffers.fill()

    def _is_populated(self) -> bool:
        tier = self._client.stats().tiers[0]
        return tier.populated_bytes >= tier.budget_bytes

    def _until(self, is_true: object, why: str, seconds_max: float = _SECONDS_MAX) -> None:
        assert callable(is_true)
        deadline = time.monotonic() + seconds_max
        while not is_true():
            if time.monotonic() > deadline:
                raise Unmeasurable(why)
            time.sleep(0.001)

    # ---------------------------------------------------------------------------------- match

    def do_prepare_match(self, order: Figures) -> Figures:
        count = order["tokens"] // 16
        self._prompt = [secrets.token_bytes(32) for _ in range(count)]
        self._small = open_namespace(self._client, _small_spec())
        checksum, done = block_checksum(bytes(_SMALL_BYTES), _SMALL_BYTES), 0
        deadline = time.monotonic() + _SECONDS_MAX
        while done < count:
            if time.monotonic() > deadline:
                raise Unmeasurable("it does not take small blocks in time")
            taken = self._client.reserve(self._small, min(count - done, _KEYS_A_COMMIT))
            if not len(taken.slots):
                time.sleep(0.02)  # A slab is being populated.
                continue
            part = self._prompt[done : done + len(taken.slots)]
            self._client.commit(
                self._small,
                part,
                taken.slots,
                parent=self._prompt[done - 1] if done else None,
                session=taken.session,
                epoch=taken.epoch,
                checksums=np.full(len(part), checksum, np.uint64),
            )
            done += len(part)
        return {"asked_count": count}

    def do_match(self, _: Figures) -> Figures:
        started = time.perf_counter()
        found = self._client.match(self._small, self._prompt)
        matched = time.perf_counter()
        lease = self._client.acquire(self._small, self._prompt)
        self._client.release([lease])
        done = time.perf_counter()
        return {
            "match_ms": 1e3 * (matched - started),
            "hold_ms": 1e3 * (done - started),
            "hit_count": min(found.matched_count, lease.leased_count),
        }

    # ------------------------------------------------------------------------------- transfer

    def do_offload(self, order: Figures) -> Figures:
        assert self._buffers is not None
        self._buffers.stamp(order["turn"])
        self._hashes = [secrets.token_bytes(self._spec.hash_bytes) for _ in range(BLOCK_COUNT)]
        return {"offload_ms": 1e3 * self._offload(self._namespace, self._hashes)}

    def _offload(self, namespace: Namespace, hashes: list[bytes]) -> float:
        """Reserve, copy, commit; seconds."""
        assert self._buffers is not None
        source, done = self._buffers.source, 0
        started = time.perf_counter()
        while done < len(hashes):
            taken = self._client.reserve(namespace, len(hashes) - done)
            if not len(taken.slots):
                if time.perf_counter() - started > _SECONDS_MAX:
                    raise Unmeasurable("it gives no slots")
                time.sleep(0.0005)
                continue
            with self._arena.hold(taken.slots, taken.session) as views:
                for place, view in enumerate(views):
                    np.copyto(view, source[done + place])
            self._client.commit(
                namespace,
                hashes[done : done + len(taken.slots)],
                taken.slots,
                parent=hashes[done - 1] if done else None,
                session=taken.session,
                epoch=taken.epoch,
            )
            done += len(taken.slots)
        return time.perf_counter() - started

    def do_onboard(self, order: Figures) -> Figures:
        assert self._buffers is not None
        for view in self._buffers.target:
            view.fill(0)
        started = time.perf_counter()
        lease = self._client.acquire(
            self._namespace, self._hashes, wait_seconds=order.get("wait_seconds", 0.0)
        )
        held = time.perf_counter()
        with self._arena.hold(lease.slots, lease.session) as views:
            for view, target in zip(views, self._buffers.target, strict=False):
                np.copyto(target, view)
        self._client.release([lease])
        done = time.perf_counter()
        pairs = zip(self._buffers.source, self._buffers.target, strict=True)
        wrong = [not np.array_equal(source, target) for source, target in pairs]
        return {
            "onboard_ms": 1e3 * (done - started),
            "hold_ms": 1e3 * (held - started),
            "hit_count": lease.leased_count,
            "wrong_count": sum(wrong[: lease.leased_count]),
            "disk_count": dict(lease.tiers).get(TierName.NVME, 0),
        }

    def do_forget(self, _: Figures) -> Figures:
        left = BLOCK_COUNT
        deadline = time.monotonic() + _SECONDS_MAX
        while left and time.monotonic() < deadline:  # Pinned for a moment, by the checksums.
            left -= self._client.evict(self._namespace, self._hashes).evicted_count
        return {}

    # ----------------------------------------------------------------------------------- disk

    def do_write_down(self, order: Figures) -> Figures:
        """From the offload's first byte until all blocks are READY on the disk."""
        wanted = self._disk_count() + BLOCK_COUNT
        started = time.perf_counter()
        self.do_offload(order)
        self._until(
            lambda: self._disk_count() >= wanted,
            "not everything is on the disk in time",
            order["seconds_max"],
        )
        return {"write_ms": 1e3 * (time.perf_counter() - started)}

    def _disk_count(self) -> int:
        tiers = self._client.stats().tiers
        return sum(int(tier.ready_count) for tier in tiers if tier.tier == str(TierName.NVME))

    def do_empty_memory(self, order: Figures) -> Figures:
        """By as many other blocks as there is memory for; they go to the disk as well."""
        for _ in range(self._order["pool_bytes"] // (BLOCK_COUNT * BLOCK_BYTES)):
            others = [secrets.token_bytes(self._spec.hash_bytes) for _ in range(BLOCK_COUNT)]
            wanted = self._disk_count() + BLOCK_COUNT
            self._offload(self._namespace, others)
            self._until(
                lambda wanted=wanted: self._disk_count() >= wanted,  # type: ignore[misc]
                "not everything is on the disk in time",
                order["seconds_max"],
            )
        return {}

    def do_restart(self, order: Figures) -> Figures:
        assert self._daemon is not None
        self._daemon.kill()
        time.sleep(order["down_seconds"])
        started = time.perf_counter()
        self._daemon.start()
        self._connect()
        seconds = time.perf_counter() - started
        found = self._client.match(self._namespace, self._hashes).matched_count
        return {"answer_s": seconds, "hit_count": found, "asked_count": BLOCK_COUNT}

    def close(self) -> None:
        self._connection.close()
        if self._daemon is not None:
            self._daemon.end()


def _small_spec() -> NamespaceSpec:
    return NamespaceSpec(
        model="rivals-match",
        weights="-",
        kv_dtype="bytes",
        layout="none",
        block_tokens=16,
        shard_bytes=_SMALL_BYTES,
        salt=secrets.token_hex(8),
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(serve(KVTierDriver()))
