"""The lane's connection, fed bytes in whatever pieces a socket may give."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvtier.lane import HEAD, PAYLOAD_BYTES_MAX, pack
from kvtier.server.lane import LaneConnection


class Wire:
    """Stands for the transport."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Peer:
    """A connection and what its calls were."""

    def __init__(self, tasks: asyncio.TaskGroup, *, connections_max: int = 4) -> None:
        self.calls: list[tuple[int, bytes]] = []
        self.hang = False
        self.cancelled = False
        self.wire = Wire()
        self.connection = LaneConnection(self._answer, tasks, set(), connections_max)
        self.connection.connection_made(cast("asyncio.Transport", self.wire))

    async def _answer(self, number: int, payload: bytes) -> bytes:
        self.calls.append((number, payload))
        try:
            await asyncio.sleep(60 if self.hang else 0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return pack(0, payload[::-1])

    def feed(self, data: bytes) -> None:
        while data and not self.wire.closed:
            room = self.connection.get_buffer(-1)
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.mark.parametrize("piece_bytes", [1, 3, 5, 6, 1000, 70_000, 300_000])
def test_a_frame_in_any_pieces_is_one_call(piece_bytes: int) -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            for payload in (b"", b"short", bytes(range(256)) * 600):
                frame = pack(2, payload)
                step = max(piece_bytes, len(frame) // 500)
                for start in range(0, len(frame), step):
                    peer.feed(frame[start : start + step])
                await peer.settle()
                assert peer.calls[-1] == (2, payload)
                assert peer.wire.written[-1] == pack(0, payload[::-1])
            assert len(peer.calls) == 3

    asyncio.run(body())


def test_a_frame_beyond_the_limit_closes_the_connection() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            peer.feed(HEAD.pack(PAYLOAD_BYTES_MAX + 1, 0))
            assert peer.wire.closed
            assert peer.calls == []

    asyncio.run(body())


@pytest.mark.parametrize("pieces", [(6, 10), (16,), (8, 8), (9, 7)])
def test_bytes_before_the_answer_close_the_connection(pieces: tuple[int, ...]) -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            frames = pack(0, b"one") + pack(0, b"two")
            for count in pieces:
                peer.feed(frames[:count])
                frames = frames[count:]
            await peer.settle()
            assert peer.wire.closed
            assert peer.wire.written == []

    asyncio.run(body())


def test_a_client_that_closes_cancels_its_call() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            peer.hang = True
            peer.feed(pack(1, b"x"))
            await peer.settle()
            peer.wire.closed = True
            peer.connection.connection_lost(None)
            await peer.settle()
            assert peer.cancelled
            assert peer.wire.written == []

    asyncio.run(body())


def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            assert Peer(tasks, connections_max=0).wire.closed
            assert not Peer(tasks, connections_max=1).wire.closed

    asyncio.run(body())
