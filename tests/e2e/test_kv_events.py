"""KV cache events of a real daemon, read by another msgpack than the one that wrote them."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtier.cli.list_blocks import resident_blocks
from kvtier.client import Client, ClientSettings, Namespace
from kvtier.config_events import EventsConfig
from kvtier.server.kv_publisher import Publisher
from kvtier.server.kv_wire import PLACE_OF as PLACE_OF_TIER
from kvtier.server.kv_wire import Stored, WireForm
from kvtier.types import TierName
from tests.support.daemon import DaemonFailed, running_daemon
from tests.support.four_tiers import four_tier_options
from tests.support.known_blocks import chain_hashes, offload, onboard, payload_of, reserve, spec_of
from tests.support.kv_subscriber import Place, Subscriber
from tests.support.nvme_daemon import wait_metric, wait_state
from tests.support.processes import eventually
from tests.support.readings import anon_bytes

CHAIN = 8
PLACE_OF = {
    TierName.DRAM: ("CPU", "LOCAL"),
    TierName.CXL: ("CPU", "LOCAL"),
    TierName.NVME: ("STORAGE", "LOCAL"),
    TierName.REMOTE: ("STORAGE", "REMOTE"),
}
PATIENT = ClientSettings(timeout_seconds=10.0)


def event_options(folder: Path) -> dict[str, str]:
    return {
        "kv_events.bind": f"ipc://{folder}/events",
        "kv_events.replay_bind": f"ipc://{folder}/replay",
        "kv_events.node": "n1",
    }


def subscriber(folder: Path) -> Subscriber:
    return Subscriber(f"ipc://{folder}/events", f"ipc://{folder}/replay")


def listed(client: Client) -> dict[Place, set[bytes]]:
    """What the daemon itself says."""
    found: dict[Place, set[bytes]] = {}
    for namespace in client.stats().namespaces:
        for block, tiers in resident_blocks(client, namespace.namespace_id):
            for tier in tiers:
                found.setdefault(PLACE_OF[TierName(tier)], set()).add(block)
    return found


def told(reader: Subscriber) -> dict[Place, set[bytes]]:
    return {place: blocks for place, blocks in reader.books.items() if blocks}


def wait_agree(reader: Subscriber, client: Client) -> None:
    def agree() -> bool:
        reader.read(0.1)
        return told(reader) == listed(client)

    try:
        eventually(agree, "what was announced is what the daemon lists", 8)
    except AssertionError:
        mine, theirs = told(reader), listed(client)
        differ = {
            place: (
                len(mine.get(place, set()) - theirs.get(place, set())),
                len(theirs.get(place, set()) - mine.get(place, set())),
            )
            for place in {*mine, *theirs}
        }
        raise AssertionError(f"announced alone, listed alone: {differ}") from None


def opened(client: Client, salt: str = "", block_tokens: int = 16) -> Namespace:
    namespace = client.open_namespace(replace(spec_of(salt), block_tokens=block_tokens))
    assert client.wait_connected(10)
    eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
    return namespace


@pytest.mark.slow
def test_books_kept_from_events_are_what_the_daemon_lists(socket_dir: Path) -> None:
    """Four tiers that all overflow, evictions, a restart with what NVMe still has."""
    options = event_options(socket_dir) | four_tier_options(
        socket_dir, cxl_bytes=8 << 20, nvme_bytes=24 << 20, remote_bytes=1 << 30
    )
    chance = random.Random(8)
    chains = [chain_hashes(f"event {number}", CHAIN) for number in range(40)]
    with (
        running_daemon(dram_bytes="4MiB", slab_bytes="2MiB", options=options) as daemon,
        subscriber(socket_dir) as reader,
    ):
        wait_state(daemon, "on")
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = opened(client)
            for hashes in chains:
                offload(client, namespace, hashes)
                onboard(client, namespace, hashes)
                reader.read(0.001)
            for _ in range(20):
                onboard(client, namespace, chance.choice(chains), wait_seconds=5.0)
            client.evict(namespace, chains[3])
            wait_agree(reader, client)
            assert set(told(reader)) == set(PLACE_OF.values()), "some tier has nothing"
        daemon.terminate()
        daemon.start()
        clears = reader.clear_count
        with Client(daemon.socket, settings=PATIENT) as client:
            opened(client)
            wait_state(daemon, "on")
            eventually(lambda: ("STORAGE", "LOCAL") in listed(client), "recovered")
            reader.begin_anew()
            wait_agree(reader, client)
        assert reader.clear_count > clears, "a new life of the daemon begins with a clear"


@pytest.mark.slow
def test_clear_takes_one_namespace_of_a_model_and_leaves_the_other(socket_dir: Path) -> None:
    with (
        running_daemon(
            dram_bytes="8MiB", slab_bytes="2MiB", options=event_options(socket_dir)
        ) as daemon,
        subscriber(socket_dir) as reader,
        Client(daemon.socket, settings=PATIENT) as client,
    ):
        one, other = opened(client, "one"), opened(client, "other")
        offload(client, one, chain_hashes("one", CHAIN))
        offload(client, other, chain_hashes("other", CHAIN))
        wait_agree(reader, client)
        client.clear(one)
        wait_agree(reader, client)
        assert told(reader) == {("CPU", "LOCAL"): set(chain_hashes("other", CHAIN))}


@pytest.mark.slow
def test_who_missed_batches_asks_for_them_and_agrees_again(socket_dir: Path) -> None:
    with (
        running_daemon(
            dram_bytes="4MiB", slab_bytes="2MiB", options=event_options(socket_dir)
        ) as daemon,
        subscriber(socket_dir) as reader,
        Client(daemon.socket, settings=PATIENT) as client,
    ):
        namespace = opened(client)
        for number in range(12):
            offload(client, namespace, chain_hashes(f"gap {number}", CHAIN))
            if number in (3, 7):
                assert reader.skip() > 0
            else:
                reader.read(0.05)
        assert reader.gap_count >= 1
        wait_agree(reader, client)
        # Somebody new reads from the beginning, by another kind of socket.
        with subscriber(socket_dir) as late:
            topic = next(iter(reader.next_of)).encode()
            assert topic == b"kv@n1@crash"
            assert late.ask_replay(0, topic) == reader.next_of[topic.decode()]
            assert late.ask_replay(0, b"kv@n1@other") == 0
            assert told(late) == told(reader)


@pytest.mark.slow
def test_more_than_is_kept_brings_everything_anew(socket_dir: Path) -> None:
    options = {**event_options(socket_dir), "kv_events.buffer_bytes": "1MiB"}
    with (
        running_daemon(dram_bytes="8MiB", slab_bytes="2MiB", options=options) as daemon,
        Client(daemon.socket, settings=PATIENT) as client,
    ):
        namespace = opened(client, block_tokens=4096)
        small = [chain_hashes(f"kept {number}", CHAIN) for number in range(6)]
        for hashes in small:
            offload(client, namespace, hashes)
        # Batches with many token ids push the first ones out of the buffer.
        for number in range(45):
            describe(client, namespace, chain_hashes(f"wide {number}", 2), wide=True)
        with subscriber(socket_dir) as late:
            late.read(0.3)
            late.ask_replay(0)
            wait_agree(late, client)
            announced = daemon.metrics()["kvtier_kv_events_announced_total"]
            assert announced >= 1, (late.batch_count, late.next_of, len(told(late)))


def describe(client: Client, namespace: Namespace, hashes: list[bytes], *, wide: bool) -> None:
    """Commit with token ids, evict again."""
    given = reserve(client, namespace, len(hashes))
    with client.arena(namespace).hold(given.slots, given.session) as views:
        for view, one in zip(views, hashes, strict=True):
            view[:] = payload_of(one, len(view))
    count = len(hashes) * namespace.spec.block_tokens
    client.commit(
        namespace,
        hashes,
        given.slots,
        session=given.session,
        epoch=given.epoch,
        token_ids=range(1 << 20, (1 << 20) + count),
    )
    if wide:
        client.evict(namespace, hashes)


@pytest.mark.slow
def test_blocks_committed_with_token_ids_describe_themselves(socket_dir: Path) -> None:
    with (
        running_daemon(
            dram_bytes="4MiB", slab_bytes="2MiB", options=event_options(socket_dir)
        ) as daemon,
        subscriber(socket_dir) as reader,
        Client(daemon.socket, settings=PATIENT) as client,
    ):
        namespace = opened(client)
        assert namespace.state is not None
        assert namespace.state.wants_token_ids
        hashes = chain_hashes("told", 3)
        describe(client, namespace, hashes, wide=False)
        reader.read(0.3)
        event = reader.stored[hashes[2]]
        assert event["block_hashes"] == hashes
        assert event["token_ids"] == list(range(1 << 20, (1 << 20) + 48))
        assert event["block_size"] == 16
        assert event["parent_block_hash"] is None
        assert event["ownership"] == "kvtier"


def test_what_lies_where_events_should_go_is_not_replaced(socket_dir: Path) -> None:
    """ZMQ by itself would take the place of a file, and of another daemon's socket."""
    (socket_dir / "events").write_text("mine")
    with (
        pytest.raises(DaemonFailed, match="events is there and no socket"),
        running_daemon(dram_bytes="4MiB", slab_bytes="2MiB", options=event_options(socket_dir)),
    ):
        pass
    assert (socket_dir / "events").read_text() == "mine"
    (socket_dir / "events").unlink()
    with running_daemon(dram_bytes="4MiB", slab_bytes="2MiB", options=event_options(socket_dir)):
        with (
            pytest.raises(DaemonFailed, match="listening at"),
            running_daemon(dram_bytes="4MiB", slab_bytes="2MiB", options=event_options(socket_dir)),
        ):
            pass
        with subscriber(socket_dir) as reader:
            assert reader.ask_replay(0) == 0  # The first one still answers.


