"""The protocol by hand: packets on the session socket, bare gRPC stubs. No client library."""

from __future__ import annotations

import array
import mmap
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc

from kvtier.types import PROTOCOL_VERSION
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub

HASH_BYTES = 16
T = TypeVar("T")


def spec(**facts: object) -> pb.NamespaceSpec:
    """A small namespace: 4 KiB blocks of one shard."""
    given: dict[str, object] = {
        "model": "test",
        "weights": "v1",
        "kv_dtype": "bfloat16",
        "layout": "LBHD",
        "block_tokens": 16,
        "hash_bytes": HASH_BYTES,
        "shard_bytes": 4096,
        "shard_count": 1,
        "hash_algorithm": "test",
        **facts,
    }
    return pb.NamespaceSpec(**given)  # type: ignore[arg-type]  # Facts by their own names.


def chain(count: int, seed: int = 0) -> list[bytes]:
    """Block hashes of one prefix."""
    return [seed.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(count)]


@dataclass
class RawSession:
    """One connection; `frames` that nobody waited for are kept."""

    connection: socket.socket
    welcome: pb.Welcome = field(default_factory=pb.Welcome)
    opened: pb.SessionOpened = field(default_factory=pb.SessionOpened)
    kept: list[tuple[pb.DaemonFrame, list[int]]] = field(default_factory=list)
    mappings: dict[int, mmap.mmap] = field(default_factory=dict)
    offers: dict[int, pb.SlabOffered] = field(default_factory=dict)

    @property
    def token(self) -> bytes:
        return self.opened.token

    def send(self, frame: pb.ClientFrame, fds: list[int] | None = None) -> None:
        self.send_bytes(frame.SerializeToString(), fds)

    def send_bytes(self, data: bytes, fds: list[int] | None = None) -> None:
        beside = []
        if fds:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self.connection.sendmsg([data], beside)

    def receive(self) -> tuple[pb.DaemonFrame, list[int]] | None:
        """The next frame; None at the end of the connection."""
        data, fds, _, _ = socket.recv_fds(self.connection, 1 << 17, 16)
        if not data:
            return None
        return pb.DaemonFrame.FromString(data), list(fds)

    def wait_frame(self, kind: str) -> tuple[pb.DaemonFrame, list[int]]:
        """The next frame of this kind; others are kept for later."""
        for place, (frame, fds) in enumerate(self.kept):
            if frame.WhichOneof("frame") == kind:
                del self.kept[place]
                return frame, fds
        while (found := self.receive()) is not None:
            if found[0].WhichOneof("frame") == kind:
                return found
            self.kept.append(found)
        raise AssertionError(f"the daemon closed the connection before {kind}")

    def wait_error(self) -> pb.SessionError:
        return self.wait_frame("error")[0].error

    def is_closed_by_daemon(self) -> bool:
        while self.receive() is not None:
            pass
        return True

    def open_namespace(self, **facts: object) -> pb.NamespaceOpened:
        self.send(pb.ClientFrame(open_namespace=pb.OpenNamespace(spec=spec(**facts), about=7)))
        return self.wait_frame("namespace_opened")[0].namespace_opened

    def map_slab(self) -> pb.SlabOffered:
        """Take the next offer: map it and say so."""
        frame, (fd,) = self.wait_frame("slab_offered")
        offer = frame.slab_offered
        self.mappings[offer.slab_id] = mmap.mmap(fd, offer.slab_bytes)
        os.close(fd)
        self.offers[offer.slab_id] = offer
        mapped = pb.SlabMapped(slab_id=offer.slab_id, shard=offer.shard)
        self.send(pb.ClientFrame(slab_mapped=mapped))
        return offer

    def slot_view(self, slot: int, length: int = 4096) -> memoryview:
        """The bytes of a slot in whatever slab is mapped here."""
        for slab_id, offer in self.offers.items():
            place = slot - offer.slot_first
            if 0 <= place < offer.slot_count:
                start = place * offer.slot_bytes
                return memoryview(self.mappings[slab_id])[start : start + length]
        raise AssertionError(f"slot {slot} is in no mapped slab")

    def close(self) -> None:
        """Without Bye."""
        self.connection.close()

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(path: Path | str) -> RawSession:
    """Connected and welcomed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(path))
    session = RawSession(connection)
    session.welcome = session.wait_frame("welcome")[0].welcome
    return session


def hello(session: RawSession, **changes: object) -> pb.Hello:
    facts: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "engine_id": b"E" * 16,
        "role": pb.ROLE_BOTH,
        "shards": [0],
        "welcome_ns": session.welcome.daemon_ns,
        "client_ns": time.monotonic_ns(),
        "name": "raw",
        **changes,
    }
    return pb.Hello(**facts)  # type: ignore[arg-type]  # Fields by their own names.


def open_session(path: Path | str, **changes: object) -> RawSession:
    session = connect(path)
    session.send(pb.ClientFrame(hello=hello(session, **changes)))
    session.opened = session.wait_frame("opened")[0].opened
    return session


class RawCalls:
    """A stub on a channel that is closed afterwards."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = KVTierStub(self.channel)

    def __enter__(self) -> KVTierStub:
        return self.stub

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def wait_reserved(
    stub: KVTierStub, token: bytes, namespace_id: int, count: int
) -> pb.ReserveResponse:
    """Slots, as soon as the slab that was mapped is known to the daemon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        request = pb.ReserveRequest(token=token, namespace_id=namespace_id, count=count)
        reserved: pb.ReserveResponse = stub.Reserve(request, timeout=5)
        if reserved.slots:
            return reserved
        time.sleep(0.02)
    raise TimeoutError("no slots")
