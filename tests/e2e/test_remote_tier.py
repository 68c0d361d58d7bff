"""Daemons that share blocks through a remote engine: a folder, or a real Redis."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.errors import KVTierError, Unavailable
from kvtier.pools.remote.files import prepare_root
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, offload, onboard, spec_of
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import eventually
from tests.support.redis_server import RedisServer, needs_redis

CHAIN = 8
DRAM_BYTES = 8 << 20
# A clear waits for all nodes.
PATIENT = ClientSettings(timeout_seconds=5.0, admin_timeout_seconds=30.0)
KNOWN = 'kvtier_tier_blocks{tier="remote"}'
EPOCHS = "kvtier_remote_epochs_count"
# Gives a clear up before it can have ended.
HASTY = ClientSettings(timeout_seconds=5.0, admin_timeout_seconds=0.3)
FOUND = "kvtier_remote_found_blocks_total"
HITS = 'kvtier_hit_blocks_total{call="acquire",tier="remote"}'


class Node:
    """A daemon and an engine's client."""

    def __init__(self, daemon: RunningDaemon, client: Client) -> None:
        self.daemon = daemon
        self.client = client
        self.namespace: Namespace = client.open_namespace(spec_of())
        assert client.wait_connected(10)
        eventually(lambda: client.arena(self.namespace).mapped_slot_count > 0, "slots")

    def share(self, label: str) -> list[bytes]:
        """Offload a chain and use it again, so that it goes to the remote engine."""
        hashes = chain_hashes(label, CHAIN)
        known = self.daemon.metrics().get(KNOWN, 0)
        assert offload(self.client, self.namespace, hashes) == CHAIN
        assert onboard(self.client, self.namespace, hashes) == CHAIN
        wait_metric(self.daemon, KNOWN, known + CHAIN)
        return hashes

    def onboard(self, hashes: list[bytes], wait_seconds: float = 5.0) -> int:
        return onboard(self.client, self.namespace, hashes, wait_seconds=wait_seconds)


@contextlib.contextmanager
def node(options: Mapping[str, str]) -> Iterator[Node]:
    settings = {"lease.grace_seconds": "0.1", **options}
    with running_daemon(dram_bytes=str(DRAM_BYTES), slab_bytes="2MiB", options=settings) as daemon:
        daemon.wait_populated()
        with Client(daemon.socket, settings=PATIENT) as client:
            yield Node(daemon, client)


@contextlib.contextmanager
def share(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Of `[remote]`, for as many nodes as a test likes."""
    if kind == "files":
        prepare_root(folder / "share")
        yield {
            "remote.engine": "files",
            "remote.path": str(folder / "share"),
            "remote.capacity_bytes": "1GiB",
        }
        return
    server = RedisServer(folder / "redis")
    try:
        yield {"remote.engine": "redis", "remote.addresses": f"127.0.0.1:{server.port}"}
    finally:
        server.kill()


def wait_epoch(one: Node) -> None:
    """Until the node follows the namespace's epoch in the engine."""
    eventually(lambda: one.daemon.metrics().get(EPOCHS, 0) >= 1, "an epoch")


@pytest.mark.parametrize("kind", ["files", pytest.param("redis", marks=needs_redis)])
def test_what_one_node_computed_another_finds_and_onboards(kind: str, tmp_path: Path) -> None:
    with share(kind, tmp_path) as options, node(options) as first, node(options) as second:
        chains = [first.share(f"chain {number}") for number in range(5)]
        wait_epoch(second)
        hits = [second.onboard(hashes) for hashes in chains[1:]]
        assert hits == [CHAIN] * 4
        metrics = second.daemon.metrics()
        assert metrics[HITS] == metrics[FOUND] == 4 * CHAIN
        assert second.onboard(chain_hashes("nobody's", CHAIN)) == 0
        # A match begins the search and does not wait for it.
        began = time.monotonic()
        found = second.client.match(second.namespace, chains[0])
        assert (found.matched_count, time.monotonic() - began < 0.5) == (0, True)
        eventually(
            lambda: second.client.match(second.namespace, chains[0]).matched_count == CHAIN,
            "the search that the first match began",
        )
        last = first.share("last")
        second.client.prefetch(second.namespace, last)
        eventually(lambda: second.daemon.metrics()[FOUND] == 6 * CHAIN, "that of a prefetch")


def test_what_memory_has_given_up_comes_back_from_the_remote_engine(tmp_path: Path) -> None:
    with share("files", tmp_path) as options, node(options) as only:
        count = 3 * DRAM_BYTES // SHARD_BYTES // CHAIN
        chains = [only.share(f"chain {number}") for number in range(count)]
        assert [only.onboard(hashes) for hashes in chains] == [CHAIN] * count
        assert only.daemon.metrics()[HITS] >= count * CHAIN // 2


@pytest.mark.torture  # Half a minute: a clear may wait for the views of all nodes.
@needs_redis
def test_clear_on_one_node_holds_on_all_and_an_engine_that_is_gone_costs_misses(
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path / "redis")
    options = {"remote.engine": "redis", "remote.addresses": f"127.0.0.1:{server.port}"}
    try:
        with node(options) as first, node(options) as second:
            hashes = first.share("chain")
            wait_epoch(second)
            first.client.clear(first.namespace)
            assert (first.onboard(hashes), second.onboard(hashes)) == (0, 0), "put before"
            again = first.share("after")
            eventually(lambda: second.onboard(again) == CHAIN, "the epoch that came after")
            with Client(first.daemon.socket, settings=HASTY) as hasty:
                namespace = hasty.open_namespace(spec_of())
                assert hasty.wait_connected(10)
                with pytest.raises(KVTierError):
                    hasty.clear(namespace)
            # The clear that nobody waited for has ended, and the tier is on.
            eventually(lambda: first.daemon.metrics()[EPOCHS] == 1, "the end of the clear")
            again = first.share("again")
            eventually(lambda: second.onboard(again) == CHAIN, "the epoch that came then")
            last = first.share("last")
            server.kill()
            began = time.monotonic()
            assert second.onboard(last, wait_seconds=2.0) == 0
            assert time.monotonic() - began < 4.0
            assert second.onboard(again) == CHAIN, "in memory"
            with pytest.raises(Unavailable, match="cleared on this node, but redis"):
                first.client.clear(first.namespace)
            server.start()
            eventually(lambda: cleared(first), "a clear once the engine is back")
            anew = first.share("anew")
            eventually(lambda: second.onboard(anew) == CHAIN, "without a restart")
    finally:
        server.kill()


def cleared(one: Node) -> bool:
    try:
        one.client.clear(one.namespace)
    except Unavailable:
        return False
    return True
