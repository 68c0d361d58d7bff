"""A link of the session socket against a peer that does not read, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from kvtier.server.link import QUEUE_FRAMES_MAX, Link

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


def run(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    test: Callable[[Link, socket.socket], Awaitable[None]],
) -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        link = Link(ours, asyncio.get_running_loop())
        try:
            await test(link, theirs)
        finally:
            link.close()
            theirs.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(body())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_frames_wait_for_a_slow_reader_in_order_with_their_descriptors(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        path = tmp_path / "file"
        path.write_text("x")
        with path.open("rb") as file:
            for number in range(1000):
                link.send(number.to_bytes(4, "big"), file.fileno())
        # The original is closed: what waits are duplicates.
        for number in range(1000):
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(theirs, 16, 1)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            assert int.from_bytes(data, "big") == number
            assert os.pread(fds[0], 1, 0) == b"x"
            os.close(fds[0])

    run(loop_factory, test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_peer_that_never_reads_loses_its_link_and_no_descriptor_stays(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        gc.collect()  # What others have left must not go in between.
        before = open_files()
        sent_count = 0
        while not link.is_closed:
            link.send(b"x" * 1000, theirs.fileno())
            sent_count += 1
        assert sent_count > QUEUE_FRAMES_MAX
        assert open_files() < before  # Our end itself has gone as well.
        assert await link.receive() is None

    run(loop_factory, test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_closing_wakes_whoever_receives(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        receiving = asyncio.create_task(link.receive())
        for _ in range(3):
            await asyncio.sleep(0)
        link.close()
        assert await receiving is None

    run(loop_factory, test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_empty_packet_is_no_end_of_the_connection(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        theirs.send(b"")
        packet = await link.receive()
        assert packet is not None
        assert packet.data == b""
        theirs.close()
        assert await link.receive() is None

    run(loop_factory, test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_peer_that_never_stops_sending_does_not_keep_the_loop_from_others(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        sent_count = 0
        while True:
            try:
                theirs.send(b"x")
            except BlockingIOError:
                break
            sent_count += 1
        others_turns = 0

        def take_turn() -> None:
            nonlocal others_turns
            others_turns += 1
            loop.call_soon(take_turn)

        loop = asyncio.get_running_loop()
        take_turn()
        for _ in range(sent_count):
            assert await link.receive() is not None
        assert others_turns >= sent_count

    run(loop_factory, test)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_peer_that_does_not_read_loses_its_link_when_no_descriptor_is_left(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(link: Link, theirs: socket.socket) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            for _ in range(QUEUE_FRAMES_MAX):
                link.send(b"x" * 1000, theirs.fileno())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert link.is_closed

    run(loop_factory, test)
