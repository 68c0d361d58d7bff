"""The lane's connection, fed bytes in whatever pieces a socket may give."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvtier.lane import HEAD, PAYLOAD_BYTES_MAX, REFUSED, pack
from kvtier.server import lane, security
from kvtier.server.lane import SCRATCH_BYTES, LaneConnection


class Wire:
    """Stands for the transport."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.unread_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


class Peer:
    """A connection and what its calls were."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        connections_max: int = 4,
        beside: dict[LaneConnection, None] | None = None,
    ) -> None:
        self.calls: list[tuple[int, bytes]] = []
        self.hang = False
        self.cancelled = False
        self.wire = Wire()
        connections = {} if beside is None else beside
        self.connection = LaneConnection(
            self._answer, lambda _: security.Peer(), tasks, connections, connections_max
        )
        self.connection.connection_made(cast("asyncio.Transport", self.wire))

    async def _answer(self, number: int, payload: bytes, _: security.Peer) -> bytes:
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


def test_beyond_the_limit_those_go_first_who_made_no_good_call() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            beside: dict[LaneConnection, None] = {}
            caller, waiting, idle, late = (
                Peer(tasks, connections_max=3, beside=beside) for _ in range(4)
            )
            assert [one.wire.closed for one in (caller, waiting, idle, late)] == [
                True,  # The oldest: nobody has called yet.
                False,
                False,
                False,
            ]
            for one in (waiting, idle):
                one.feed(pack(0, b"x"))
            late.hang = True
            late.feed(pack(0, b"x"))
            await late.settle()
            refused = Peer(tasks, connections_max=3, beside=beside)
            assert refused.wire.closed
            assert HEAD.unpack_from(refused.wire.written[0])[1] == REFUSED
            assert not any(one.wire.closed for one in (waiting, idle, late))
            late.connection.connection_lost(None)

    asyncio.run(body())


def test_memory_grows_with_the_bytes_that_came_not_with_what_the_head_says() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            peer.feed(HEAD.pack(PAYLOAD_BYTES_MAX, 0))
            assert len(peer.connection.get_buffer(-1)) <= SCRATCH_BYTES
            peer.feed(bytes(3 * SCRATCH_BYTES))
            assert len(peer.connection.get_buffer(-1)) <= 4 * SCRATCH_BYTES
            peer.connection.connection_lost(None)

    asyncio.run(body())


def test_a_client_that_sends_on_without_reading_its_answer_is_closed() -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            peer = Peer(tasks)
            peer.feed(pack(0, b"x"))
            await peer.settle()
            peer.wire.unread_bytes = 5
            peer.feed(pack(0, b"y"))
            await peer.settle()
            assert peer.wire.closed
            assert len(peer.calls) == 1

    asyncio.run(body())


@pytest.mark.parametrize("part", [b"\x09", pack(0, b"half a frame")[:-3]])
def test_a_frame_that_is_not_whole_in_time_closes_the_connection(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "FRAME_SECONDS_MAX", 0.0)

    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            slow, whole = Peer(tasks), Peer(tasks)
            whole.feed(pack(0, b"x")[:3])
            whole.feed(pack(0, b"x")[3:])
            slow.feed(part)
            await asyncio.sleep(0.02)
            assert slow.wire.closed
            assert not whole.wire.closed

    asyncio.run(body())
