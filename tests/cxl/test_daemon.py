"""Daemons on the real thing: memory on a node without processors, and a CXL tier on one or on a
device, with an engine that offloads more than memory holds and takes it back."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.cuda.numa import memory_node
from kvtier.io.dax import find_dax_device
from kvtier.pools.dax import format_device
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, offload, onboard, spec_of
from tests.support.processes import engine_processes

COUNT = 24
# The machine below is emulated: everything takes its time.
PATIENT = ClientSettings(timeout_seconds=20.0)
WAIT_SECONDS = 60.0
CHAIN = 8
DRAM_BYTES = 4 << 20
CXL_BYTES = 16 << 20
MOVE_PAGES = 279  # The system call's number on x86-64, where these machines are.

pytestmark = pytest.mark.cxl


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not in {WAIT_SECONDS} s")
        time.sleep(0.1)


def tier_of(client: Client, name: str) -> pb.TierStats:
    return next(one for one in client.stats().tiers if one.tier == name)


def wait_populated(client: Client, name: str = "dram") -> None:
    def is_there() -> bool:
        tier = tier_of(client, name)
        return bool(tier.populated_bytes == tier.budget_bytes)

    wait_until(is_there, f"{name} is populated")


def wait_copied(client: Client, count: int) -> None:
    wait_until(lambda: tier_of(client, "cxl").ready_count == count, f"{count} blocks in the tier")


@contextmanager
def daemon_with_tier(
    options: Mapping[str, str],
) -> Iterator[tuple[RunningDaemon, Client, Namespace]]:
    """With a CXL tier four times as large as memory, and an engine."""
    settings = {"admin.address": "off", "cxl.bytes": str(CXL_BYTES), "cxl.slab_bytes": "4MiB"}
    with running_daemon(
        dram_bytes=str(DRAM_BYTES), slab_bytes="2MiB", options={**settings, **options}
    ) as daemon:
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, WAIT_SECONDS)
            wait_populated(client)
            wait_populated(client, "cxl")
            yield daemon, client, namespace
        assert daemon.terminate() == 0


def go_round(client: Client, namespace: Namespace, label: str) -> None:
    """Offload twice what memory holds, and onboard all of it: each byte is compared."""
    chains = [
        chain_hashes(f"{label} {number}", CHAIN)
        for number in range(2 * DRAM_BYTES // SHARD_BYTES // CHAIN)
    ]
    for count, hashes in enumerate(chains, start=1):
        assert offload(client, namespace, hashes) == CHAIN
        wait_copied(client, count * CHAIN)
    in_memory = tier_of(client, "dram").ready_count
    assert in_memory < len(chains) * CHAIN, "memory has given blocks up"
    for hashes in chains:
        assert onboard(client, namespace, hashes, wait_seconds=WAIT_SECONDS / 4) == CHAIN
    assert list(client.check().violations) == []


def mapped_at(pid: int, file: str) -> list[tuple[int, int]]:
    """Where the process has mapped files of this name: first address and length."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if re.search(file, line):
            first, _, last = line.split()[0].partition("-")
            found.append((int(first, 16), int(last, 16) - int(first, 16)))
    return found


def nodes_of(pid: int, places: list[tuple[int, int]]) -> set[int]:
    """On which nodes pages of another process lie, by the kernel's word; every one is asked for."""
    pages = np.concatenate(
        [np.arange(at, at + length, mmap.PAGESIZE, dtype=np.uint64) for at, length in places]
    )
    nodes = np.full(len(pages), -1, dtype=np.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(MOVE_PAGES),
        ctypes.c_int(pid),
        ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.ctypes.data),
        None,
        ctypes.c_void_p(nodes.ctypes.data),
        ctypes.c_int(0),
    )
    assert done == 0, os.strerror(ctypes.get_errno())
    return set(np.unique(nodes).tolist())


def test_memory_and_tier_lie_on_the_node_and_blocks_come_back_right(node: int) -> None:
    """Both in one daemon: a start takes its time here."""
    options = {"dram.nodes": str(node), "cxl.node": str(node)}
    with daemon_with_tier(options) as (daemon, client, namespace):
        go_round(client, namespace, "a tier on a node")
        hashes = chain_hashes("mapped", CHAIN)
        assert offload(client, namespace, hashes) == CHAIN
        lease = client.acquire(namespace, hashes)
        with client.arena(namespace).hold(lease.slots, lease.session) as views:
            # As the engine that maps them sees it.
            assert {memory_node(view.ctypes.data) for view in views} == {node}
        client.release([lease])
        assert tier_of(client, "cxl").memory == f"node {node}"
        assert f'source="node {node}"' in daemon.log_text
        slabs = mapped_at(daemon.process.pid, "memfd:kvtier-slab")
        assert sum(length for _, length in slabs) == DRAM_BYTES + CXL_BYTES
        assert nodes_of(daemon.process.pid, slabs) == {node}
        heap = nodes_of(daemon.process.pid, mapped_at(daemon.process.pid, r"\[heap\]"))
        assert 0 in heap, "the kernel would have said so"


def read_directly(daemon: RunningDaemon, memory: str) -> None:
    """Two engines, each a process, map the tier and read it; one is killed, the other reads on."""
    with engine_processes() as engines:
        started = [
            engines.start(daemon.socket, maps_segments=1, timeout_seconds=20.0) for _ in range(2)
        ]
        chains = [f"direct {number}" for number in range(2 * DRAM_BYTES // SHARD_BYTES // CHAIN)]
        with Client(daemon.socket, settings=PATIENT) as client:
            for count, label in enumerate(chains, start=1):
                assert started[0].ask("offload", label=label, count=CHAIN)["count"] == CHAIN
                wait_copied(client, count * CHAIN)
            assert tier_of(client, "cxl").memory == f"{memory}, mapped by engines"
            for engine, label in zip(started, chains, strict=False):
                whole = {"count": CHAIN, "direct": CHAIN}
                assert engine.ask("lease", label=label, count=CHAIN) == whole
                assert engine.ask("read_leased", label=label)["count"] == CHAIN
            wait_until(lambda: tier_of(client, "cxl").pinned_count == 2 * CHAIN, "both hold")
            started[0].kill()
            wait_until(lambda: tier_of(client, "cxl").pinned_count == CHAIN, "it lets go")
            assert started[1].ask("read_leased", label=chains[1])["count"] == CHAIN
            assert list(client.check().violations) == []


DIRECT = {"cxl.single_tenant": "true", "cxl.onboard": "direct"}


def test_engines_read_a_tier_on_a_node_where_it_lies(node: int) -> None:
    with daemon_with_tier({"cxl.node": str(node), **DIRECT}) as (daemon, _, _):
        read_directly(daemon, f"node {node}")


def test_engines_read_a_tier_on_the_device_where_it_lies(device_path: Path) -> None:
    format_device(find_dax_device(device_path), generation=1, force=True)
    with daemon_with_tier({"cxl.dax": str(device_path), **DIRECT}) as (daemon, _, _):
        read_directly(daemon, str(device_path))


def test_blocks_go_down_to_a_tier_on_the_device_and_come_back_right(device_path: Path) -> None:
    format_device(find_dax_device(device_path), generation=1, force=True)
    with daemon_with_tier({"cxl.dax": str(device_path)}) as (daemon, client, namespace):
        go_round(client, namespace, "a tier on a device")
        assert tier_of(client, "cxl").memory == str(device_path)
        mapped = mapped_at(daemon.process.pid, f"{device_path}$")
        assert sum(length for _, length in mapped) >= CXL_BYTES
