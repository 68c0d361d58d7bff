"""An engine that scribbles over a block after it was committed: the block is a miss, not a lie."""

from __future__ import annotations

import time

from kvtier.client import Client, Namespace
from kvtier.namespace import NamespaceSpec
from tests.support.daemon import RunningDaemon, running_daemon

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=4096)
CHAIN = [bytes([index]) * 32 for index in range(4)]


def offload(client: Client, namespace: Namespace) -> tuple[list[int], object]:
    """Commit the chain, each block full of its number + 1; its slots and their session."""
    deadline = time.monotonic() + 30
    slots: list[int] = []
    while len(slots) < len(CHAIN):
        assert time.monotonic() < deadline
        reservation = client.reserve(namespace, 1)
        if not len(reservation.slots):
            time.sleep(0.05)
            continue
        place = len(slots)
        with client.arena(namespace).hold(reservation.slots, reservation.session) as [view]:
            view[:] = place + 1
        client.commit(
            namespace,
            [CHAIN[place]],
            reservation.slots,
            parent=CHAIN[place - 1] if place else None,
            session=reservation.session,
            epoch=reservation.epoch,
        )
        slots.extend(reservation.slots.tolist())
    return slots, reservation.session


def wait_checksums(daemon: RunningDaemon) -> None:
    deadline = time.monotonic() + 30
    while daemon.metrics()["kvtier_checksummed_blocks_total"] < len(CHAIN):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_block_scribbled_over_is_a_miss_and_is_gone_with_what_follows_it() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        daemon.wait_populated()
        namespace = client.open_namespace(SPEC)
        assert client.wait_namespace(namespace, 10)
        slots, session = offload(client, namespace)
        wait_checksums(daemon)
        assert [bytes(one) for one in client.get(namespace, CHAIN)] == [
            bytes([index + 1]) * 4096 for index in range(4)
        ]
        client.arena(namespace).view(slots[1], session)[100] ^= 1
        assert [bytes(one) for one in client.get(namespace, CHAIN)] == [bytes([1]) * 4096]
        assert client.match(namespace, CHAIN, timeout_seconds=10).matched_count == 1
        assert daemon.metrics()["kvtier_corrupt_blocks_total"] == 1
        assert client.check().violations == []
        tier = client.stats().tiers[0]
        assert (tier.ready_count, tier.held_count) == (1, 0)
