"""Namespaces whose blocks are there or not each by itself, in a real daemon with NVMe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.types import Cut, Presence
from tests.e2e.client.conftest import eventually
from tests.support.known_blocks import chain_hashes, check_payload, read_leased, spec_of
from tests.support.nvme_daemon import (
    client_of,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)

pytestmark = pytest.mark.slow


def opened(client: Client, *, chained: bool) -> Namespace:
    namespace = client.open_namespace(replace(spec_of("windows"), chained=chained))
    assert client.wait_namespace(namespace, 10)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
    return namespace


def test_blocks_without_a_prefix_are_found_one_by_one_after_a_restart(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    make_pool(pool)
    hashes = chain_hashes("window", 12)
    kept = hashes[5:9]
    with running_nvme_daemon(pool) as daemon:
        with client_of(daemon) as client:
            namespace = opened(client, chained=False)
            put_all(client, namespace, kept, hashes[4])
            wait_below(daemon, len(kept))
        daemon.restart()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = opened(client, chained=False)
            found = client.match(namespace, hashes)
            assert found.matched_count == 0
            lower = bytes([Presence.LOWER if one in kept else Presence.ABSENT for one in hashes])
            assert found.presence == lower
            assert client.match(opened(client, chained=True), kept).matched_count == 0
            wanted = kept[:1:-1]
            lease = client.acquire(namespace, wanted, wait_seconds=5.0, lease_seconds=20.0)
            assert (lease.leased_count, lease.cut) == (2, Cut.NONE)
            for one, data in zip(wanted, read_leased(client, namespace, lease) or (), strict=True):
                check_payload(one, data, "onboarded")
            client.release([lease])
            presence = client.match(namespace, kept).presence
            assert presence == bytes([Presence.LOWER] * 2 + [Presence.MEMORY] * 2)
            assert not client.check().violations
