"""One rank's worker side, with a real client and no engine: plans come in, reports go out.

Ranks are forked from a server that has imported what they need (multiprocessing's own), so that one
costs milliseconds and inherits no client. The engine's "device" is a pattern that tells rank, block
and seed; copies of it are slow, so that a kill comes in their middle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.client import Client
from kvtier.connector import StepPlan, WorkerConnector
from kvtier.connector.sharding import Place
from kvtier.types import Role
from tests.support.engine_half import CALM, PATIENT, SHARD_BYTES, spec_of

Bytes = npt.NDArray[np.uint8]
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.rank_process"])


def pattern(seed: int, shard: int, block: int) -> Bytes:
    """What this engine has computed there."""
    return np.random.default_rng([seed, shard, block]).integers(0, 256, SHARD_BYTES, dtype=np.uint8)


class SlowCopier:
    """Writes a block in two halves with time between."""

    def __init__(self, seed: int, shard: int, pause_seconds: float) -> None:
        self._seed, self._shard, self._pause_seconds = seed, shard, pause_seconds

    def copy_out(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        half = SHARD_BYTES // 2
        for device_block, view in zip(device_blocks, views, strict=True):
            block = pattern(self._seed, self._shard, device_block)
            view[:half] = block[:half]
            time.sleep(self._pause_seconds)
            view[half:] = block[half:]

    def copy_in(self, device_blocks: Sequence[int], views: Sequence[Bytes]) -> None:
        raise AssertionError("nothing is loaded here")


def run_rank(
    pipe: Connection, socket: Path, engine_id: bytes, place: Place, seed: int, pause_seconds: float
) -> None:
    """Until the pipe ends."""
    client = Client(
        socket, settings=PATIENT, engine_id=engine_id, role=Role.WORKER, shards=(place.shard,)
    )
    shards = place.rank_count // place.replica_count
    worker = WorkerConnector(
        client,
        spec_of("ranks", shards),
        SlowCopier(seed, place.shard, pause_seconds),
        place=place,
        settings=CALM,
    )
    pipe.send("ready")
    while True:
        try:
            if pipe.poll(0.001):
                plan = pipe.recv()
                assert isinstance(plan, StepPlan)
                worker.start(plan)
            if results := worker.poll():
                pipe.send(results)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


class RankProcess:
    """Started at once; `ready` waits."""

    def __init__(
        self, socket: Path, engine_id: bytes, place: Place, seed: int, pause_seconds: float
    ) -> None:
        self.place = place
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=run_rank,
            args=(theirs, socket, engine_id, place, seed, pause_seconds),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        assert self._pipe.poll(30.0), "a rank does not start"
        assert self._pipe.recv() == "ready"

    def start(self, plan: StepPlan) -> None:
        self._pipe.send(plan)

    def reports(self) -> list[object]:
        found: list[object] = []
        while self._pipe.poll():
            found += self._pipe.recv()
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.join(30.0)
        self._pipe.close()
