"""`kvtier bench match`: a long prompt against a million resident blocks.

A real session commits the blocks; then chains that are resident fully, partly (random depth) and
not at all are asked for in random order, one call after the other, from another process than the
daemon's. Then again while a third process acquires and releases full chains without a pause.

    p50_ms, p99_ms            call of Client.match with a list of hashes, to its answer
    bare_p50_ms, bare_p99_ms  the same hashes to a gRPC server that does nothing, in turn with ours:
                              what the library and this machine cost at that moment
    daemon_us                 median of what the daemon says it spent (MatchResponse.daemon_us)
    daemon_cpu_us             processor time of all the daemon's threads over matches
    p50_busy_ms, p99_busy_ms  with the third process
    bytes_per_block           growth of the daemon's memory by the blocks, pool and slot table
                              (memfds) left out, over resident blocks
    acquire_us_per_block      time inside the daemon's Acquire calls (its own counter), over blocks
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from kvtier.cli import bench_run, measure
from kvtier.cli.bench_fill import SLAB_BYTES, Filler, budget_bytes, spec_of
from kvtier.cli.bench_tree import ChainTree
from kvtier.cli.connect import connected, open_namespace
from kvtier.cli.output import say
from kvtier.cli.peer import Peer, started_peer
from kvtier.cli.private_daemon import BenchDaemon
from kvtier.cli.processes import cpu_seconds, memory_of
from kvtier.cli.sizes import positive
from kvtier.client.calls import CHANNEL_OPTIONS
from kvtier.client.client import Client
from kvtier.client.values import NamespaceState
from kvtier.errors import BadRequest, KVTierError, TierFull
from kvtier.paths import grpc_socket_path
from kvtier.types import Role
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub

TARGETS = {
    "p50_ms": measure.Target(at_most=0.8),
    "p99_busy_ms": measure.Target(at_most=10.0),
    "bytes_per_block": measure.Target(at_most=400.0),
    "acquire_us_per_block": measure.Target(at_most=3.0),
}
_ACQUIRE_ROUNDS = 100
_WARM_COUNT = 50
_LARGE_BYTES = 31 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=positive, default=131_072, help="of the prompt (131072)")
    parser.add_argument("--block-tokens", type=positive, default=16, help="of a block (16)")
    parser.add_argument(
        "--resident", type=positive, default=1_000_000, help="resident blocks (1000000)"
    )
    parser.add_argument("--chains", type=positive, default=1_002, help="chains asked for (1002)")
    parser.add_argument("--seed", type=int, default=1)


@dataclass(frozen=True, slots=True)
class Question:
    hashes: list[bytes]
    resident_count: int


def run(arguments: argparse.Namespace) -> int:
    length = arguments.tokens // arguments.block_tokens
    if length < 2:
        raise BadRequest("--tokens: give at least two blocks of --block-tokens")
    tree = ChainTree(resident_count=arguments.resident, chain_length=length, seed=arguments.seed)
    pool_bytes = budget_bytes(arguments.resident)
    options = {
        "dram.bytes": str(pool_bytes),
        "dram.slab_bytes": str(min(SLAB_BYTES, pool_bytes)),
        "dram.watermark_stop": "1.0",
    }
    _use_memory_as_engines_do()
    with (
        bench_run.bench_daemon(arguments, options) as daemon,
        connected(daemon.socket, role=Role.BOTH, name="bench match") as client,
    ):
        bench = _MatchBench(arguments, daemon, client, tree)
        figures = bench.measure_all()
        page_kind = client.stats().tiers[0].page_kind
    return bench_run.report(
        arguments, figures, TARGETS, page_kind=page_kind, is_wrong=bench.wrong_count > 0
    )


class _MatchBench:
    def __init__(
        self,
        arguments: argparse.Namespace,
        daemon: BenchDaemon,
        client: Client,
        tree: ChainTree,
    ) -> None:
        self._arguments = arguments
        self._daemon = daemon
        self._client = client
        self._tree = tree
        self._spec = spec_of(arguments.block_tokens, secrets.token_hex(8))
        self._namespace = open_namespace(client, self._spec)
        self.wrong_count = 0

    def measure_all(self) -> dict[str, object]:
        bytes_per_block, fill_seconds = self._fill()
        questions = self._questions()
        say(f"asking for {len(questions)} chains of {self._tree.chain_length} blocks")
        with started_peer("kvtier.cli.bench_match_bare") as peer:
            alone, bare = self._ask_beside_bare(str(peer.ask("open")["address"]), questions)
        daemon_us, daemon_cpu_us = self._daemon_us(questions)
        acquire = self._acquire_figures()
        with started_peer("kvtier.cli.bench_match_peer") as peer:
            busy, load = self._ask_busy(peer, questions)
        return {
            "p50_ms": measure.percentile(alone, 50),
            "p99_ms": measure.percentile(alone, 99),
            "bare_p50_ms": measure.percentile(bare, 50),
            "bare_p99_ms": measure.percentile(bare, 99),
            "daemon_us": daemon_us,
            "daemon_cpu_us": daemon_cpu_us,
            "p50_busy_ms": measure.percentile(busy, 50),
            "p99_busy_ms": measure.percentile(busy, 99),
            "busy_acquires_per_second": load,
            "bytes_per_block": bytes_per_block,
            **acquire,
            "fill_us_per_block": 1e6 * fill_seconds / self._arguments.resident,
            "wrong_answers": self.wrong_count,
            "chains": len(questions),
            "chain_blocks": self._tree.chain_length,
            "resident_blocks": self._arguments.resident,
        }

    # --------------------------------------------------------------------------------- filling

    def _fill(self) -> tuple[float, float]:
        """Commit every block; (bytes of the daemon's memory a block, seconds)."""
        filler = Filler(self._client, self._namespace)
        before = memory_of(self._daemon.pid).anonymous_bytes
        started = time.monotonic()
        for parent, packed in self._tree.runs():
            filler.commit_run(parent, packed)
        filler.finish()
        seconds = time.monotonic() - started
        grown_bytes = memory_of(self._daemon.pid).anonymous_bytes - before
        say(f"{filler.committed_count} blocks committed in {seconds:.1f} s")
        if filler.committed_count != self._arguments.resident:
            raise TierFull(
                f"{filler.committed_count} of {self._arguments.resident} blocks became resident: "
                "the daemon's pool is too small"
            )
        return grown_bytes / filler.committed_count, seconds

    # ---------------------------------------------------------------------------------- asking

    def _questions(self) -> list[Question]:
        """Fully, partly and not resident in equal parts, shuffled; all different."""
        tree, chance = self._tree, random.Random(self._arguments.seed)
        third = min(-(-self._arguments.chains // 3), tree.full_chain_count)
        length = tree.chain_length
        found: list[Question] = []
        for number in chance.sample(range(tree.full_chain_count), third):
            depth = chance.randrange(1, length)
            found.append(Question(tree.full_chain(number), length))
            found.append(Question(tree.part_chain(number, depth), depth))
            found.append(Question(tree.absent_chain(length), 0))
        chance.shuffle(found)
        return found

    def _ask(self, questions: Sequence[Question]) -> list[float]:
        """Milliseconds of each."""
        return [self._match_ms(question) for question in questions]

    def _ask_beside_bare(
        self, address: str, questions: Sequence[Question]
    ) -> tuple[list[float], list[float]]:
        """Milliseconds of each, ours and the bare server's, in turn."""
        ours, bare = [], []
        state = self._state()
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = KVTierStub(channel)
            for turn in range(-_WARM_COUNT, len(questions)):
                question = questions[turn % len(questions)]
                mine = self._match_ms(question)
                started = time.perf_counter()
                stub.Match(_request(state, question), timeout=5.0)
                theirs = 1e3 * (time.perf_counter() - started)
                if turn >= 0:  # What came before was warming up.
                    ours.append(mine)
                    bare.append(theirs)
        return ours, bare

    def _match_ms(self, question: Question) -> float:
        started = time.perf_counter()
        found = self._client.match(self._namespace, question.hashes)
        seconds = time.perf_counter() - started
        self.wrong_count += found.matched_count != question.resident_count
        return 1e3 * seconds

    def _daemon_us(self, questions: Sequence[Question]) -> tuple[float, float]:
        """(what the daemon says, its processor time) a match; past the client, which does not hand
        the daemon's figure on."""
        times = []
        state = self._state()
        address = f"unix:{grpc_socket_path(self._daemon.socket)}"
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = KVTierStub(channel)
            before = cpu_seconds(self._daemon.pid)
            for question in questions:
                answer = stub.Match(_request(state, question), timeout=5.0)
                times.append(float(answer.daemon_us))
            seconds = cpu_seconds(self._daemon.pid) - before
        return measure.percentile(times, 50), 1e6 * seconds / len(questions)

    def _state(self) -> NamespaceState:
        state = self._namespace.state
        assert state is not None, "the namespace is open"
        return state

    # ------------------------------------------------------------------------------- acquiring

    def _acquire_figures(self) -> dict[str, object]:
        chains = [self._tree.full_chain(n) for n in range(min(16, self._tree.full_chain_count))]
        before = self._acquire_seconds()
        times = []
        for turn in range(_ACQUIRE_ROUNDS):
            started = time.perf_counter()
            lease = self._client.acquire(self._namespace, chains[turn % len(chains)])
            times.append(1e3 * (time.perf_counter() - started))
            self._client.release([lease])
            if lease.leased_count != self._tree.chain_length:
                raise KVTierError(f"a resident chain was leased to {lease.leased_count} only")
        seconds = self._acquire_seconds() - before
        return {
            "acquire_us_per_block": 1e6 * seconds / (_ACQUIRE_ROUNDS * self._tree.chain_length),
            "acquire_p50_ms": measure.percentile(times, 50),
        }

    def _acquire_seconds(self) -> float:
        name = 'kvtier_call_seconds_sum{method="Acquire"}'
        return bench_run.counter(self._client.stats(), name)

    def _ask_busy(self, peer: Peer, questions: Sequence[Question]) -> tuple[list[float], float]:
        """(milliseconds of each match, acquires a second of the other process)."""
        peer.ask(
            "start",
            socket=str(self._daemon.socket),
            salt=self._spec.salt,
            tokens=self._arguments.tokens,
            block_tokens=self._arguments.block_tokens,
            resident=self._arguments.resident,
            seed=self._arguments.seed,
        )
        busy = self._ask(questions)
        load = peer.ask("stop")["acquires_per_second"]
        assert isinstance(load, float), "the peer answers a number"
        return busy, load


def _request(state: NamespaceState, question: Question) -> pb.MatchRequest:
    return pb.MatchRequest(
        token=state.token,
        namespace_id=state.namespace_id,
        hashes=b"".join(question.hashes),
    )


def _use_memory_as_engines_do() -> None:
    """Free one large array: from then on glibc keeps blocks of a message's size in its heap.

    Whatever loads a model has done so long before its first match. Without it every match pays page
    faults for its own message (see server/heap.py).
    """
    np.empty(_LARGE_BYTES, dtype=np.uint8)  # Its pages are never touched.
