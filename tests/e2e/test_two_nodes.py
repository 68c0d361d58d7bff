"""Two daemons in two network namespaces, each with an address of its own, share through an engine
in a third."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings, Namespace
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import chain_hashes, offload, onboard, spec_of
from tests.support.mooncake_master import MooncakeMaster, needs_mooncake
from tests.support.networks import Network, network
from tests.support.processes import eventually
from tests.support.redis_server import RedisServer, needs_redis

CHAIN = 8
CHAINS = 6
WAIT_SECONDS = 2.0
# Beyond what an acquire asked for: the machine's own pauses.
SLACK_SECONDS = 1.0
KNOWN = 'kvtier_tier_blocks{tier="remote"}'
PATIENT = ClientSettings(timeout_seconds=5.0, admin_timeout_seconds=30.0)
SERVE = (sys.executable, "-m", "kvtier.cli.main", "serve")

Engine = RedisServer | MooncakeMaster


def started(kind: str, folder: Path, net: Network) -> Engine:
    if kind == "mooncake":
        return MooncakeMaster(folder, net.host)
    arguments = ["--bind", "127.0.0.1", net.host, "--protected-mode", "no"]
    return RedisServer(folder, arguments)


def options_of(engine: Engine, net: Network, node: int) -> dict[str, str]:
    address = f"{net.host}:{engine.port}"
    if isinstance(engine, RedisServer):
        return {"remote.engine": "redis", "remote.addresses": address}
    return {
        "remote.engine": "mooncake",
        "remote.master": address,
        "remote.host": net.addresses[node],
        "remote.segment_bytes": "64MiB",
    }


@contextlib.contextmanager
def node(net: Network, number: int, options: Mapping[str, str]) -> Iterator[Node]:
    with (
        running_daemon(
            dram_bytes="16MiB",
            slab_bytes="2MiB",
            options={"lease.grace_seconds": "0.1", "admin.address": "off", **options},
            program=[*net.command(number), *SERVE],
        ) as daemon,
        Client(daemon.socket, settings=PATIENT) as client,
    ):
        yield Node(daemon, client)


class Node:
    def __init__(self, daemon: RunningDaemon, client: Client) -> None:
        self.daemon = daemon
        self.client = client
        self.namespace: Namespace = client.open_namespace(spec_of())
        assert client.wait_connected(20)
        eventually(lambda: client.arena(self.namespace).mapped_slot_count > 0, "slots")

    def counter(self, name: str) -> float:
        return float(self.client.stats().counters.get(name, 0))

    def share(self, label: str) -> list[bytes]:
        hashes = chain_hashes(label, CHAIN)
        known = self.counter(KNOWN)
        assert offload(self.client, self.namespace, hashes) == CHAIN
        assert onboard(self.client, self.namespace, hashes) == CHAIN
        eventually(lambda: self.counter(KNOWN) >= known + CHAIN, "put")
        return hashes

    def onboard(self, hashes: list[bytes]) -> tuple[int, float]:
        began = time.monotonic()
        count = onboard(self.client, self.namespace, hashes, wait_seconds=WAIT_SECONDS)
        return count, time.monotonic() - began


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("redis", marks=needs_redis),
        pytest.param("mooncake", marks=[needs_mooncake, pytest.mark.torture]),
    ],
)
def test_prefix_of_one_node_is_onboarded_on_another_also_after_the_engine_was_killed(
    kind: str, tmp_path: Path
) -> None:
    with network(2) as net:
        engine = started(kind, tmp_path / "engine", net)
        try:
            with (
                node(net, 0, options_of(engine, net, 0)) as first,
                node(net, 1, options_of(engine, net, 1)) as second,
            ):
                chains = [first.share(f"chain {number}") for number in range(CHAINS)]
                eventually(lambda: second.counter("kvtier_remote_epochs_count") >= 1, "an epoch")
                assert [second.onboard(hashes)[0] for hashes in chains] == [CHAIN] * CHAINS
                longest = killed_in_traffic(engine, first, second)
                assert longest <= WAIT_SECONDS + SLACK_SECONDS
                engine.start()
                eventually(lambda: comes_across(first, second), "without a restart", seconds=60.0)
        finally:
            engine.kill()


def killed_in_traffic(engine: Engine, first: Node, second: Node) -> float:
    """Kill the engine while one node puts and the other asks; the longest that an acquire took."""
    fresh = [chain_hashes(f"fresh {number}", CHAIN) for number in range(20)]
    killing = threading.Timer(0.3, engine.kill)
    killing.start()
    longest = 0.0
    for hashes in fresh:
        assert offload(first.client, first.namespace, hashes) == CHAIN
        onboard(first.client, first.namespace, hashes)
        longest = max(longest, second.onboard(hashes)[1])  # Right bytes or a miss.
    killing.join()
    return longest


def comes_across(first: Node, second: Node) -> bool:
    """A chain put anew, onboarded there. An engine that came back empty gets a new epoch from
    whoever looks first; what the other has put until it sees that is void."""
    again = shared_anew(first)
    with contextlib.suppress(AssertionError):
        eventually(lambda: second.onboard(again)[0] == CHAIN, "onboarded", seconds=5.0)
        return True
    return False


def shared_anew(one: Node) -> list[bytes]:
    """A chain that reached the engine after it came back."""
    found: list[list[bytes]] = []

    def reached() -> bool:
        label = f"anew {time.monotonic_ns()}"
        with contextlib.suppress(AssertionError):
            found.append(one.share(label))
        return bool(found)

    eventually(reached, "puts after the engine came back", seconds=90.0)
    return found[0]
