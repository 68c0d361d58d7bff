"""A daemon small enough to be scripted: real sockets, real gRPC, real memfds, no promises.

It keeps to the protocol as long as its script says so, and writes down what clients sent. What the
real daemon can be made to do is tested against that one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvtier.checksum import block_checksum
from kvtier.paths import grpc_socket_path
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.v1 import kvtier_pb2_grpc

SLAB_BYTES = 2 << 20
SLOT_COUNT = 16
PIECE_BYTES = 256 << 10


@dataclass
class Script:
    """What goes wrong, and when."""

    generation: int = 1
    by_value: bool = False
    offer: str = "good"  # Or "none", "cut_off", "short": what is wrong with a slab's descriptor.
    hang: list[str] = field(default_factory=list)  # Calls that are never answered.
    garbage_count: int = 0  # Sessions that are sent no frame but noise after Hello.
    hello_error: str = ""  # Name of the error that answers Hello.
    protocol: int = 1
    corrupt_get: bool = False
    acquire_pending_count: int = 0
    acquire_waits: bool = False  # Pending is followed by nothing until `promoted` is set.
    acquire_ends: str = "good"  # Or "badly": with an error behind the answer; "unheard": without.
    memory_count: int | None = None  # Blocks that are in memory; the others lie on NVMe.


class FakeDaemon:
    """Listens in `directory` until `close`; everything a client sent is in `frames`."""

    def __init__(self, directory: Path, script: Script | None = None) -> None:
        self.socket_path = directory / "kvtier.sock"
        self.script = script or Script()
        self.frames: list[tuple[int, pb.ClientFrame]] = []
        self.calls: list[str] = []
        self.tokens: dict[bytes, int] = {}
        self.blocks: dict[bytes, bytes] = {}
        self.reserved: list[int] = []
        self.connections: dict[int, socket.socket] = {}
        self.pidfd_counts: list[int] = []
        self.namespace: pb.NamespaceSpec | None = None
        self.changed = threading.Condition()
        self.released = threading.Event()  # Ends every hanging call.
        self.promoted = threading.Event()  # Ends every waiting acquire.
        self.ended_leases: list[int] = []
        self.cancelled_count = 0  # Acquires that were cancelled.
        self.slab_fd = os.memfd_create("slab", os.MFD_CLOEXEC)
        os.ftruncate(self.slab_fd, SLAB_BYTES)
        self.slab = mmap.mmap(self.slab_fd, SLAB_BYTES)
        self._is_closed = False
        self._next_session = 100 * self.script.generation
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket_path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(self.socket_path))
        self._listener.listen(16)
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        kvtier_pb2_grpc.add_KVTierServicer_to_server(_Servicer(self), self._server)
        self._server.add_insecure_port(f"unix:{grpc_socket_path(self.socket_path)}")
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._start(self._accept)

    # ---------------------------------------------------------------------------- for the tests

    def sent(self, kind: str) -> list[tuple[int, Any]]:
        """(session, frame) of this kind, in order of arrival."""
        with self.changed:
            return [(s, getattr(f, kind)) for s, f in self.frames if f.WhichOneof("frame") == kind]

    def wait_sent(self, kind: str, count: int = 1, timeout_seconds: float = 5.0) -> list[Any]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.sent(kind)) >= count, timeout_seconds)
        found = self.sent(kind)
        assert len(found) >= count, f"{len(found)} of {count} {kind} frames came"
        return [frame for _, frame in found]

    def send(self, frame: pb.DaemonFrame, fds: tuple[int, ...] = ()) -> None:
        """To the newest session."""
        connection = self.connections[max(self.connections)]
        socket.send_fds(connection, [frame.SerializeToString()], list(fds))

    def send_noise(self) -> None:
        self.connections[max(self.connections)].send(b"\xff" * 40)

    def break_connections(self) -> None:
        """As if the daemon had died: no Bye, no warning; tokens are void."""
        with self.changed:
            self.tokens.clear()
            for connection in self.connections.values():
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.released.set()
        self.promoted.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()
        self._server.stop(None).wait()
        self._pool.shutdown()
        for thread in self._threads:
            thread.join(5)
        self.slab.close()
        os.close(self.slab_fd)

    # ----------------------------------------------------------------------------------- session

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                self._talk(connection)
            finally:
                with self.changed:  # Before it is closed: nobody may shut down a closed one.
                    for session_id, known in list(self.connections.items()):
                        if known is connection:
                            del self.connections[session_id]

    def _talk(self, connection: socket.socket) -> None:
        script = self.script
        welcome = pb.Welcome(
            protocol=script.protocol, generation=script.generation, daemon_ns=12345
        )
        connection.send(pb.DaemonFrame(welcome=welcome).SerializeToString())
        data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
        for fd in fds:
            os.close(fd)
        if not data:
            return
        hello = pb.ClientFrame.FromString(data)
        if script.garbage_count:
            script.garbage_count -= 1
            connection.send(b"\xff\xff\xff")
            return
        if script.hello_error:
            error = pb.SessionError(name=script.hello_error, message="as scripted")
            connection.send(pb.DaemonFrame(error=error).SerializeToString())
            return
        with self.changed:
            self._next_session += 1
            session_id = self._next_session
            token = os.urandom(32)
            self.tokens[token] = session_id
            self.connections[session_id] = connection
            self.pidfd_counts.append(len(fds))
        self._note(session_id, hello)
        opened = pb.SessionOpened(
            session_id=session_id,
            token=token,
            by_value=script.by_value,
            by_value_reason="as scripted" if script.by_value else "",
            lease_ms_max=60_000,
            lease_margin_ms=5_000,
            grpc_address=f"unix:{grpc_socket_path(self.socket_path)}",
        )
        connection.send(pb.DaemonFrame(opened=opened).SerializeToString())
        while data := connection.recv(65536):
            frame = pb.ClientFrame.FromString(data)
            self._note(session_id, frame)
            self._answer(connection, frame)

    def _note(self, session_id: int, frame: pb.ClientFrame) -> None:
        with self.changed:
            self.frames.append((session_id, frame))
            self.changed.notify_all()

    def _answer(self, connection: socket.socket, frame: pb.ClientFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "open_namespace":
            self.namespace = frame.open_namespace.spec
            opened = pb.NamespaceOpened(
                namespace_id=7,
                fingerprint=b"f" * 16,
                epoch=3,
                about=frame.open_namespace.about,
                slot_bytes=SLAB_BYTES // SLOT_COUNT,
                slot_count_max=SLOT_COUNT,
            )
            connection.send(pb.DaemonFrame(namespace_opened=opened).SerializeToString())
            if not self.script.by_value:
                self.offer_slab(connection)
        elif kind == "quiet":
            ack = pb.SessionQuietAck(session_id=frame.quiet.session_id)
            connection.send(pb.DaemonFrame(quiet_ack=ack).SerializeToString())

    def offer_slab(self, connection: socket.socket) -> None:
        offer = pb.SlabOffered(
            namespace_id=7,
            shard=0,
            slab_id=5,
            slot_first=0,
            slot_count=SLOT_COUNT,
            slot_bytes=SLAB_BYTES // SLOT_COUNT,
            slab_bytes=SLAB_BYTES * (2 if self.script.offer == "short" else 1),
            page_kind="4k",
        )
        # More than a client may receive at once: the kernel drops the rest and says so.
        count = {"good": 1, "none": 0, "cut_off": 200, "short": 1}[self.script.offer]
        data = pb.DaemonFrame(slab_offered=offer).SerializeToString()
        if count:
            socket.send_fds(connection, [data], [self.slab_fd] * count)
        else:
            connection.send(data)

    def slot(self, index: int) -> slice:
        assert self.namespace is not None
        first = index * (SLAB_BYTES // SLOT_COUNT)
        return slice(first, first + self.namespace.shard_bytes)


class _Servicer(kvtier_pb2_grpc.KVTierServicer):
    """The calls the client's tests need."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def _enter(self, name: str, token: bytes, context: grpc.ServicerContext) -> None:
        daemon = self._daemon
        daemon.calls.append(name)
        if name in daemon.script.hang:
            daemon.released.wait()
        if token not in daemon.tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated: no such token")

    def _leading(self, packed: bytes) -> list[bytes]:
        size = self._daemon.namespace.hash_bytes if self._daemon.namespace else 32
        found = []
        for first in range(0, len(packed), size):
            if packed[first : first + size] not in self._daemon.blocks:
                break
            found.append(packed[first : first + size])
        return found

    def Greet(self, request: pb.GreetRequest, context: grpc.ServicerContext) -> pb.GreetResponse:
        token = os.urandom(32)
        self._daemon.tokens[token] = 0
        answer = pb.GreetResponse(
            protocol=1, token=token, generation=self._daemon.script.generation
        )
        if request.HasField("spec"):
            self._daemon.namespace = request.spec
            answer.namespace_id, answer.epoch, answer.fingerprint = 7, 3, b"f" * 16
        return answer

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchResponse:
        self._enter("Match", request.token, context)
        if request.namespace_id != 7:
            context.abort(grpc.StatusCode.NOT_FOUND, "UnknownNamespace: open it first")
        count = len(self._leading(request.hashes))
        memory_count = self._memory_count(count)
        tiers = [
            pb.TierCount(tier="dram", count=memory_count),
            pb.TierCount(tier="nvme", count=count - memory_count),
            pb.TierCount(tier="tape", count=1),
        ]
        return pb.MatchResponse(
            matched_count=count, memory_count=memory_count, tiers=tiers, epoch=3
        )

    def _memory_count(self, count: int) -> int:
        limit = self._daemon.script.memory_count
        return count if limit is None else min(count, limit)

    def Prefetch(
        self, request: pb.PrefetchRequest, context: grpc.ServicerContext
    ) -> pb.PrefetchResponse:
        self._enter("Prefetch", request.token, context)
        count = len(self._leading(request.hashes))
        memory_count = self._memory_count(count)
        return pb.PrefetchResponse(memory_count=memory_count, promoting_count=count - memory_count)

    def Acquire(
        self, request: pb.AcquireRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.AcquireResponse]:
        self._enter("Acquire", request.token, context)
        script = self._daemon.script
        found = self._leading(request.hashes)
        if request.wait_ms:
            for _ in range(script.acquire_pending_count):
                yield pb.AcquireResponse(pending=pb.AcquirePending(matched_count=1, lease_id=9))
            if script.acquire_waits:
                self._wait_promoted(context)
        if script.acquire_ends == "unheard":
            return
        ready = pb.AcquireReady(
            lease_id=9 if found else 0,
            leased_count=len(found),
            slots=range(request.skip_count, len(found)),
            deadline_ns=request.deadline_ns,
            cut=1,
            epoch=3,
        )
        yield pb.AcquireResponse(ready=ready)
        if script.acquire_ends == "badly":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Draining: as scripted")

    def _wait_promoted(self, context: grpc.ServicerContext) -> None:
        """Until the blocks are in memory, or the caller has given up."""
        while context.is_active():
            if self._daemon.promoted.wait(0.002):
                return
        with self._daemon.changed:
            self._daemon.cancelled_count += 1

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        self._enter("Release", request.token, context)
        with self._daemon.changed:
            self._daemon.ended_leases += request.lease_ids
        return pb.ReleaseResponse(ended_count=len(request.lease_ids))

    def Reserve(
        self, request: pb.ReserveRequest, context: grpc.ServicerContext
    ) -> pb.ReserveResponse:
        self._enter("Reserve", request.token, context)
        if request.count > SLOT_COUNT:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "TierFull: no slots: ask for less")
        first = len(self._daemon.reserved)
        slots = list(range(first, first + request.count))
        self._daemon.reserved += slots
        return pb.ReserveResponse(slots=slots, epoch=3, stock_count_max=8)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        self._enter("Commit", request.token, context)
        size = len(request.hashes) // len(request.slots)
        for index, slot in enumerate(request.slots):
            block_hash = request.hashes[index * size : (index + 1) * size]
            self._daemon.blocks[block_hash] = self._daemon.slab[self._daemon.slot(slot)]
        return pb.CommitResponse(outcomes=bytes(len(request.slots)), epoch=3)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self._enter("Abort", request.token, context)
        return pb.AbortResponse(freed_count=len(request.slots))

    def Put(
        self, request_iterator: Iterator[pb.PutRequest], context: grpc.ServicerContext
    ) -> pb.PutResponse:
        pieces: dict[bytes, bytes] = {}
        for index, request in enumerate(request_iterator):
            if index == 0:
                self._enter("Put", request.token, context)
            assert len(request.data) <= PIECE_BYTES
            assert request.offset == len(pieces.get(request.hash, b""))
            pieces[request.hash] = pieces.get(request.hash, b"") + request.data
        self._daemon.blocks.update(pieces)
        return pb.PutResponse(ready_count=len(pieces))

    def Get(
        self, request: pb.GetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetResponse]:
        self._enter("Get", request.token, context)
        assert self._daemon.namespace is not None
        for index, block_hash in enumerate(self._leading(request.hashes)):
            block = self._daemon.blocks[block_hash]
            checksum = block_checksum(block, self._daemon.namespace.shard_bytes)
            for offset in range(0, len(block), PIECE_BYTES):
                data = block[offset : offset + PIECE_BYTES]
                if self._daemon.script.corrupt_get:
                    data = bytes([data[0] ^ 1]) + data[1:]
                yield pb.GetResponse(index=index, offset=offset, data=data, checksum=checksum)

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearResponse:
        self._enter("Clear", request.token, context)
        self._daemon.blocks.clear()
        return pb.ClearResponse(epoch=4)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:
        self._enter("Stats", request.token, context)
        return pb.StatsResponse(generation=self._daemon.script.generation)

    def Watch(
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        self._enter("Watch", request.token, context)
        yield pb.WatchResponse(cleared=pb.NamespaceCleared(epoch=3), sequence=1)
        while context.is_active() and request.token in self._daemon.tokens:
            if self._daemon.released.wait(0.02):
                return
