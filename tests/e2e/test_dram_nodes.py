"""A daemon whose slabs are bound to a NUMA node, and a worker that says which one is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.io.nodes import read_nodes
from kvtier.namespace import NamespaceSpec
from tests.support.daemon import running_daemon
from tests.support.processes import eventually

SPEC = NamespaceSpec("model", "weights", "bfloat16", "nhd", 16, 64 << 10)


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli.main", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def node_here() -> int:
    found = [node.index for node in read_nodes() if node.memory_bytes]
    if not found:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    return found[0]


@pytest.mark.parametrize("offset", [0, 1], ids=["its own node", "a node without slabs"])
def test_worker_near_a_node_is_given_slots_wherever_they_are(offset: int) -> None:
    node = node_here()
    options = {"dram.nodes": str(node)}
    with running_daemon(dram_bytes="8MiB", slab_bytes="2MiB", options=options) as daemon:
        daemon.wait_populated()
        settings = ClientSettings(timeout_seconds=2.0)
        client = Client(daemon.socket, memory_node=node + offset, settings=settings)
        try:
            namespace = client.open_namespace(SPEC)
            assert client.wait_connected(10)
            arena = client.arena(namespace)
            eventually(lambda: arena.mapped_slot_count > 0, "no slab was mapped")
            reservation = client.reserve(namespace, 4)
            assert len(reservation.slots) == 4
        finally:
            client.close()
        checked = run_cli("check", "--socket", str(daemon.socket))
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_node_that_does_not_exist_ends_the_daemon_with_a_sentence(tmp_path: Path) -> None:
    node_here()
    refused = run_cli(
        *("serve", "--socket", str(tmp_path / "kvtier.sock"), "--state-dir", str(tmp_path)),
        *("--set", "dram.bytes=8MiB", "--set", "dram.nodes=0,1001"),
    )
    assert refused.returncode != 0
    assert "NUMA node 1001 is not online" in refused.stderr
    assert "Traceback" not in refused.stderr
