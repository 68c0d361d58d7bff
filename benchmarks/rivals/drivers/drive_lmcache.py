"""Drives LMCache's multi-process daemon, engine-driven over shared memory (.venv-rivals/lmcache).

A block of 2 MiB is one of its chunks: 256 tokens of one layer of one plane, in one piece in the
engine's tensor, so that it is one copy. Its daemon hashes the tokens of each request itself. A
LOOKUP takes read locks, which RETRIEVE or FREE_LOOKUP_LOCKS gives back: match and hold are one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", OMP_NUM_THREADS="1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from serve import BLOCK_COUNT, Daemon, Figures, Unmeasurable, free_port, serve, versions

CHUNK_TOKENS = 256
_SECONDS_MAX = 60.0
_HIDDEN = 4096  # Of float16: 2 MiB a chunk.
_HIDDEN_SMALL = 8  # 4 KiB a chunk, for prompts of which only the match counts.


class Engine:
    """One registered engine: a tensor of chunks, and the keys of its requests."""

    def __init__(self, client: Any, number: int, tensor: torch.Tensor) -> None:
        self._client = client
        self._model = f"rivals-{number}"
        self.tensor = tensor
        self._caches = {"layer.0": tensor}
        self._context = EngineDrivenTransferContext(number, client)
        self._context.register(
            self._caches,
            self._model,
            1,
            1,
            _SECONDS_MAX,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(0, (0,), tokens_per_block=CHUNK_TOKENS)],
            engine_type=EngineType.VLLM,
        )

    def key(self, tokens: tuple[int, ...]) -> Any:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            num_kv_readers=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=uuid.uuid4().hex,
        )

    def store(self, key: Any, first: int, count: int) -> None:
        blocks = [[*range(first, first + count)]]
        future = self._context.submit_store(key.request_id, key, self._caches, blocks, None, 1)
        if not future.result(timeout=_SECONDS_MAX):
            raise Unmeasurable("STORE failed")

    def retrieve(self, key: Any, first: int, count: int) -> None:
        blocks = [[*range(first, first + count)]]
        future = self._context.submit_retrieve(
            key.request_id, key, self._caches, blocks, None, 1, skip_first_n_tokens=0
        )
        if not future.result(timeout=_SECONDS_MAX):
            raise Unmeasurable("RETRIEVE failed")

    def lookup(self, key: Any) -> int:
        """Chunks found and locked."""
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=_SECONDS_MAX)
        status = self._client.wait_prefetch_status(key.request_id, _SECONDS_MAX)
        return status.result(timeout=_SECONDS_MAX) or 0

    def let_go(self, key: Any) -> None:
        self._client.free_lookup_locks(key.no_worker_id_version(), 1).result(timeout=_SECONDS_MAX)

    def end(self, key: Any) -> None:
        self._client.end_session(key.request_id).result(timeout=_SECONDS_MAX)


class LMCacheDriver:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._daemon: Daemon | None = None
        self._order: Figures = {}
        self._client: Any = None
        self._tensor: torch.Tensor | None = None
        self._zmq = zmq.Context()
        self._zmq.setsockopt(zmq.LINGER, 0)  # A daemon that is gone takes no last words.
        self._prompt: tuple[int, ...] = ()
        self._tokens: tuple[int, ...] = ()

    def do_about(self, _: Figures) -> Figures:
        return {
            "versions": versions("lmcache", "torch", "pyzmq"),
            "threads": "torch and OpenMP: 1; the server's pools: 1 normal, 1 for transfers",
            "match_unit_tokens": CHUNK_TOKENS,
        }

    def do_start(self, order: Figures) -> Figures:
        self._order = order
        started = time.perf_counter()
        self._spawn()
        self._connect()
        seconds = time.perf_counter() - started
        self._register()
        return {"start_s": seconds, "pids": [self._daemon.pid] if self._daemon else []}

    def _spawn(self) -> None:
        order, folder = self._order, Path(self._order["folder"])
        self._port, gib = free_port(), str(order["pool_bytes"] / 2**30)
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--http-port", str(free_port())]
        command += ["--prometheus-port", str(free_port()), "--chunk-size", str(CHUNK_TOKENS)]
        command += ["--l1-size-gb", gib, "--no-l1-use-lazy"]
        command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
        command += ["--shm-name", order["tag"]]
        if order["disk"]:
            (folder / "l2").mkdir(exist_ok=True)
            adapter = {"type": "fs_native", "base_path": str(folder / "l2"), "use_odirect": True}
            command += ["--l2-adapter", json.dumps(adapter)]
        self._daemon = Daemon(command, folder / "daemon.log", {})

    def _connect(self) -> None:
        """Returns when it has answered a question."""
        assert self._daemon is not None
        if self._client is not None:
            self._client.close()
        self._client = RequestClientFactory.create(
            f"tcp://127.0.0.1:{self._port}", context=self._zmq
        )
        asked = self._client.get_chunk_size()
        deadline = time.monotonic() + _SECONDS_MAX
        while not asked.wait(0.02):
            self._daemon.check()
            if time.monotonic() > deadline:
                raise Unmeasurable(f"its daemon does not answer after {_SECONDS_MAX:g} s")
        if asked.result(timeout=1.0) != CHUNK_TOKENS:
            raise Unmeasurable("its daemon has another size of chunks")

    def _register(self) -> None:
        """Once a life of the daemon; the tensor stays the engine's."""
        if self._tensor is None:
            self._tensor = torch.zeros(
                (2 * BLOCK_COUNT, CHUNK_TOKENS, _HIDDEN), dtype=torch.float16
            )
            words = self._tensor.view(torch.int16)[:BLOCK_COUNT]
            words.random_(-(2**15), 2**15, generator=torch.Generator().manual_seed(1))
        self._big = Engine(self._client, 1, self._tensor)

    # ---------------------------------------------------------------------------------- match

    def do_prepare_match(self, order: Figures) -> Figures:
        count = order["tokens"] // CHUNK_TOKENS
        self._prompt = tuple((n * 7919 + 11) % 128_000 for n in range(order["tokens"]))
        small = torch.zeros((count, CHUNK_TOKENS, _HIDDEN_SMALL), dtype=torch.float16)
        self._small = Engine(self._client, 2, small)
        key = self._small.key(self._prompt)
        self._small.store(key, 0, count)
        self._small.end(key)
        return {"asked_count": count}

    def do_match(self, _: Figures) -> Figures:
        key = self._small.key(self._prompt)
        started = time.perf_counter()
        found = self._small.lookup(key)
        matched = time.perf_counter()
        self._small.let_go(key)
        done = time.perf_counter()
        self._small.end(key)
        return {
            "match_ms": 1e3 * (matched - started),
            "hold_ms": 1e3 * (done - started),
            "hit_count": found,
        }

    # ------------------------------------------------------------------------------- transfer

    def do_offload(self, order: Figures) -> Figures:
        self._tokens = _tokens_of(order["turn"])
        self._big.tensor.view(torch.int16)[:BLOCK_COUNT, 0, 0] = order["turn"]
        key = self._big.key(self._tokens)
        started = time.perf_counter()
        self._big.store(key, 0, BLOCK_COUNT)
        seconds = time.perf_counter() - started
        self._big.end(key)
        return {"offload_ms": 1e3 * seconds}

    def do_onboard(self, _: Figures) -> Figures:
        words = self._big.tensor.view(torch.int16)
        words[BLOCK_COUNT:] = 0
        key = self._big.key(self._tokens)
        started = time.perf_counter()
        found = self._big.lookup(key)
        held = time.perf_counter()
        if found == BLOCK_COUNT:
            self._big.retrieve(key, BLOCK_COUNT, BLOCK_COUNT)
        done = time.perf_counter()
        if 0 < found < BLOCK_COUNT:
            self._big.let_go(key)
        self._big.end(key)
        return {
            "onboard_ms": 1e3 * (done - started),
            "hold_ms": 1e3 * (held - started),
            "hit_count": found,
            "wrong_count": _wrong_count(words) if found == BLOCK_COUNT else 0,
        }

    def do_forget(self, _: Figures) -> Figures:
        self._client.clear(True).result(timeout=_SECONDS_MAX)
        return {}

    # ----------------------------------------------------------------------------------- disk

    def do_write_down(self, order: Figures) -> Figures:
        """From the offload's first byte until each file has its name and its size."""
        folder = Path(self._order["folder"]) / "l2"
        before = len([*folder.glob("*.data")])
        started = time.perf_counter()
        self.do_offload(order)
        while len([*folder.glob("*.data")]) < before + BLOCK_COUNT:
            if time.perf_counter() - started > order["seconds_max"]:
                raise Unmeasurable("not everything is on the disk in time")
            time.sleep(0.001)
        return {"write_ms": 1e3 * (time.perf_counter() - started)}

    def do_empty_memory(self, _: Figures) -> Figures:
        return self.do_forget({})

    def do_restart(self, order: Figures) -> Figures:
        assert self._daemon is not None
        self._daemon.kill()
        time.sleep(order["down_seconds"])
        started = time.perf_counter()
        self._spawn()
        self._connect()
        seconds = time.perf_counter() - started
        self._register()
        key = self._big.key(self._tokens)
        found = self._big.lookup(key)
        self._big.let_go(key)
        self._big.end(key)
        return {"answer_s": seconds, "hit_count": found, "asked_count": BLOCK_COUNT}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._daemon is not None:
            self._daemon.end()


def _tokens_of(turn: int) -> tuple[int, ...]:
    return tuple((turn * 1009 + n * 31 + 5) % 128_000 for n in range(BLOCK_COUNT * CHUNK_TOKENS))


def _wrong_count(words: torch.Tensor) -> int:
    pairs = zip(words[:BLOCK_COUNT], words[BLOCK_COUNT:], strict=True)
    return sum(not torch.equal(source, target) for source, target in pairs)


if __name__ == "__main__":
    sys.exit(serve(LMCacheDriver()))
