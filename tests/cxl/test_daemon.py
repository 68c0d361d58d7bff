"""A daemon whose memory is a node without processors, and an engine that maps it."""

from __future__ import annotations

import time

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.cuda.numa import memory_node
from tests.support.daemon import running_daemon
from tests.support.known_blocks import chain_hashes, offload, onboard, spec_of

COUNT = 24
# The machine below is emulated: everything takes its time.
PATIENT = ClientSettings(timeout_seconds=20.0)
WAIT_SECONDS = 60.0

pytestmark = pytest.mark.cxl


def wait_populated(client: Client) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        tier = client.stats().tiers[0]
        if tier.populated_bytes == tier.budget_bytes:
            return
        time.sleep(0.2)
    raise TimeoutError("the pool was not populated")


def test_blocks_that_an_engine_offloads_lie_on_the_node_and_come_back_right(node: int) -> None:
    hashes = chain_hashes("on a node", COUNT)
    # Without the HTTP side, whose start alone takes seconds here.
    options = {"dram.nodes": str(node), "admin.address": "off"}
    with running_daemon(dram_bytes="32MiB", slab_bytes="8MiB", options=options) as daemon:
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, WAIT_SECONDS)
            wait_populated(client)
            assert offload(client, namespace, hashes) == COUNT
            assert onboard(client, namespace, hashes) == COUNT
            lease = client.acquire(namespace, hashes)
            with client.arena(namespace).hold(lease.slots, lease.session) as views:
                # As the engine that maps them sees it.
                places = {memory_node(view.ctypes.data) for view in views}
            client.release([lease])
            assert places == {node}
            assert list(client.check().violations) == []
        assert daemon.terminate() == 0
        assert f'source="node {node}"' in daemon.log_text
