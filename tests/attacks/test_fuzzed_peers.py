"""What peers send that are no clients of a daemon: descriptors, holders, readers of KV events."""

from __future__ import annotations

import array
import asyncio
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtier.client import session_socket
from kvtier.config_events import EventsConfig
from kvtier.errors import BadFrame
from kvtier.server.holder import Holder
from kvtier.server.kv_publisher import Publisher
from kvtier.server.kv_wire import Stored, WireForm, WirePlace
from kvtier.server.link import Link
from kvtier.server.parking import HolderParking, ParkingFailed
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.fuzzing import fuzz, mutated, mutated_value, nested

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def changed_json(chance: random.Random, value: object) -> bytes:
    if chance.random() < 0.05:
        return nested(chance)[:30_000]
    data = json.dumps(mutated_value(chance, value)).encode()
    return mutated(chance, data) if chance.random() < 0.3 else data


def send(connection: socket.socket, data: bytes, fds: list[int]) -> None:
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data or b"\0"], beside)


def test_fuzzed_packets_and_their_descriptors() -> None:
    """Both ends of the session socket: whatever comes, no descriptor stays behind."""
    offer = pb.SlabOffered(slab_id=3, shard=1, slab_bytes=1 << 21, slot_count=9)
    frames = [
        pb.DaemonFrame(welcome=pb.Welcome(protocol=1, generation=7)).SerializeToString(),
        pb.DaemonFrame(opened=pb.SessionOpened(token=b"t" * 32)).SerializeToString(),
        pb.DaemonFrame(slab_offered=offer).SerializeToString(),
        pb.DaemonFrame(error=pb.SessionError(name="BadFrame")).SerializeToString(),
    ]
    null = os.open("/dev/null", os.O_RDONLY)

    async def at_the_daemon(data: bytes, fds: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = Link(ours, asyncio.get_running_loop())
        with theirs:
            send(theirs, data, fds)
            packet = await link.receive()
            assert packet is not None
            with suppress(Exception):
                pb.ClientFrame.FromString(packet.data)
            packet.close_fds()
        link.close()

    def at_a_client(data: bytes, fds: list[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            send(theirs, data, fds)
            with suppress(BadFrame):
                packet = session_socket.receive(ours)
                assert packet is not None
                session_socket.close_all(packet.fds)

    def attempt(chance: random.Random) -> None:
        data = mutated(chance, chance.choice(frames))
        if chance.random() < 0.05:
            data = chance.randbytes(70_000)
        fds = [null] * chance.choice((0, 0, 1, 2, 17, 100, 200))
        at_a_client(data, fds)
        runner.run(at_the_daemon(data, fds))

    with asyncio.Runner() as runner:
        runner.run(asyncio.sleep(0))
        before = open_count()
        fuzz("packets", attempt)
        assert open_count() == before, "descriptors leaked"
    os.close(null)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Path]:
    """A holder in a thread; what it raises ends the test."""
    path = tmp_path / "hold.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(16)
    wakeup, inner = socket.socketpair()
    held = Holder(listener, count_max=16)
    thread = threading.Thread(target=held.run, args=(inner,))
    thread.start()
    yield path
    wakeup.send(b"x")
    thread.join(10)
    held.close()
    wakeup.close()
    inner.close()


def test_fuzzed_holder(holder: Path) -> None:
    requests: list[object] = [
        {"do": "own"},
        {"do": "park", "name": "slab-1"},
        {"do": "unpark", "name": "slab-1"},
        {"do": "take", "first": 0},
    ]
    null = os.open("/dev/null", os.O_RDONLY)

    def attempt(chance: random.Random) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(10)
            peer.connect(str(holder))
            send(peer, b'{"do": "own"}', [])
            for _ in range(chance.randrange(1, 8)):
                answer, fds, _, _ = socket.recv_fds(peer, 1 << 16, 128)
                session_socket.close_all(fds)
                if not answer:
                    return  # It was too much.
                assert isinstance(json.loads(answer), dict)
                data = changed_json(chance, chance.choice(requests))
                send(peer, data, [null] * chance.choice((0, 1, 1, 3, 120)))
            _, fds, _, _ = socket.recv_fds(peer, 1 << 16, 128)
            session_socket.close_all(fds)

    fuzz("holder", attempt)
    os.close(null)


def test_fuzzed_answers_of_a_holder(tmp_path: Path) -> None:
    path = tmp_path / "fake.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)
    null = os.open("/dev/null", os.O_RDONLY)
    right = {"ok": True, "names": ["a", "b"], "count": 2}

    def attempt(chance: random.Random) -> None:
        answers = [b'{"ok": true}', changed_json(chance, right), b""]
        count = chance.choice((0, 1, 2, 2, 2))

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    if not connection.recv(1 << 16):
                        return
                    if not answer:
                        return
                    send(connection, answer, [null] * count if answer is answers[1] else [])

        serving = threading.Thread(target=serve)
        serving.start()
        with suppress(ParkingFailed):
            parking = HolderParking(path)
            with closing(parking):
                session_socket.close_all(list(parking.take_all().values()))
        serving.join(10)

    before = open_count()
    fuzz("answers of a holder", attempt)
    assert open_count() == before, "descriptors leaked"
    listener.close()
    os.close(null)


def test_fuzzed_replay_requests(tmp_path: Path) -> None:
    """Of readers of KV events, who ask for what they missed."""
    config = EventsConfig(bind=f"ipc://{tmp_path}/e", replay_bind=f"ipc://{tmp_path}/r")
    form = WireForm("bytes", msgspec.msgpack.Encoder().encode)
    publisher = Publisher(config, form, on_short=lambda topic: None, wall=lambda: 0.0)
    publisher.start()
    context = zmq.Context()
    stored = Stored([b"h" * 16], None, 16, WirePlace("dram", "CPU"))
    publisher.put(b"kv", stored)

    reader = context.socket(zmq.DEALER)
    reader.connect(config.replay_bind)

    def attempt(chance: random.Random) -> None:
        frames = [b"", (0).to_bytes(8, "big"), b"kv"]
        at = chance.randrange(3)
        frames[at] = mutated(chance, frames[at] or b"x")
        if chance.random() < 0.3:
            frames = frames[: chance.randrange(1, 3)] or [b""]
        if chance.random() < 0.2:
            frames += [mutated(chance, b"kv")] * chance.randrange(1, 4)
        reader.send_multipart(frames)
        while reader.poll(0):
            reader.recv_multipart()

    try:
        fuzz("replay requests", attempt)
        other = context.socket(zmq.DEALER)
        other.connect(config.replay_bind)
        other.send_multipart([b"", (0).to_bytes(8, "big")])
        assert other.poll(10_000), "it answers nobody any more"
    finally:
        context.destroy(linger=0)
        publisher.close()
