"""Opens and keeps a session on the session socket."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from pathlib import Path

from kvtier.client import codec, session_socket
from kvtier.client.arena import KEPT_SECONDS, LEAVING_POLL_SECONDS
from kvtier.client.doors import Identity, SessionEnded, is_protocol_known
from kvtier.client.forks import fork_guard
from kvtier.client.lane import Lane
from kvtier.client.link import Link, OpenSession
from kvtier.client.rpc import Rpc
from kvtier.client.values import NamespaceState, SessionRef
from kvtier.errors import (
    BadFrame,
    KVTierError,
    ProtocolMismatch,
    Unauthenticated,
    Unavailable,
    error_named,
)
from kvtier.paths import grpc_socket_path, lane_socket_path
from kvtier.types import PROTOCOL_VERSION
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.version import VERSION

REASON_CHARS_MAX = 256

logger = logging.getLogger("kvtier.client")


class SocketDoor:
    """See `doors.Door`."""

    def __init__(self, link: Link, path: Path, identity: Identity, wake_fd: int) -> None:
        self._link = link
        self._path = path
        self._identity = identity
        self._wake_fd = wake_fd
        self._socket: socket.socket | None = None
        self._rpc: Rpc | None = None
        self._last: OpenSession | None = None  # To be named by the next Hello.
        self._current: SessionRef | None = None
        self._token = b""
        self._generation = 0
        self._opened_at = 0.0
        self._unsent: deque[pb.ClientFrame] = deque()
        self._asked: set[int] = set()  # Namespaces asked for in this session.
        self._quiets_sent: set[int] = set()

    # ------------------------------------------------------------------------------------ opening

    def open(self) -> OpenSession:
        self._unsent.clear()
        self._asked.clear()
        self._quiets_sent.clear()
        self._current = None
        with fork_guard:
            self._socket = session_socket.connect(
                self._path, self._link.settings.connect_timeout_seconds
            )
        welcome = self._expect("welcome").welcome
        if not is_protocol_known(welcome.protocol):
            raise ProtocolMismatch(
                f"the daemon speaks protocol {welcome.protocol}, this client {PROTOCOL_VERSION}: "
                "upgrade the older one"
            )
        self._generation = welcome.generation
        self._link.enter_generation(welcome.generation)
        self._say_hello(welcome)
        opened = self._expect("opened").opened
        return self._session_of(opened)

    def _say_hello(self, welcome: pb.Welcome) -> None:
        hello = pb.Hello(
            protocol=PROTOCOL_VERSION,
            client_version=VERSION,
            engine_id=self._identity.engine_id,
            role=f"ROLE_{self._identity.role.name}",
            shards=self._identity.shards,
            welcome_ns=welcome.daemon_ns,
            client_ns=self._link.clock.now_ns(),
            name=self._identity.name,
            memory_node=0 if self._identity.memory_node is None else self._identity.memory_node + 1,
            knows_segments=self._identity.knows_segments,
        )
        last = self._last
        if last is not None and last.ref.generation == welcome.generation:
            hello.old_session_id = last.ref.session_id
            hello.old_token = last.token
        assert self._socket is not None
        with fork_guard:
            pidfd = os.pidfd_open(os.getpid())
            try:
                session_socket.send(self._socket, pb.ClientFrame(hello=hello), [pidfd])
            finally:
                os.close(pidfd)

    def _session_of(self, opened: pb.SessionOpened) -> OpenSession:
        address = _reachable(opened.grpc_address, self._path)
        lane_path = lane_socket_path(self._path)
        self._rpc = Rpc(address, Lane(lane_path, self._link.clock) if lane_path.exists() else None)
        session = OpenSession(
            ref=SessionRef(self._generation, opened.session_id),
            token=opened.token,
            by_value=opened.by_value,
            by_value_reason=opened.by_value_reason,
            lease_ns_max=opened.lease_ms_max * 1_000_000,
            grpc_address=address,
            rpc=self._rpc,
            keeps_memory=opened.keeps_memory,
        )
        self._opened_at = self._link.clock.now()
        self._last, self._current, self._token = session, session.ref, opened.token
        return session

    def _expect(self, kind: str) -> pb.DaemonFrame:
        """Wait for this frame. Raises the daemon's own error if that comes instead."""
        assert self._socket is not None
        deadline = self._link.clock.now() + self._link.settings.connect_timeout_seconds
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        while not self._link.is_closing():
            left = deadline - self._link.clock.now()
            if left <= 0:
                raise Unavailable(f"the daemon sent no {kind} in time")
            try:
                ready = dict(poller.poll(left * 1000))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                packet = session_socket.receive(self._socket)
            except BlockingIOError:
                continue
            if packet is None:
                raise SessionEnded("the daemon closed the session while it was opened")
            session_socket.close_all(packet.fds)
            found = packet.frame.WhichOneof("frame")
            if found == "error":
                raise self._hello_error(packet.frame.error)
            if found != kind:
                raise BadFrame(f"the daemon sent {found}, not {kind}")
            return packet.frame
        raise SessionEnded("the client is closed")

    def _hello_error(self, error: pb.SessionError) -> KVTierError:
        found = error_named(error.name)
        if issubclass(found, Unauthenticated):
            self._last = None  # The daemon does not know our last session: begin afresh.
        return found(error.message)

    # ------------------------------------------------------------------------------------ keeping

    def fileno(self) -> int | None:
        return None if self._socket is None else self._socket.fileno()

    @property
    def due_seconds(self) -> float | None:
        """A withdrawn slab whose views are in use must be looked at again, and a kept one."""
        arenas = self._link.arenas
        return LEAVING_POLL_SECONDS if arenas.is_leaving or arenas.has_kept else None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def advance(self) -> None:
        for namespace in self._link.namespaces:
            if namespace.about not in self._asked:
                self._asked.add(namespace.about)
                message = codec.spec_message(namespace.spec)
                frame = pb.OpenNamespace(spec=message, about=namespace.about)
                self._unsent.append(pb.ClientFrame(open_namespace=frame))
        assert self._current is not None
        if self._link.clock.now() - self._opened_at > KEPT_SECONDS:
            self._link.arenas.end_kept()
        for offer in self._link.arenas.take_unmapped(self._current):
            unmapped = pb.SlabUnmapped(slab_id=offer.slab_id, shard=offer.shard)
            self._unsent.append(pb.ClientFrame(slab_unmapped=unmapped))
        # After the slabs: quiet means that nothing is touched any more.
        for session_id in self._link.quiets_to_send():
            if session_id not in self._quiets_sent:
                self._quiets_sent.add(session_id)
                self._unsent.append(pb.ClientFrame(quiet=pb.Quiet(session_id=session_id)))
        self._send_unsent()

    def _send_unsent(self) -> None:
        assert self._socket is not None
        while self._unsent:
            try:
                session_socket.send(self._socket, self._unsent[0])
            except BlockingIOError:
                return
            self._unsent.popleft()

    def receive(self) -> None:
        assert self._socket is not None
        while True:
            with fork_guard:  # Until the descriptors are mapped and closed.
                try:
                    packet = session_socket.receive(self._socket)
                except BlockingIOError:
                    return
                if packet is None:
                    raise SessionEnded("the daemon closed the session")
                try:
                    self._handle(packet)
                finally:
                    session_socket.close_all(packet.fds)

    def _handle(self, packet: session_socket.Packet) -> None:
        """One frame. Frames that only a newer daemon knows are ignored."""
        frame = packet.frame
        kind = frame.WhichOneof("frame")
        if kind == "slab_offered":
            self._on_slab_offered(frame.slab_offered, packet)
        elif kind == "segment_offered":
            self._on_segment_offered(frame.segment_offered, packet)
        elif kind == "namespace_opened":
            self._on_namespace_opened(frame.namespace_opened)
        elif kind == "slab_withdrawn":
            self._link.arenas.withdraw(frame.slab_withdrawn.shard, frame.slab_withdrawn.slab_id)
        elif kind == "slots_recalled":
            recalled = frame.slots_recalled
            self._link.slots_recalled(recalled.namespace_id, recalled.count)
        elif kind == "quiet_requested":
            ref = SessionRef(self._generation, frame.quiet_requested.session_id)
            self._link.quiet_requested(ref)
            self._quiets_sent.discard(ref.session_id)
        elif kind == "quiet_ack":
            self._link.quiet_acknowledged(frame.quiet_ack.session_id)
        elif kind == "error":
            self._on_error(frame.error)
        elif kind in ("welcome", "opened"):
            raise BadFrame(f"the daemon sent {kind} in the middle of a session")

    def _on_slab_offered(self, offer: pb.SlabOffered, packet: session_socket.Packet) -> None:
        if packet.is_cut_off or len(packet.fds) != 1:
            reason = session_socket.descriptor_shortage() or (
                f"slab {offer.slab_id} came with {len(packet.fds)} descriptors"
                + (", others were cut off" if packet.is_cut_off else ", not 1")
            )
            self._link.fall_back_to_values(reason)
            return
        assert self._current is not None
        namespace = self._link.namespace_with_id(offer.namespace_id)
        if namespace is None or offer.slot_bytes < namespace.spec.shard_bytes:
            raise BadFrame(f"slab {offer.slab_id} has slots of {offer.slot_bytes} bytes")
        try:
            self._link.arenas.add(offer, packet.fds[0], self._current)
        except OSError as error:
            self._link.fall_back_to_values(f"a slab cannot be mapped: {error}")
            return
        mapped = pb.SlabMapped(slab_id=offer.slab_id, shard=offer.shard)
        self._unsent.append(pb.ClientFrame(slab_mapped=mapped))

    def _on_segment_offered(self, offer: pb.SegmentOffered, packet: session_socket.Packet) -> None:
        """Whatever forbids it, blocks come through DRAM then: no reason to end anything."""
        answer = pb.SegmentMapped(segment=offer.segment)
        assert self._current is not None
        try:
            if packet.is_cut_off or len(packet.fds) != 1:
                raise OSError(session_socket.descriptor_shortage() or "no descriptor came with it")
            self._link.arenas.add_segment(offer, packet.fds[0], self._current)
        except OSError as error:
            answer.refused = str(error)[:REASON_CHARS_MAX]
            logger.warning("a segment of the CXL tier cannot be mapped: %s", error)
        self._unsent.append(pb.ClientFrame(segment_mapped=answer))

    def _on_namespace_opened(self, opened: pb.NamespaceOpened) -> None:
        namespace = self._link.namespace_about(opened.about)
        if namespace is None or self._current is None:
            raise BadFrame(f"a namespace was opened that nobody asked for: {opened.about}")
        state = NamespaceState(
            namespace_id=opened.namespace_id,
            fingerprint=opened.fingerprint,
            epoch=opened.epoch,
            slot_bytes=opened.slot_bytes,
            session=self._current,
            token=self._token,
            segment_shard_bytes=opened.segment_shard_bytes,
            wants_token_ids=opened.wants_token_ids,
        )
        self._link.namespace_opened(namespace, state)

    def _on_error(self, error: pb.SessionError) -> None:
        namespace = self._link.namespace_about(error.about)
        found = error_named(error.name)(error.message)
        if error.about and namespace is not None:
            self._link.namespace_refused(namespace, found)
        else:
            logger.error("the daemon refused a frame: %s: %s", error.name, error.message)

    # ------------------------------------------------------------------------------------- ending

    def close(self, *, orderly: bool) -> None:
        if self._socket is not None:
            if orderly and self._current is not None:
                try:
                    self.advance()
                    session_socket.send(self._socket, pb.ClientFrame(bye=pb.Bye()))
                except OSError:
                    pass  # The daemon does not read or is gone; our end will tell it.
            self._socket.close()
            self._socket = None
        if self._rpc is not None:
            self._rpc.close()
            self._rpc = None

    def interrupt(self) -> None:
        """Nothing to do: every wait here also waits on the wake descriptor."""

    def close_in_child(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._rpc is not None:
            self._rpc.forget_in_child()


def _reachable(told: str, session_path: Path) -> str:
    """The daemon may see its socket under another path (its own mount namespace): try ours too."""
    beside = grpc_socket_path(session_path)
    if told and not (told.startswith("unix:") and not os.path.exists(told[5:].removeprefix("//"))):
        return told
    return f"unix:{beside}"
