"""A block that somebody scribbled over after its checksum was computed is a miss when it is to go
down, and not a block with a new checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.client import Client, Namespace, SessionRef
from kvtier.types import CommitOutcome
from tests.e2e.client.conftest import eventually
from tests.support.daemon import RunningDaemon
from tests.support.known_blocks import chain_hashes, onboard, payload_of, reserve, spec_of
from tests.support.nvme_daemon import (
    client_of,
    got_count,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_metric,
    wait_state,
)

COUNT = 6
SCRIBBLED = 2  # Its place in the chain.
# Once the pool is full and half of this is used up, only what is admitted goes down: blocks that
# were used twice, or that a hint speaks of.
OPTIONS = {"nvme.write_bytes_per_hour": "8MiB"}
BELOW = 'kvtier_tier_blocks{tier="nvme"}'

pytestmark = pytest.mark.slow


def use_up_budget(daemon: RunningDaemon, client: Client) -> int:
    """Put blocks of another namespace until some stay in memory; how many have a checksum."""
    namespace = client.open_namespace(spec_of("others"))
    assert client.wait_namespace(namespace, 10)
    count = 0
    while daemon.metrics()["kvtier_demote_waiting_blocks"] == 0:
        put_all(client, namespace, chain_hashes(f"others/{count}", 8))
        count += 8
        assert count < 400, "the budget does not end"
        wait_metric(daemon, "kvtier_checksummed_blocks_total", count)
    return count


def commit(
    client: Client, namespace: Namespace, hashes: list[bytes]
) -> tuple[list[int], SessionRef]:
    """Offload the chain; its slots and their session."""
    eventually(lambda: client.arena(namespace).mapped_slot_count >= len(hashes))
    given = reserve(client, namespace, len(hashes))
    assert len(given.slots) == len(hashes)
    with client.arena(namespace).hold(given.slots, given.session) as views:
        for view, one in zip(views, hashes, strict=True):
            view[:] = payload_of(one, len(view))
    outcomes = client.commit(
        namespace, hashes, given.slots, session=given.session, epoch=given.epoch
    )
    assert outcomes == [CommitOutcome.READY] * len(hashes)
    return given.slots.tolist(), given.session


def test_block_scribbled_over_after_its_checksum_does_not_go_down(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    make_pool(path, pool_bytes=16 << 20, segment_bytes=1 << 20)
    hashes = chain_hashes("scribbled", COUNT)
    with running_nvme_daemon(path, dram_bytes="64MiB", options=OPTIONS) as daemon:
        with client_of(daemon) as client:
            summed_count = use_up_budget(daemon, client)
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            before = daemon.metrics()[BELOW]
            slots, session = commit(client, namespace, hashes)
            wait_metric(daemon, "kvtier_checksummed_blocks_total", summed_count + COUNT)
            assert daemon.metrics()[BELOW] == before, "it went down already"
            client.arena(namespace).view(slots[SCRIBBLED], session)[100] ^= 1
            assert client.hint(namespace, hashes, paused_seconds=60.0)
            wait_metric(daemon, "kvtier_corrupt_blocks_total", 1)
            assert client.match(namespace, hashes).matched_count == SCRIBBLED
            assert got_count(client, namespace, hashes) == SCRIBBLED
            metrics = daemon.metrics()
            corrupt = 'kvtier_transferred_blocks_total{direction="demote",outcome="corrupt"}'
            assert metrics[corrupt] == metrics["kvtier_corrupt_blocks_total"] == 1
            assert not client.check().violations
        assert daemon.terminate() == 0
        daemon.start()
        wait_state(daemon, "on")
        with client_of(daemon) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
            assert client.match(namespace, hashes).matched_count == SCRIBBLED
            assert onboard(client, namespace, hashes, wait_seconds=5.0) == SCRIBBLED
            assert got_count(client, namespace, hashes) == SCRIBBLED
            assert not client.check().violations
