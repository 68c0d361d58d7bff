"""Put and Get are few for all: a client that stalls or trickles must not keep one for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from google.protobuf.message import Message

from kvtier.client import ClientSettings
from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.errors import Unavailable
from kvtier.metrics import Metrics
from kvtier.namespace import NamespaceSpec
from kvtier.server import servicer_data
from kvtier.server.base import Base
from kvtier.server.calls import Send
from kvtier.server.core_loop import CoreLoop
from kvtier.server.epochs import EpochStore
from kvtier.server.leasing import PIN_WAIT_SECONDS, Leasing
from kvtier.server.mover import Mover
from kvtier.server.namespaces import Namespaces, OpenedNamespace
from kvtier.server.security import Tokens
from kvtier.server.servicer_data import (
    GET_WINDOW_BLOCKS,
    PIECE_SECONDS_MAX,
    DataCalls,
    _next_piece,
    _patience,
    _Put,
    _send_in_time,
)
from kvtier.server.watch import WatchHub
from kvtier.types import BlockHash, Cut, LeaseId, NamespaceId, Role, SessionId
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.clock import ManualClock
from tests.support.recording_core import RecordingManager

SPEC = NamespaceSpec("test", "v1", "bfloat16", "LBHD", block_tokens=16, shard_bytes=4096)
NAMESPACE = OpenedNamespace(NamespaceId(1), SPEC, b"f" * 16, slot_bytes=4096, slot_count_max=9)


def test_a_client_that_reads_nothing_loses_its_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_data, "PIECE_SECONDS_MAX", 0.0)

    async def send(_: Message) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="read nothing"):
        asyncio.run(_send_in_time(send, pb.GetResponse()))


def test_a_client_that_sends_nothing_loses_its_put() -> None:
    async def pieces() -> AsyncIterator[pb.PutRequest]:
        await asyncio.Event().wait()
        yield pb.PutRequest()

    with pytest.raises(Unavailable, match="too slowly"):
        asyncio.run(_next_piece(pieces(), 0.0))


def test_a_block_that_trickles_in_runs_out_of_time() -> None:
    put = _Put(NAMESPACE, None)
    assert _patience(put, 100.0) == PIECE_SECONDS_MAX
    put.hash, put.due_at = BlockHash(b"h" * 32), 105.0
    assert _patience(put, 90.0) == PIECE_SECONDS_MAX
    assert _patience(put, 103.0) == 2.0
    assert _patience(put, 106.0) < 0


def test_get_waits_for_a_lower_tier_once_and_less_than_its_client_waits(tmp_path: Path) -> None:
    """However many windows it has, and whatever each takes."""
    clock, metrics, asked = ManualClock(100.0), Metrics(), []

    def answer(event: ev.Event) -> list[ins.Instruction]:
        if not isinstance(event, ev.Acquire):
            return []
        asked.append(event.wait_until)
        clock.advance(3.0)
        none = np.zeros(0, np.uint32)
        return [
            ins.LeaseGranted(LeaseId(1), len(event.hashes), none, event.deadline, Cut.NONE, 1, ())
        ]

    async def test() -> None:
        core = CoreLoop(RecordingManager(answer=answer), clock=clock, metrics=metrics)
        epochs = EpochStore(tmp_path, iter([7]).__next__)
        namespaces = Namespaces(core, epochs, slab_bytes=1 << 20, slab_count_max=4, count_max=2)
        base = Base(core, namespaces, clock, metrics)
        nobody = (cast(Mover, None), cast(WatchHub, None), Leasing(core, clock))
        data = DataCalls(base, *nobody, puts_max=1, lease_seconds_max=60.0)
        opened = await namespaces.open(SPEC)
        hashes = bytes(32 * 3 * GET_WINDOW_BLOCKS)
        request = pb.GetRequest(namespace_id=opened.id, hashes=hashes)
        caller = Tokens().issue(SessionId(1), Role.TOOL, by_value=True, greeted=False, now=0.0)
        await data.get(request, caller, cast(Send, None))

    asyncio.run(test())
    assert len(asked) == 3
    [wait_until] = set(asked)
    assert 100.0 < wait_until < 100.0 + ClientSettings().stream_timeout_seconds
    assert ClientSettings().admin_timeout_seconds > PIN_WAIT_SECONDS
