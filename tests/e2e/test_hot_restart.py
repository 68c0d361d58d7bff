"""What is in memory outlives the daemon where a holder keeps it: killed, told to end, upgraded."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.parking_places import HolderProcess
from tests.support.raw_client import RawCalls, RawSession, chain, open_session, wait_reserved

SHARD_BYTES = 4096
# Waits of a test, not of a machine: leases of the former life end after half a second.
OPTIONS = {"lease.seconds_max": "1", "lease.margin_seconds": "0.2", "lease.grace_seconds": "0.1"}


@pytest.fixture
def holder() -> Iterator[HolderProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    holder = HolderProcess(folder / "holder.sock")
    yield holder
    if holder.process.poll() is None:
        holder.end()
    shutil.rmtree(folder)


def kept_daemon(holder: HolderProcess, **options: str) -> AbstractContextManager[RunningDaemon]:
    given = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
    return running_daemon(options={**given, "restart.holder": str(holder.path)})


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHARD_BYTES, np.uint8)


def offload(
    session: RawSession, stub: KVTierStub, namespace: pb.NamespaceOpened, hashes: list[bytes]
) -> list[int]:
    slots = list(wait_reserved(stub, session.token, namespace.namespace_id, len(hashes)).slots)
    for number, slot in enumerate(slots):
        session.slot_view(slot, SHARD_BYTES)[:] = payload(number).tobytes()
    answer = stub.Commit(
        pb.CommitRequest(
            token=session.token,
            namespace_id=namespace.namespace_id,
            hashes=b"".join(hashes),
            slots=slots,
            epoch=namespace.epoch,
        )
    )
    assert len(answer.outcomes) == len(hashes)
    return slots


def wait_matched(
    session: RawSession, stub: KVTierStub, namespace: pb.NamespaceOpened, hashes: list[bytes]
) -> None:
    """Until all are resident in memory: they are taken in after READY."""
    request = pb.MatchRequest(
        token=session.token, namespace_id=namespace.namespace_id, hashes=b"".join(hashes)
    )
    deadline = time.monotonic() + 5
    while (found := stub.Match(request)).memory_count < len(hashes):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()


def end(daemon: RunningDaemon) -> None:
    assert daemon.terminate() == 0


@pytest.mark.parametrize("ending", [kill, end])
def test_blocks_outlive_the_daemon_with_their_bytes(
    holder: HolderProcess, ending: Callable[[RunningDaemon], None]
) -> None:
    hashes = chain(8)
    with kept_daemon(holder) as daemon:
        generation = daemon.ready["generation"]
        with open_session(daemon.socket) as session, RawCalls(daemon.grpc_address) as stub:
            namespace = session.open_namespace(shard_bytes=SHARD_BYTES)
            session.map_slab()
            offload(session, stub, namespace, hashes)
        ending(daemon)
        daemon.start()
        assert daemon.ready["generation"] == generation
        with open_session(daemon.socket) as session, RawCalls(daemon.grpc_address) as stub:
            namespace = session.open_namespace(shard_bytes=SHARD_BYTES)
            wait_matched(session, stub, namespace, hashes)
