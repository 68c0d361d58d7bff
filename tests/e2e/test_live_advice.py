"""What a live daemon says of other sizes of memory, beside an exact replay of what it was asked."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.policy.lru import LruPolicy
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, numbered, read_trace
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.known_blocks import spec_of

TRACE = Path(__file__).parents[2] / "benchmarks/traces/mooncake_conversation.kvt.jsonl.gz"
REQUESTS = rounds(short=2000, full=100_000)
BLOCK_BYTES = 4096
# Of these 4,096 are sampled: one of 4, or one of 16.
DRAM_BLOCKS = rounds(short=16_384, full=65_536)
SAMPLED_MIN = 1000
POINTS_MAX = 2.0
PATIENT = ClientSettings(timeout_seconds=30.0)


def conversations() -> Trace:
    whole = read_trace(TRACE)
    return numbered(whole.name, whole.block_tokens, list(whole.requests[:REQUESTS]))


def ask(daemon: RunningDaemon, trace: Trace) -> None:
    """Every request of it asks for its chain; none of them waits, or finds anything."""
    names = [
        hashlib.blake2b(number.to_bytes(4, "big"), digest_size=32).digest()
        for number in range(trace.unique_count)
    ]
    with Client(daemon.socket, settings=PATIENT) as client:
        namespace = client.open_namespace(spec_of(shard_bytes=BLOCK_BYTES))
        assert client.wait_namespace(namespace, 30)
        for request in trace.requests:
            client.acquire(namespace, [names[block] for block in request.blocks.tolist()])


def advised(daemon: RunningDaemon, dram_blocks: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "kvtier.cli.main", "advise", "--json"]
    command += ["--admin", str(daemon.ready["admin"]), "--dram", str(dram_blocks * BLOCK_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["advice"][""]
    return [row for row in rows if not row["nvme_bytes"]]


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(rounds(short=120, full=1200))
def test_advice_of_live_traffic_is_what_an_exact_replay_says() -> None:
    trace = conversations()
    with running_daemon(dram_bytes=DRAM_BLOCKS * BLOCK_BYTES) as daemon:
        ask(daemon, trace)
        (whole, *_) = json.loads(daemon.http("/advice.json"))["curves"]
        rows = advised(daemon, DRAM_BLOCKS // 2)
    assert whole["rate"] <= 4096 / DRAM_BLOCKS, "more is sampled than the law is about"
    compared = 0
    for row in rows:
        blocks = row["dram_bytes"] // BLOCK_BYTES
        exact = replay_policy(trace, LruPolicy, blocks).hit_ratio
        error = 100 * (row["hit_ratio"] - exact)
        state_finding(
            f"advice: {blocks:,} blocks, {blocks * whole['rate']:,.0f} sampled: exact {exact:.4f}, "
            f"told {row['hit_ratio']:.4f} ±{row['error_points']:.2f} points, off by {error:+.2f}"
        )
        if blocks * whole["rate"] >= SAMPLED_MIN:
            compared += 1
            assert abs(error) <= POINTS_MAX
            assert abs(error) <= row["error_points"] + 0.5
    assert compared >= 4
