"""Calls and bytes against a scripted daemon that keeps to the protocol."""

from __future__ import annotations

import os
import resource
import threading

import pytest

from kvtier.errors import (
    BadRequest,
    CorruptReplica,
    FdPassingUnavailable,
    StaleSlot,
    TierFull,
    Unavailable,
)
from kvtier.types import CommitOutcome, Cut, Role
from kvtier.v1 import kvtier_pb2 as pb
from tests.e2e.client.conftest import MakeClient, StartDaemon, eventually, hashes, ready, session_of


def test_hello_says_who_we_are(start_daemon: StartDaemon, make_client: MakeClient) -> None:
    daemon = start_daemon()
    client = make_client(
        engine_id=b"e" * 16, role=Role.WORKER, shards=(0, 3), name="rank 0", memory_node=1
    )
    assert client.wait_connected(10)
    [hello] = daemon.wait_sent("hello")
    assert (hello.engine_id, hello.role, list(hello.shards)) == (b"e" * 16, 2, [0, 3])
    assert (hello.name, hello.welcome_ns) == ("rank 0", 12345)
    assert hello.client_ns > 0
    assert hello.memory_node == 2, "0 is for those that do not know"
    assert hello.old_session_id == 0
    assert daemon.pidfd_counts == [1]


def test_what_is_filled_and_committed_is_what_is_acquired(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon(acquire_pending_count=2)
    client = make_client()
    namespace = ready(client, daemon)
    arena = client.arena(namespace)
    assert arena.mapped_slot_count == 16
    chain = hashes(4)
    reservation = client.reserve(namespace, 3)
    with arena.hold(reservation.slots, reservation.session) as views:
        for index, view in enumerate(views):
            assert view.nbytes == 100_000
            view[:] = index + 1
    outcomes = client.commit(
        namespace,
        chain[:3],
        reservation.slots,
        session=reservation.session,
        epoch=reservation.epoch,
        checksums=[1, 2, 3],
    )
    assert outcomes == [CommitOutcome.READY] * 3
    assert client.match(namespace, chain).matched_count == 3
    assert client.match(namespace, b"".join(chain)).matched_count == 3
    lease = client.acquire(namespace, chain, skip_count=1, wait_seconds=0.5)
    assert (lease.leased_count, lease.cut) == (3, Cut.MISS)
    assert [int(view[0]) for view in arena.views(lease.slots, lease.session)] == [2, 3]
    assert client.release([lease]) == 1
    assert [block[0] for block in client.get(namespace, chain)] == [1, 2, 3]


def test_put_and_get_return_the_same_bytes(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    start_daemon()
    client = make_client()
    namespace = ready(client)
    chain = hashes(3)
    blocks = [(one, bytes([7 + index]) * 100_000) for index, one in enumerate(chain)]
    result = client.put(namespace, [(one, memoryview(data)) for one, data in blocks])
    assert result.ready_count == 3
    assert client.get(namespace, chain) == [data for _, data in blocks]
    assert client.clear(namespace) == 4
    assert client.get(namespace, chain) == []


def test_bytes_that_do_not_match_their_checksum_are_never_returned(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client)
    client.put(namespace, [(hashes(1)[0], bytes(100_000))])
    daemon.script.corrupt_get = True
    with pytest.raises(CorruptReplica):
        client.get(namespace, hashes(1))
    assert client.connected


def test_the_daemons_errors_arrive_by_name_and_do_not_open_the_breaker(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    start_daemon()
    client = make_client()
    namespace = ready(client)
    with pytest.raises(TierFull, match="ask for less"):
        client.reserve(namespace, 1000)
    with pytest.raises(BadRequest):
        client.match(namespace, [b"short"])
    with pytest.raises(BadRequest, match="slots"):
        client.commit(namespace, hashes(2), [1], session=session_of(client), epoch=3)
    assert client.connected


def test_a_recall_reaches_the_handler(start_daemon: StartDaemon, make_client: MakeClient) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    seen: list[tuple[object, int]] = []
    called = threading.Event()

    def on_recall(about: object, count: int) -> None:
        seen.append((about, count))
        called.set()

    client.set_recall_handler(on_recall)
    daemon.send(pb.DaemonFrame(slots_recalled=pb.SlotsRecalled(namespace_id=7, count=5)))
    assert called.wait(5)
    assert seen == [(namespace, 5)]


def test_watch_says_that_events_were_lost_after_a_reconnect(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    events = client.watch(ready(client))
    assert next(events).WhichOneof("event") == "cleared"
    daemon.break_connections()
    kinds = [str(next(events).WhichOneof("event"))]
    while kinds[-1] == "lost" and len(kinds) < 10:  # Again for each try to reconnect that fails.
        kinds.append(str(next(events).WhichOneof("event")))
    assert kinds[0] == "lost"
    assert kinds[-1] == "cleared"
    client.close()
    assert list(events) == []


def test_close_says_bye_and_later_calls_fail(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    arena, session = client.arena(namespace), session_of(client)
    client.close()
    daemon.wait_sent("bye")
    with pytest.raises(Unavailable, match="closed"):
        client.match(namespace, hashes(1))
    with pytest.raises(StaleSlot):
        arena.view(0, session)
    client.close()


def test_no_bye_while_a_copy_is_under_way(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client()
    namespace = ready(client, daemon)
    with client.arena(namespace).hold([0], session_of(client)):
        client.close()
    assert daemon.sent("bye") == []


# ------------------------------------------------------------------------------------ by value


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "script",
    [{"by_value": True}, {"offer": "none"}, {"offer": "cut_off"}],
    ids=["the daemon says so", "no descriptor came", "descriptors were cut off"],
)
def test_without_descriptors_blocks_travel_by_value(
    start_daemon: StartDaemon,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    script: dict[str, object],
) -> None:
    daemon = start_daemon(**script)
    client = make_client()
    namespace = ready(client)
    eventually(lambda: client.by_value)
    for call in (
        lambda: client.acquire(namespace, hashes(1)),
        lambda: client.reserve(namespace, 1),
    ):
        with pytest.raises(FdPassingUnavailable, match="use put and get"):
            call()
    client.put(namespace, [(hashes(1)[0], bytes(100_000))])
    assert client.get(namespace, hashes(1)) == [bytes(100_000)]
    assert daemon.sent("slab_mapped") == []
    daemon.break_connections()
    daemon.wait_sent("hello", 2)
    eventually(lambda: client.connected and client.by_value)
    assert len(_warnings(caplog)) == 1


def test_a_process_out_of_descriptors_is_told_which_limit_to_raise(
    start_daemon: StartDaemon, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start_daemon()
    client = make_client()
    ready(client, daemon)
    offer = pb.SlabOffered(namespace_id=7, slab_id=6, slot_bytes=1 << 17, slab_bytes=2 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        daemon.send(pb.DaemonFrame(slab_offered=offer), (daemon.slab_fd,))
        eventually(lambda: client.by_value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [warning] = _warnings(caplog)
    assert "RLIMIT_NOFILE" in warning
    assert "ulimit -n" in warning
    assert len(daemon.sent("slab_mapped")) == 1


def test_a_tcp_address_works_by_value(
    start_daemon: StartDaemon, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start_daemon()
    client = make_client(f"tcp://127.0.0.1:{daemon.port}")
    namespace = ready(client)
    assert client.by_value
    with pytest.raises(FdPassingUnavailable):
        client.reserve(namespace, 1)
    client.put(namespace, [(hashes(1)[0], b"v" * 100_000)])
    assert client.match(namespace, hashes(2)).matched_count == 1
    assert client.get(namespace, hashes(2)) == [b"v" * 100_000]
    assert len(_warnings(caplog)) == 1


def test_a_forgotten_by_value_session_is_opened_again(
    start_daemon: StartDaemon, make_client: MakeClient
) -> None:
    daemon = start_daemon()
    client = make_client(f"tcp://127.0.0.1:{daemon.port}")
    namespace = ready(client)
    daemon.tokens.clear()
    with pytest.raises(Exception, match="no such token"):
        client.match(namespace, hashes(1))
    assert client.wait_namespace(namespace, 10)
    assert client.match(namespace, hashes(1)).matched_count == 0
