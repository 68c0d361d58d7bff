"""kill -9 of one rank in mid-store: no block with one of its shards unwritten is ever seen.

Two processes with the real worker side, this one with the real scheduler side, a real daemon; no
engine. `tests/vllm/test_parallel.py` does the same with a real one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvtier.client import Client
from kvtier.connector import SchedulerConnector
from kvtier.connector.sharding import Place
from kvtier.types import Role
from tests.support.connector_rig import numbered_chain
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.engine_half import CALM, PATIENT, SHARD_BYTES, spec_of
from tests.support.forms import rounds, state_finding
from tests.support.processes import eventually
from tests.support.rank_process import RankProcess, pattern

BLOCKS = 16
PAUSE_SECONDS = 0.002
RANKS = 2
REQUEST_BLOCKS = 4
REPORTS = RANKS * BLOCKS // REQUEST_BLOCKS  # When all is stored.


class Engine:
    """A scheduler side here, and its ranks."""

    def __init__(self, daemon: RunningDaemon, seed: int) -> None:
        engine_id = os.urandom(16)
        self.report_count = 0
        self.ranks = [
            RankProcess(daemon.socket, engine_id, Place(n, RANKS, n), seed, PAUSE_SECONDS)
            for n in range(RANKS)
        ]
        self.client = Client(
            daemon.socket, settings=PATIENT, engine_id=engine_id, role=Role.SCHEDULER
        )
        settings = replace(CALM, worker_count=RANKS, stock_blocks=BLOCKS, offload_slice_blocks=2)
        self.scheduler = SchedulerConnector(self.client, spec_of("ranks", RANKS), settings=settings)
        for rank in self.ranks:
            rank.ready()
        deadline = time.monotonic() + 30.0
        while self.scheduler.stock_count < BLOCKS:
            assert time.monotonic() < deadline, self.scheduler.stats()
            self.step()

    def step(self) -> None:
        plan = self.scheduler.build_plan()
        if plan.offloads:
            for rank in self.ranks:
                rank.start(plan)
        reports = [result for rank in self.ranks for result in rank.reports()]
        self.report_count += len(reports)
        self.scheduler.on_results(reports)  # type: ignore[arg-type]
        time.sleep(0.001)

    def has_reported(self, count: int) -> bool:
        """After one more step."""
        self.step()
        return self.report_count >= count

    def store(self, hashes: Sequence[bytes]) -> None:
        """In requests of a few blocks: some end before the kill, some are cut short by it."""
        for last in range(REQUEST_BLOCKS, len(hashes) + 1, REQUEST_BLOCKS):
            name = f"r{last}"
            self.scheduler.on_new_request(name, hashes[:last])
            self.scheduler.on_blocks_full(name, hashes[:last], list(range(last)))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.scheduler.close()
        self.client.close()


def check_whole(reader: Client, seed: int, hashes: Sequence[bytes]) -> int:
    """Every block that is seen has all shards; how many are."""
    namespace = reader.open_namespace(spec_of("ranks", RANKS))
    found = list(reader.get(namespace, hashes))
    for index, block in enumerate(found):
        for shard in range(RANKS):
            part = np.frombuffer(block, np.uint8)[shard * SHARD_BYTES : (shard + 1) * SHARD_BYTES]
            wanted = pattern(seed, shard, index)
            assert np.array_equal(part, wanted), f"block {index} is seen without its shard {shard}"
    return len(found)


@pytest.fixture
def daemon():  # type: ignore[no-untyped-def]
    with running_daemon(
        dram_bytes="32MiB", slab_bytes="4MiB", options={"lease.grace_seconds": "0.05"}
    ) as running:
        running.wait_populated()
        yield running


@pytest.mark.full_form
@pytest.mark.timeout(600)
def test_rank_killed_in_mid_store_leaves_no_half_block(daemon: RunningDaemon) -> None:
    rng = random.Random(11)
    whole = cut_short = 0
    round_count = rounds(short=6, full=50)
    with Client(daemon.socket, settings=PATIENT, role=Role.TOOL) as reader:
        namespace = reader.open_namespace(spec_of("ranks", RANKS))
        eventually(lambda: namespace.state is not None, "the reader has opened the namespace")
        for number in range(round_count):
            hashes = numbered_chain(BLOCKS, f"{number} ")
            engine = Engine(daemon, number)
            engine.store(hashes)
            wanted_count = rng.randrange(REPORTS)
            eventually(partial(engine.has_reported, wanted_count), "the ranks store", step=0.0)
            time.sleep(rng.uniform(0.0, 2.0) * PAUSE_SECONDS)  # In the middle of some block.
            engine.ranks[number % RANKS].kill()
            killed = engine.ranks.pop(number % RANKS)
            for _ in range(20):  # The other one copies on, and its reports arrive.
                engine.step()
            assert killed.place.rank == number % RANKS
            seen_count = check_whole(reader, number, hashes)
            engine.close()
            assert check_whole(reader, number, hashes) >= seen_count
            whole += seen_count
            cut_short += seen_count < BLOCKS
    state_finding(
        f"{round_count} kills of a rank, {cut_short} in mid-store; {whole} blocks seen, all whole"
    )
    assert whole > 0
    assert cut_short >= round_count // 3, "hardly a rank was killed in mid-store"
    assert whole >= round_count, "hardly a block was stored"
