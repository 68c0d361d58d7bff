"""Sessions lost, replaced and quiet; slabs offered and withdrawn."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from kvtier.client import SessionRef
from kvtier.errors import StaleSlot
from kvtier.v1 import kvtier_pb2 as pb
from tests.e2e.client.conftest import (
    SPEC,
    MakeClient,
    StartDaemon,
    eventually,
    hashes,
    ready,
    session_of,
)

WITHDRAWN = pb.DaemonFrame(slab_withdrawn=pb.SlabWithdrawn(namespace_id=7, shard=0, slab_id=5))


def test_a_broken_session_is_replaced_and_its_slots_are_stale_at_once(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, old = client.arena(namespace), session_of(client)
    reservation = client.reserve(namespace, 1)
    daemon.break_connections()
    assert daemon.wait_sent("hello", 2)[1].old_session_id == old.session_id
    assert client.wait_namespace(namespace, 10)
    daemon.wait_sent("slab_mapped", 2)
    with pytest.raises(StaleSlot):
        arena.view(0, old)
    with pytest.raises(StaleSlot):
        client.commit(namespace, hashes(1), reservation.slots, session=old, epoch=3)
    with pytest.raises(StaleSlot):
        client.abort(namespace, reservation.slots, session=old)
    arena.view(0, session_of(client))
    assert daemon.wait_sent("quiet")[0].session_id == old.session_id


def test_quiet_waits_for_the_handlers_and_for_open_holds(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, old = client.arena(namespace), session_of(client)
    handler_may_return = threading.Event()
    seen: list[SessionRef] = []

    def drain(session: SessionRef) -> None:
        seen.append(session)
        handler_may_return.wait(10)

    client.add_quiet_handler(drain)
    with arena.hold([0, 1], old) as views:
        daemon.break_connections()
        assert client.wait_namespace(namespace, 10)
        eventually(lambda: seen == [old])
        views[0][:] = 1  # Still mapped: the daemon reuses nothing before Quiet.
        time.sleep(0.1)
        assert daemon.sent("quiet") == []
        handler_may_return.set()
        time.sleep(0.2)
        assert daemon.sent("quiet") == [], "quiet was said during a copy"
        del views
    gc.collect()
    assert daemon.wait_sent("quiet")[0].session_id == old.session_id


def test_a_lost_session_of_another_process_is_drained_on_request(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena = client.arena(namespace)
    others = SessionRef(generation=1, session_id=999)
    with arena.hold([3], others):
        daemon.send(pb.DaemonFrame(quiet_requested=pb.QuietRequested(session_id=999)))

        def is_refused() -> bool:
            try:
                arena.view(3, others)
            except StaleSlot:
                return True
            return False

        eventually(is_refused)
        time.sleep(0.1)
        assert daemon.sent("quiet") == []
        arena.view(3, session_of(client))
    assert daemon.wait_sent("quiet")[0].session_id == 999


def test_a_withdrawn_slab_is_refused_at_once_and_unmapped_after_its_last_view(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, session = client.arena(namespace), session_of(client)
    view = arena.view(2, session)
    daemon.send(WITHDRAWN)
    eventually(lambda: arena.mapped_slot_count == 0)
    with pytest.raises(StaleSlot):
        arena.view(2, session)
    time.sleep(0.15)
    assert daemon.sent("slab_unmapped") == []
    view[:] = 9  # Must not end this process.
    del view
    [unmapped] = daemon.wait_sent("slab_unmapped")
    assert (unmapped.slab_id, unmapped.shard) == (5, 0)


def test_another_generation_voids_everything(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    first = start_daemon(generation=1)
    client = make_client()
    namespace = ready(client, first)
    arena, old = client.arena(namespace), session_of(client)
    view = arena.view(0, old)
    first.close()
    second = start_daemon(generation=2)
    second.wait_sent("slab_mapped")
    assert client.wait_namespace(namespace, 10)
    assert session_of(client).generation == 2
    assert second.sent("hello")[0][1].old_session_id == 0
    with pytest.raises(StaleSlot):
        arena.view(0, old)
    view[:] = 1  # The old pages are ours alone now.
    arena.view(0, session_of(client))[:] = 2
    assert second.slab[0] == 2
    del view
    gc.collect()
    time.sleep(0.15)
    assert second.sent("quiet") == []
    assert second.sent("slab_unmapped") == []


def test_slots_outside_the_arena_are_stale(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, session = client.arena(namespace), session_of(client)
    for slot in (16, 1 << 20):
        with pytest.raises(StaleSlot, match="in no slab"):
            arena.view(slot, session)
    with pytest.raises(StaleSlot):
        client.arena(namespace, shard=1).view(0, session)
    with pytest.raises(StaleSlot):
        arena.view(0, SessionRef(generation=99, session_id=session.session_id))


# --------------------------------------------------------------------------- a daemon gone mad


def test_noise_ends_the_session_and_the_next_one_works(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(garbage_count=2)
    client = make_client()
    namespace = ready(client, daemon)
    daemon.send_noise()
    daemon.wait_sent("hello", 2)
    assert client.wait_namespace(namespace, 10)


def test_a_slab_longer_than_its_file_is_never_mapped(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(offer="short")
    client = make_client()
    client.open_namespace(SPEC)
    daemon.wait_sent("hello", 2)
    assert daemon.sent("slab_mapped") == []


def test_frames_of_a_newer_daemon_are_ignored(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(protocol=2)
    client = make_client()
    namespace = ready(client, daemon)
    unknown = pb.DaemonFrame.FromString(b"\xfa\x07\x02\x08\x01")
    assert unknown.WhichOneof("frame") is None
    daemon.send(unknown)
    daemon.send(pb.DaemonFrame(slots_recalled=pb.SlotsRecalled(namespace_id=1)))
    assert client.match(namespace, hashes(1)).matched_count == 0
    assert len(daemon.sent("hello")) == 1


@pytest.mark.parametrize("script", [{"protocol": 3}, {"hello_error": "ProtocolMismatch"}])
def test_a_daemon_of_another_protocol_is_left_alone(
    start_daemon: StartDaemon, make_client: MakeClient, script: dict[str, object]
) -> None:
    start_daemon(**script)
    client = make_client()
    assert not client.wait_connected(0.3)


def test_a_token_the_daemon_does_not_know_is_not_named_again(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    daemon.script.hello_error = "Unauthenticated"
    daemon.break_connections()
    time.sleep(0.2)
    daemon.script.hello_error = ""
    assert client.wait_namespace(namespace, 10)
    assert daemon.wait_sent("hello", 2)[-1].old_session_id == 0
