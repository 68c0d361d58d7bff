"""Clients of a daemon's TLS port: by hand, and with gRPC."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1.kvtier_pb2_grpc import KVTierStub
from tests.support.authority import Identity
from tests.support.raw_client import spec

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # An empty frame of that kind.


def half_a_call(path: bytes) -> bytes:
    """A call that has begun, with a message that does not come."""
    headers = (  # HPACK: POST, http, and literals with names of the static table.
        b"\x83\x86"
        + b"".join(bytes((at, len(text))) + text for at, text in ((0x44, path), (0x41, b"x")))
        + b"\x5f\x10application/grpc"
        + b"\x40\x02te\x08trailers"
    )
    return (
        PREFACE
        + SETTINGS
        + len(headers).to_bytes(3, "big")
        + bytes((1, 4, 0, 0, 0, 1))
        + headers
        + bytes((0, 0, 100, 0, 0, 0, 0, 0, 1, 0, 0, 0))  # Of 100 bytes three.
    )


HALF_A_CALL = half_a_call(b"/kvtier.v1.KVTier/Stats")


def shake_hands(
    port: int, identity: Identity | None, authorities: Path, *, alpn: tuple[str, ...] = ("h2",)
) -> ssl.SSLSocket:
    """A connection; with TLS 1.3 the client hears only later whether it was let in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=authorities)
    if identity is not None:
        context.load_cert_chain(identity.certificate, identity.private_key)
    context.set_alpn_protocols(list(alpn))
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    return context.wrap_socket(raw, server_hostname="127.0.0.1")


def is_closed(connection: socket.socket) -> bool:
    """Waits until the daemon has ended the connection; what it says before is read."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:  # An alert of TLS, or a reset.
        return True
    return True


@contextmanager
def tls_calls(port: int, identity: Identity, authorities: Path) -> Iterator[KVTierStub]:
    with grpc.secure_channel(
        f"127.0.0.1:{port}", identity.tls(authorities).credentials()
    ) as channel:
        yield KVTierStub(channel)


def greet(stub: KVTierStub, **facts: object) -> pb.GreetResponse:
    """A session, with a namespace if facts of it are given."""
    request = pb.GreetRequest(protocol=1)
    if facts:
        request.spec.CopyFrom(spec(**facts))
    answer: pb.GreetResponse = stub.Greet(request, timeout=10)
    return answer


def put(stub: KVTierStub, opened: pb.GreetResponse, hashes: list[bytes], byte: int) -> int:
    """Blocks of one byte's value; how many were taken in."""
    pieces = [
        pb.PutRequest(
            token=opened.token,
            namespace_id=opened.namespace_id,
            hash=one,
            data=bytes([byte]) * 4096,
        )
        for one in hashes
    ]
    return int(stub.Put(iter(pieces), timeout=10).ready_count)


def got(stub: KVTierStub, opened: pb.GreetResponse, hashes: list[bytes]) -> list[bytes]:
    """The blocks' bytes, up to the first gap."""
    request = pb.GetRequest(
        token=opened.token, namespace_id=opened.namespace_id, hashes=b"".join(hashes)
    )
    blocks: dict[int, bytes] = {}
    for piece in stub.Get(request, timeout=10):
        blocks[piece.index] = blocks.get(piece.index, b"") + piece.data
    return list(blocks.values())
