"""A greedy tenant beside a modest one: what the modest one keeps, and how long it waits.

Short form: some seconds; `make torture`: ten minutes. Waits are the daemon's processor time between
a question and its answer, but for the answering itself: what it does for others meanwhile counts,
and what else happens on the machine does not.
"""

from __future__ import annotations

import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.errors import LimitExceeded
from kvtier.lane import HEAD, LANE_CALLS, pack
from kvtier.paths import lane_socket_path
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.greedy_tenant import CHAIN_BLOCKS, SHARD_BYTES
from tests.support.known_blocks import chain_hashes, offload, spec_of
from tests.support.nvme_daemon import PATIENT, make_pool, wait_state
from tests.support.processes import eventually
from tests.support.raw_client import RawSession, open_session
from tests.support.tenant_daemon import Tenants, running_tenants

POOL_BYTES = rounds(short=32, full=64) << 20
POOL_BLOCKS = POOL_BYTES // SHARD_BYTES
MINIMUM = 0.25
CHAIN_COUNT = POOL_BLOCKS * 3 // 16 // CHAIN_BLOCKS  # Within its minimum.
CHAINS = [chain_hashes(f"modest{one}", CHAIN_BLOCKS) for one in range(CHAIN_COUNT)]
GREEDY_CHAINS = 50 * POOL_BLOCKS // CHAIN_BLOCKS
# The law is 1 ms. Among other tests, on few processors, it is one slice of the core.
WAIT_SECONDS_MAX = 1e-3 if is_torture() else 5e-3
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3), which Python lacks: of a whole process.

pytestmark = [pytest.mark.slow, pytest.mark.full_form]


@dataclass
class Seen:
    asked: int = 0
    hits: int = 0
    waits: list[float] = field(default_factory=list)  # Of each Match, see below.

    @property
    def ratio(self) -> float:
        return self.hits / self.asked

    @property
    def wait(self) -> float:
        return statistics.median(self.waits)


class Modest:
    """Works through its few chains again and again, and computes what it has lost."""

    def __init__(self, path: Path, daemon: int) -> None:
        self.clock = (~daemon << 3) | _CPUCLOCK_SCHED
        self.client = Client(path, name="modest", settings=PATIENT)
        self.namespace: Namespace = self.client.open_namespace(spec_of("m", SHARD_BYTES))
        assert self.client.wait_namespace(self.namespace, 10)
        self.session: RawSession = open_session(path, engine_id=b"M" * 16, role=pb.ROLE_TOOL)
        self.namespace_id = next(
            one.namespace_id for one in self.client.stats().namespaces if one.model
        )
        self.lane = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.lane.settimeout(10)
        self.lane.connect(str(lane_socket_path(path)))

    def close(self) -> None:
        self.lane.close()
        self.session.close()
        self.client.close()

    def work(self, seconds: float) -> Seen:
        seen, end = Seen(), time.monotonic() + seconds
        while time.monotonic() < end:
            for hashes in CHAINS:
                began = time.clock_gettime(self.clock)
                found = self._match(hashes)
                spent = time.clock_gettime(self.clock) - began
                seen.waits.append(max(0.0, spent - found.daemon_us / 1e6))
                seen.asked += len(hashes)
                seen.hits += found.matched_count
                if found.matched_count < len(hashes):
                    offload(self.client, self.namespace, hashes)
                time.sleep(0.005)
        return seen

    def _match(self, hashes: list[bytes]) -> pb.MatchResponse:
        request = pb.MatchRequest(
            token=self.session.token, namespace_id=self.namespace_id, hashes=b"".join(hashes)
        )
        self.lane.sendall(pack(LANE_CALLS.index("Match"), request.SerializeToString()))
        length, status = HEAD.unpack(self.lane.recv(HEAD.size, socket.MSG_WAITALL))
        answer = self.lane.recv(length, socket.MSG_WAITALL)
        assert status == 0, answer
        return pb.MatchResponse.FromString(answer)


def reserved_slots(tenants: Tenants) -> float:
    samples = tenants.daemon.metrics()
    return sum(value for name, value in samples.items() if "reserved_slots_total" in name)