def test_clear_beside_many_small_namespaces_is_soon_made_good(socket_dir: Path) -> None:
    with (
        running_daemon(
            dram_bytes="48MiB", slab_bytes="2MiB", options=event_options(socket_dir)
        ) as daemon,
        Client(daemon.socket, settings=PATIENT) as client,
        subscriber(socket_dir) as reader,
    ):
        daemon.wait_populated()
        namespaces = [opened(client, f"tenant {number}") for number in range(20)]
        for number, namespace in enumerate(namespaces):
            block = chain_hashes(str(number), 1)[0]
            client.put(namespace, [(block, payload_of(block).tobytes())])
        wait_agree(reader, client)
        client.clear(namespaces[0])
        wait_agree(reader, client)  # Half a second for each namespace would be too long.


def test_subscriber_that_does_not_read_costs_a_bounded_amount(socket_dir: Path) -> None:
    config = EventsConfig(bind=f"ipc://{socket_dir}/events", buffer_bytes=1 << 20)
    form = WireForm("bytes", msgspec.msgpack.Encoder().encode)
    publisher = Publisher(config, form, on_short=lambda topic: None, wall=lambda: 0.0)
    publisher.start()
    reader = zmq.Context().socket(zmq.SUB)
    for option, value in {zmq.RCVHWM: 1, zmq.RCVBUF: 4096, zmq.SUBSCRIBE: b""}.items():
        reader.setsockopt(option, value)
    reader.connect(config.bind)
    hashes = chain_hashes("any", 256)
    before_bytes = anon_bytes(os.getpid())
    try:
        stored = Stored(hashes, None, 16, PLACE_OF_TIER[TierName.DRAM])

        def is_connected() -> bool:
            publisher.put(b"kv", stored)
            return bool(reader.poll(10))

        eventually(is_connected, "the subscriber is connected")
        for _ in range(6000):  # 50 MiB.
            publisher.put(b"kv", stored)
        eventually(lambda: publisher.waiting_count == 0, "all is sent")
        held_bytes = anon_bytes(os.getpid()) - before_bytes
    finally:
        reader.context.destroy(linger=0)
        publisher.close()
    assert held_bytes < 30 << 20, f"{held_bytes >> 20} MiB"
