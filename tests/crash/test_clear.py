"""Clear: durable against kill -9, and everything that was begun before it ends void."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.errors import KVTierError, NotReserved
from kvtier.types import CommitOutcome, Role
from kvtier.v1 import kvtier_pb2 as pb
from tests.support import raw_client
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.known_blocks import (
    chain_hashes,
    check_payload,
    payload_of,
    reserve,
    spec_of,
)
from tests.support.observer import observing
from tests.support.processes import engine_processes, eventually

OPTIONS = {"lease.grace_seconds": "0.1"}
QUICK = ClientSettings(timeout_seconds=5.0, retry_seconds_max=0.05)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="8MiB", slab_bytes="4MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


class Clearing:
    """A Clear in another thread; `epoch` is 0 while there is no answer."""

    def __init__(self, client: Client) -> None:
        self.epoch = 0
        self.has_answered = threading.Event()
        self._client = client
        self._namespace = client.open_namespace(spec_of())
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "Clear hangs"

    def _run(self) -> None:
        try:
            self.epoch = self._client.clear(self._namespace)
        except KVTierError:
            return  # Killed before it answered.
        self.has_answered.set()


@pytest.mark.full_form
@pytest.mark.timeout(1800)
def test_epoch_of_an_answered_clear_outlives_kill_9(daemon: RunningDaemon) -> None:
    rng = random.Random(11)
    answered_count = unanswered_count = 0
    with Client(daemon.socket, role=Role.TOOL, settings=QUICK) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_namespace(namespace, 30)
        assert namespace.state is not None
        seen = [namespace.state.epoch]
        for number in range(rounds(short=8, full=200)):
            clearing = Clearing(client)
            clearing.start()
            if number % 2:
                assert clearing.has_answered.wait(10)
            else:
                time.sleep(rng.uniform(0.0, 0.006))
            daemon.restart()
            clearing.join()
            is_back = client.wait_namespace(namespace, 30)
            assert is_back, f"no session; daemon {daemon.process.poll()}: {daemon.log_text[-4000:]}"
            epoch = namespace.state.epoch
            if clearing.epoch:
                answered_count += 1
                assert epoch == clearing.epoch
                assert epoch not in seen
            else:
                unanswered_count += 1
                assert epoch == seen[-1] or epoch not in seen, "neither the old nor a new one"
            seen.append(epoch)
    state_finding(f"{answered_count} clears answered, {unanswered_count} killed before the answer")
    assert answered_count > 0


@pytest.fixture(scope="module")
def lasting() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="8MiB", slab_bytes="4MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


def test_commit_of_a_copy_begun_before_clear_is_void(lasting: RunningDaemon) -> None:
    hashes = chain_hashes("mid-copy", 3)
    with observing(lasting.socket) as observer, observing(lasting.socket) as other:
        client, namespace = observer.client, observer.namespace
        given = reserve(client, namespace, 1)
        with client.arena(namespace).hold(given.slots, given.session) as (view,):
            half, payload = len(view) // 2, payload_of(hashes[0])
            view[:half] = payload[:half]
            epoch = other.client.clear(other.namespace)
            view[half:] = payload[half:]
        assert epoch != given.epoch
        outcomes = client.commit(
            namespace, hashes[:1], given.slots, session=given.session, epoch=given.epoch
        )
        assert outcomes == [CommitOutcome.VOID]
        assert other.client.match(other.namespace, hashes).matched_count == 0
        other.wait_settled()
        assert other.dram().ready_count == 0
        with pytest.raises(NotReserved):
            client.commit(namespace, hashes[:1], given.slots, session=given.session, epoch=epoch)
        assert observer.offload("mid-copy", 3) == 3, "the namespace is used again"
        assert other.read_chain("mid-copy", 3) == 3


def test_old_epoch_is_void_even_for_slots_reserved_after_clear(lasting: RunningDaemon) -> None:
    hashes = chain_hashes("wrong epoch", 1)
    with observing(lasting.socket) as observer:
        client, namespace = observer.client, observer.namespace
        before = reserve(client, namespace, 1)
        client.abort(namespace, before.slots, session=before.session)
        client.clear(namespace)
        given = reserve(client, namespace, 1)
        outcomes = client.commit(
            namespace, hashes, given.slots, session=given.session, epoch=before.epoch
        )
        assert outcomes == [CommitOutcome.VOID]
        assert client.match(namespace, hashes).matched_count == 0
        observer.wait_settled()


class HalfPut:
    """A Put whose second half is sent when the test says so."""

    def __init__(self, address: str, token: bytes, namespace_id: int, block_hash: bytes) -> None:
        self.goes_on = threading.Event()
        self.answers: list[pb.PutResponse] = []
        self._fields = {"token": token, "namespace_id": namespace_id}
        self._hash = block_hash
        self._address = address
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> pb.PutResponse:
        self.goes_on.set()
        self._thread.join(30)
        (answer,) = self.answers
        return answer

    def _run(self) -> None:
        with raw_client.RawCalls(self._address) as stub:
            self.answers.append(stub.Put(self._pieces(), timeout=30))

    def _pieces(self) -> Iterator[pb.PutRequest]:
        data = payload_of(self._hash).tobytes()
        half = len(data) // 2
        yield pb.PutRequest(**self._fields, hash=self._hash, data=data[:half])  # type: ignore[arg-type]
        self.goes_on.wait(30)
        yield pb.PutRequest(hash=self._hash, offset=half, data=data[half:])


def test_put_begun_before_clear_is_void(lasting: RunningDaemon) -> None:
    (block_hash,) = chain_hashes("mid-put", 1)
    with observing(lasting.socket) as observer:
        client, namespace, state = observer.client, observer.namespace, observer.namespace.state
        assert state is not None
        put = HalfPut(lasting.grpc_address, state.token, state.namespace_id, block_hash)
        eventually(lambda: observer.dram().reserved_count == 1, "the put has a slot")
        client.clear(namespace)
        answer = put.finish()
        assert (answer.ready_count, answer.present_count, answer.refused_count) == (0, 0, 1)
        assert client.match(namespace, [block_hash]).matched_count == 0
        observer.wait_settled()
        client.put(namespace, [(block_hash, payload_of(block_hash).tobytes())])
        assert observer.get_chain("mid-put", 1) == 1


def test_bytes_of_a_lease_held_over_clear_stay_until_release(lasting: RunningDaemon) -> None:
    hashes = chain_hashes("mid-read", 4)
    with observing(lasting.socket) as reader, observing(lasting.socket) as writer:
        assert writer.offload("mid-read", 4) == 4
        lease = reader.client.acquire(reader.namespace, hashes)
        assert lease.leased_count == 4
        with reader.client.arena(reader.namespace).hold(lease.slots, lease.session) as views:
            assert writer.client.clear(writer.namespace) != lease.epoch
            assert writer.dram().held_count == 4
            for number in range(2 * 64):  # Twice the pool: every slot that is free is used.
                assert writer.offload(f"over {number}", 1) == 1
            for one, view in zip(hashes, views, strict=True):
                check_payload(one, view.copy(), "leased over a Clear")
            assert writer.client.match(writer.namespace, hashes).matched_count == 0
        assert reader.client.release([lease]) == 1
        writer.wait_settled()
        assert writer.dram().ready_count >= 60


def test_worker_that_copies_over_clear_and_dies_leaves_nothing(lasting: RunningDaemon) -> None:
    with engine_processes() as engines, observing(lasting.socket) as observer:
        engine = engines.start(lasting.socket)
        given = engine.ask("reserve", count=2)
        engine.ask("begin_copy", slots=given["slots"], session=given["session"])
        observer.client.clear(observer.namespace)
        assert observer.dram().held_count > 0, "it still writes"
        engine.kill()
        observer.wait_settled()
        assert observer.dram().ready_count == 0