@contextmanager
def greedy(tenants: Tenants, seed: int) -> Iterator[subprocess.Popen[str]]:
    words = [str(tenants.socket("greedy")), str(seed), str(GREEDY_CHAINS)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.greedy_tenant", *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "GREEDY\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """One daemon: the two that share memory, and two that only ask."""
    named = {
        "modest": {"minimum": str(MINIMUM), "priority": "high"},
        "greedy": {"weight": "10", "calls_per_second": "100"},
        "red": {"calls_per_second": "5"},
        "blue": {},
    }
    options = {}
    if is_torture():
        pool = tmp_path_factory.mktemp("nvme") / "pool"
        make_pool(pool, pool_bytes=128 << 20)
        options = {"nvme.paths": str(pool), "nvme.write_bytes_per_hour": "1TiB"}
    dram_bytes = f"{POOL_BYTES >> 20}MiB"
    with running_tenants(named, options, dram_bytes=dram_bytes, slab_bytes="2MiB") as running:
        if is_torture():
            wait_state(running.daemon, "on")
        running.daemon.wait_populated()
        yield running


def test_a_greedy_tenant_takes_neither_the_hits_nor_the_turns_of_a_modest_one(
    tenants: Tenants,
) -> None:
    phases, seconds = rounds(short=2, full=20), rounds(short=1, full=15)
    alone, beside = Seen(), Seen()
    modest = Modest(tenants.socket("modest"), tenants.daemon.process.pid)
    with greedy(tenants, seed=1) as hog:
        eventually(
            lambda: reserved_slots(tenants) > POOL_BLOCKS,
            "the greedy one has filled the pool",
            60.0,
        )
        # It takes its part back, slab by slab.
        eventually(lambda: modest.work(0.3).ratio == 1.0, "the modest one has its minimum")
        for _ in range(phases):
            for seen, signum in ((alone, signal.SIGSTOP), (beside, signal.SIGCONT)):
                hog.send_signal(signum)
                time.sleep(0.2)
                found = modest.work(seconds)
                seen.asked += found.asked
                seen.hits += found.hits
                seen.waits += found.waits
    stats = modest.client.stats()
    modest.close()
    samples = tenants.daemon.metrics()
    kept = samples['kvtier_tenant_memory_bytes{tenant="modest"}']
    assert kept == stats.tiers[0].slot_count * SHARD_BYTES
    taken = sum(value for name, value in samples.items() if "reserved_slots_total" in name)
    state_finding(
        f"greedy filled {taken / POOL_BLOCKS:.0f} pools; modest alone {alone.ratio:.4f} of its "
        f"blocks, waits {alone.wait * 1e3:.3f} ms; beside it {beside.ratio:.4f}, "
        f"{beside.wait * 1e3:.3f} ms"
    )
    # At 100 calls a second, of which a chain takes three, 78 pools would be all that can be.
    assert taken > rounds(short=1, full=50) * POOL_BLOCKS, "it was not greedy"
    assert stats.tiers[0].slot_count >= len(CHAINS) * CHAIN_BLOCKS
    assert beside.ratio >= alone.ratio - 0.01
    assert beside.ratio > 0.97
    assert beside.wait <= max(2 * alone.wait, WAIT_SECONDS_MAX)


def test_calls_beyond_a_tenants_rate_are_refused_and_nobody_elses(tenants: Tenants) -> None:
    clients = {
        name: Client(tenants.socket(name), role=Role.TOOL, settings=PATIENT)
        for name in ("red", "blue")
    }
    refused = dict.fromkeys(clients, 0)
    for name, client in clients.items():
        namespace = client.open_namespace(spec_of(name))
        assert client.wait_namespace(namespace, 10)
        for _ in range(40):
            try:
                client.match(namespace, CHAINS[0])
            except LimitExceeded:
                refused[name] += 1
        client.close()
    assert refused["blue"] == 0
    assert refused["red"] >= 5
    assert tenants.lines("tenant.red.calls_per_second")
    samples = tenants.daemon.metrics()
    assert samples['kvtier_tenant_refused_calls_total{tenant="red"}'] == refused["red"]
