"""Put and Get are few for all: a client that stalls or trickles must not keep one for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import Message

from kvtier.errors import Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.server import servicer_data
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.servicer_data import (
    PIECE_SECONDS_MAX,
    _next_piece,
    _patience,
    _Put,
    _send_in_time,
)
from kvtier.types import BlockHash, NamespaceId
from kvtier.v1 import kvtier_pb2 as pb

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
