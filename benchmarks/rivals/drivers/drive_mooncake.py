"""Drives Mooncake Store (.venv-rivals/mooncake): with a client daemon, or a client in the engine.

With --embedded the engine's process is the store's client and has the memory itself: no daemon
stands between, and what it holds ends with the engine. Otherwise the engine is a dummy client of a
mooncake_client daemon, and its buffers lie in memory both have. Keys are strings, one a block.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from serve import (
    BLOCK_BYTES,
    BLOCK_COUNT,
    Daemon,
    Figures,
    Unmeasurable,
    free_port,
    serve,
    versions,
)

_SECONDS_MAX = 30.0
_BUFFER_BYTES = 2 * BLOCK_COUNT * BLOCK_BYTES
_SMALL_BYTES = 64
_KEYS_A_CALL = 1024
_BINARIES = Path(mooncake.__path__[0])
# A bucket of the disk tier is written when it is full: one is what a round writes. Its client asks
# the master for work every ten seconds by default; every second here.
_DISK_ENVIRONMENT = {
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(BLOCK_COUNT * BLOCK_BYTES),
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(4 * BLOCK_COUNT * BLOCK_BYTES),
    "MOONCAKE_OFFLOAD_USE_URING": "1",
}


class MooncakeDriver:
    def __init__(self, is_embedded: bool) -> None:
        self._is_embedded = is_embedded
        self._daemons: list[Daemon] = []
        self._order: Figures = {}
        self._store: Any = None
        self._keys: list[str] = []
        self._prompt: list[str] = []

    def do_about(self, _: Figures) -> Figures:
        return {
            "versions": versions("mooncake-transfer-engine-non-cuda", "numpy"),
            "threads": "its defaults",
            "match_unit_tokens": 16,
        }

    def do_start(self, order: Figures) -> Figures:
        self._order = order
        started = time.perf_counter()
        self._spawn_master()
        self._client_port = free_port()
        self._spawn_client()
        self._connect(self._client_port)
        seconds = time.perf_counter() - started
        self._map_buffers()
        return {"start_s": seconds, "pids": [one.pid for one in self._daemons]}

    def _spawn_master(self) -> None:
        self._master_port = free_port()
        command = [str(_BINARIES / "mooncake_master"), f"--rpc_port={self._master_port}"]
        command += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        command += [f"--metrics_port={free_port()}"]
        if self._order["disk"]:
            command.append("--enable_offload=true")
        self._daemons = [Daemon(command, Path(self._order["folder"]) / "master.log", {})]

    def _spawn_client(self) -> None:
        if self._is_embedded:
            return
        folder = Path(self._order["folder"])
        command = [str(_BINARIES / "mooncake_client"), "--host=127.0.0.1", "--protocol=tcp"]
        command += [f"--port={self._client_port}", "--metadata_server=P2PHANDSHAKE"]
        command += [f"--master_server_address=127.0.0.1:{self._master_port}"]
        command += [f"--global_segment_size={self._order['pool_bytes'] >> 20}MB"]
        environment: Figures = {}
        if self._order["disk"]:
            command.append("--enable_offload=true")
            (folder / "disk").mkdir(exist_ok=True)
            environment = {
                **_DISK_ENVIRONMENT,
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder / "disk"),
            }
        self._daemons.append(Daemon(command, folder / "client.log", environment))

    def _connect(self, port: int) -> None:
        """Returns when it has answered a question."""
        deadline = time.monotonic() + _SECONDS_MAX
        while True:
            for daemon in self._daemons:
                daemon.check()
            self._store = MooncakeDistributedStore()
            if self._setup(port) == 0 and self._store.is_exist("nothing") == 0:
                return
            if time.monotonic() > deadline:
                raise Unmeasurable(f"its client does not connect in {_SECONDS_MAX:g} s")
            self._store.close()
            time.sleep(0.1)

    def _setup(self, port: int) -> int:
        if self._is_embedded:
            master = f"127.0.0.1:{self._master_port}"
            return self._store.setup(
                "127.0.0.1",
                "P2PHANDSHAKE",
                self._order["pool_bytes"],
                _BUFFER_BYTES,
                "tcp",
                "",
                master,
            )
        return self._store.setup_dummy(2 * _BUFFER_BYTES, _BUFFER_BYTES, f"127.0.0.1:{port}")

    def _map_buffers(self) -> None:
        """Source and target, where the store's client can reach them."""
        if self._is_embedded:
            self._memory = np.empty(_BUFFER_BYTES, np.uint8)
            self._address = self._memory.ctypes.data
        else:
            self._address = self._store.alloc_from_mem_pool(_BUFFER_BYTES)
            if not self._address:
                raise Unmeasurable("its client gives no shared memory")
            raw = (ctypes.c_uint8 * _BUFFER_BYTES).from_address(self._address)
            self._memory = np.ctypeslib.as_array(raw)
        if self._store.register_buffer(self._address, _BUFFER_BYTES) != 0:
            raise Unmeasurable("its client does not register a buffer")
        blocks = self._memory.reshape(2 * BLOCK_COUNT, BLOCK_BYTES)
        self._source, self._target = blocks[:BLOCK_COUNT], blocks[BLOCK_COUNT:]
        self._source[:] = np.random.default_rng(1).integers(
            0, 256, self._source.shape, dtype=np.uint8
        )

    def _addresses(self, first: int) -> list[int]:
        return [self._address + (first + n) * BLOCK_BYTES for n in range(BLOCK_COUNT)]

    # ---------------------------------------------------------------------------------- match

    def do_prepare_match(self, order: Figures) -> Figures:
        count = order["tokens"] // 16
        self._prompt = [f"{n:064x}" for n in range(count)]
        for first in range(0, count, _KEYS_A_CALL):
            keys = self._prompt[first : first + _KEYS_A_CALL]
            sizes = [_SMALL_BYTES] * len(keys)
            if any(self._store.batch_put_from(keys, [self._address] * len(keys), sizes)):
                raise Unmeasurable("it does not take small blocks")
        return {"asked_count": count}

    def do_match(self, _: Figures) -> Figures:
        started = time.perf_counter()
        found = self._store.batch_is_exist(self._prompt)
        milliseconds = 1e3 * (time.perf_counter() - started)
        # Asking leases for ten seconds; nothing is given back.
        return {
            "match_ms": milliseconds,
            "hold_ms": milliseconds,
            "hit_count": sum(one == 1 for one in found),
        }

    # ------------------------------------------------------------------------------- transfer

    def do_offload(self, order: Figures) -> Figures:
        turn = order["turn"]
        self._keys = [f"{turn:032x}{n:032x}" for n in range(BLOCK_COUNT)]
        self._source[:, :8] = np.frombuffer(turn.to_bytes(8, "little"), np.uint8)
        return {"offload_ms": 1e3 * self._put(self._keys)}

    def _put(self, keys: list[str]) -> float:
        addresses, sizes = self._addresses(0), [BLOCK_BYTES] * len(keys)
        started = time.perf_counter()
        codes = self._store.batch_put_from(keys, addresses, sizes)
        seconds = time.perf_counter() - started
        if any(codes):
            raise Unmeasurable(f"put answers {sorted(set(codes))}")
        return seconds

    def _put_in_time(self, keys: list[str], deadline: float) -> None:
        """Again and again while memory is full: the master evicts in the background."""
        while keys:
            addresses, sizes = self._addresses(0), [BLOCK_BYTES] * len(keys)
            codes = self._store.batch_put_from(keys, addresses[: len(keys)], sizes)
            keys = [key for key, code in zip(keys, codes, strict=True) if code]
            if keys:
                if time.perf_counter() > deadline:
                    raise Unmeasurable(f"put answers {sorted(set(codes))}")
                time.sleep(0.02)

    def do_onboard(self, _: Figures) -> Figures:
        self._target[:] = 0
        addresses, sizes = self._addresses(BLOCK_COUNT), [BLOCK_BYTES] * BLOCK_COUNT
        started = time.perf_counter()
        codes = self._store.batch_get_into(self._keys, addresses, sizes)
        seconds = time.perf_counter() - started
        hits = [code == BLOCK_BYTES for code in codes]
        pairs = zip(hits, self._source, self._target, strict=True)
        return {
            "onboard_ms": 1e3 * seconds,
            "hold_ms": 0.0,
            "hit_count": sum(hits),
            "code": min(codes),
            "wrong_count": sum(is_hit and not np.array_equal(a, b) for is_hit, a, b in pairs),
        }

    def do_forget(self, _: Figures) -> Figures:
        for key in self._keys:
            self._store.remove(key, True)
        return {}

    # ----------------------------------------------------------------------------------- disk

    def do_write_down(self, order: Figures) -> Figures:
        """From the put's first byte until the bucket has its description beside it."""
        before = self._bucket_count()
        started = time.perf_counter()
        self.do_offload(order)
        self._wait_buckets(before + 1, started + order["seconds_max"])
        return {"write_ms": 1e3 * (time.perf_counter() - started)}

    def _bucket_count(self) -> int:
        return len([*(Path(self._order["folder"]) / "disk").rglob("*.meta")])

    def _wait_buckets(self, count: int, deadline: float) -> None:
        while self._bucket_count() < count:
            if time.perf_counter() > deadline:
                raise Unmeasurable("not everything is on the disk in time")
            time.sleep(0.001)

    def do_empty_memory(self, order: Figures) -> Figures:
        """By as many other blocks as there is memory for; they go to the disk as well."""
        keep, turn = self._keys, order["turn"]
        count = self._order["pool_bytes"] // (BLOCK_COUNT * BLOCK_BYTES)
        for number in range(count):
            before, deadline = self._bucket_count(), time.perf_counter() + order["seconds_max"]
            self._put_in_time(
                [f"{turn:031x}f{number * BLOCK_COUNT + n:032x}" for n in range(BLOCK_COUNT)],
                deadline,
            )
            self._wait_buckets(before + 1, deadline)
        self._keys = keep
        return {}

    def do_restart(self, order: Figures) -> Figures:
        """Of the client daemon, which has the memory and the disk; the master may be elsewhere."""
        if self._is_embedded:
            raise Unmeasurable("what it holds ends with the engine")
        kept = self._source.copy()
        self._daemons.pop().kill()
        self._store.close()
        time.sleep(order["down_seconds"])
        started = time.perf_counter()
        self._spawn_client()
        self._connect(self._client_port)
        seconds = time.perf_counter() - started
        found = self._store.batch_is_exist(self._keys).count(1)
        self._map_buffers()
        self._source[:] = kept
        return {"answer_s": seconds, "hit_count": found, "asked_count": BLOCK_COUNT}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        for daemon in reversed(self._daemons):
            daemon.end()


if __name__ == "__main__":
    sys.exit(serve(MooncakeDriver(is_embedded="--embedded" in sys.argv)))
