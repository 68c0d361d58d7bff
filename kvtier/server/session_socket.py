"""The session socket: accepts connections, speaks the handshake, reads frames in order.

One task a connection, so a session's frames are handled one after another, and a client that sends
faster than it is served fills its own socket buffer and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from kvtier.core.events import NamespaceJoined, SessionQuiet, SlabMapped, SlabUnmapped
from kvtier.errors import BadFrame, Forbidden, KVTierError, LimitExceeded
from kvtier.layout import SlotLayout
from kvtier.metrics.labels import FRAME_ERRORS
from kvtier.server.base import Base
from kvtier.server.handshake import Greeting, check_hello
from kvtier.server.link import FRAME_BYTES_MAX, Link, Packet
from kvtier.server.peers import is_pidfd, peer_credentials, peer_pidfd
from kvtier.server.security import Peer, Rights
from kvtier.server.segment_offers import SegmentOffers
from kvtier.server.sessions import Opening, SessionRecord, Sessions
from kvtier.server.tenants import Tenant, refusal_facts
from kvtier.types import PROTOCOL_VERSION, Role, SessionId, SlabId
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.version import VERSION

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 0.5
# A client that sends garbage is told what is wrong, but not for ever.
BAD_FRAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """What every client is told."""

    generation: int
    grpc_address: str
    hello_seconds: float
    lease_seconds_max: float
    lease_margin_seconds: float
    wants_token_ids: bool = False


class SessionSocket:
    """The listener and the conversations."""

    def __init__(
        self,
        facts: SocketFacts,
        base: Base,
        sessions: Sessions,
        offers: SegmentOffers,
        tenant: Tenant,
    ) -> None:
        self._facts = facts
        self._tenant = tenant
        self._core = base.core
        self._sessions = sessions
        self._offers = offers
        self._namespaces = base.namespaces
        self._clock = base.clock
        self._metrics = base.metrics
        self._listener: socket.socket | None = None
        self._greeting_count = 0
        self._handlers: dict[str, Callable[[SessionRecord, pb.ClientFrame], None]] = {
            "slab_mapped": self._on_slab_mapped,
            "slab_unmapped": self._on_slab_unmapped,
            "quiet": self._on_quiet,
            "segment_mapped": offers.on_mapped,
        }

    def listen(self, listener: socket.socket) -> None:
        """From now on connections wait until `start`. The socket is bound, and ours."""
        listener.listen(BACKLOG)
        self._listener = listener

    def start(self, tasks: asyncio.TaskGroup) -> None:
        assert self._listener is not None, "listen comes first"
        self._resume(tasks, asyncio.get_running_loop())

    def close(self) -> None:
        """Stop accepting; conversations go on until their tasks are cancelled."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # --------------------------------------------------------------------------- conversations

    def _accept(self, tasks: asyncio.TaskGroup, loop: asyncio.AbstractEventLoop) -> None:
        assert self._listener is not None, "accepting on a closed listener"
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # Gone again.
        except OSError as error:
            # Out of descriptors or memory: the connection stays in the backlog, and asking for it
            # again at once would keep the loop busy.
            log.warning("cannot accept", extra={"reason": error.strerror})
            fd = self._listener.fileno()
            loop.remove_reader(fd)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume, tasks, loop)
            return
        tasks.create_task(self._serve(Link(connection, loop)))

    def _resume(self, tasks: asyncio.TaskGroup, loop: asyncio.AbstractEventLoop) -> None:
        if self._listener is not None:
            loop.add_reader(self._listener.fileno(), self._accept, tasks, loop)

    async def _serve(self, link: Link) -> None:
        record: SessionRecord | None = None
        self._greeting_count += 1
        try:
            record = await self._greet(link)
        finally:
            self._greeting_count -= 1
            if record is None:
                link.close()
        if record is None:
            return
        try:
            await self._converse(record, link)
        finally:
            link.close()
        self._sessions.lost(record)

    async def _greet(self, link: Link) -> SessionRecord | None:
        """Welcome, Hello, SessionOpened; None when the client was refused or did not speak."""
        try:
            peer = self._tenant.admit(peer_credentials(link.connection))
            used_count = self._sessions.used_count_of(self._tenant.name)
            if used_count + self._greeting_count > 2 * self._sessions.sessions_max:
                raise LimitExceeded("too many connections are waiting for their Hello")
            welcome_ns = self._clock.now_ns()
            welcome = pb.Welcome(
                protocol=PROTOCOL_VERSION,
                daemon_version=VERSION,
                generation=self._facts.generation,
                daemon_ns=welcome_ns,
            )
            link.send(pb.DaemonFrame(welcome=welcome).SerializeToString())
            async with asyncio.timeout(self._facts.hello_seconds):
                packet = await link.receive()
            return None if packet is None else self._open(link, packet, welcome_ns, peer)
        except TimeoutError:
            late = BadFrame(f"no Hello within {self._facts.hello_seconds:g} s")
            self._refuse(link, late)
        except KVTierError as error:
            self._refuse(link, error)
        return None

    def _refuse(self, link: Link, error: KVTierError) -> None:
        log.warning("connection refused", extra=refusal_facts(self._tenant, link.connection, error))
        self._answer_error(link, error, 0)

    def _open(self, link: Link, packet: Packet, welcome_ns: int, peer: Peer) -> SessionRecord:
        pidfd = peer_pidfd(link.connection)
        try:
            frame = _parse(packet)
            if frame.WhichOneof("frame") != "hello":
                raise BadFrame("the first frame must be Hello")
            if pidfd is None:
                pidfd = _take_pidfd(packet)
            greeting = Greeting(
                welcome_ns=welcome_ns,
                now_ns=self._clock.now_ns(),
                margin_seconds=self._facts.lease_margin_seconds,
                is_life_provable=pidfd is not None,
            )
            opening, reason = check_hello(frame.hello, greeting)
            opening = self._of_tenant(opening, peer)
            record = self._sessions.open(opening, link, pidfd)
        except KVTierError:
            if pidfd is not None:
                os.close(pidfd)
            raise
        finally:
            packet.close_fds()
        opened = pb.SessionOpened(
            session_id=record.id,
            token=record.caller.token,
            by_value=bool(reason),
            by_value_reason=reason,
            lease_ms_max=int(self._facts.lease_seconds_max * 1e3),
            lease_margin_ms=int(self._facts.lease_margin_seconds * 1e3),
            grpc_address=self._facts.grpc_address,
            keeps_memory=self._sessions.keeps_memory,
        )
        link.send(pb.DaemonFrame(opened=opened).SerializeToString())
        self._offers.offer(record)
        return record

    def _of_tenant(self, opening: Opening, peer: Peer) -> Opening:
        if peer.rights < Rights.ENGINE and opening.role is not Role.TOOL:
            raise Forbidden(f"a reader is no engine: say role TOOL, not {opening.role.name}")
        return replace(opening, peer=peer, engine=self._tenant.engine(opening.engine))

    async def _converse(self, record: SessionRecord, link: Link) -> None:
        """Until Bye, the end of the connection, or too many bad frames."""
        bad_count = 0
        while bad_count < BAD_FRAMES_MAX:
            packet = await link.receive()
            if packet is None:
                return
            about = 0
            try:
                frame = _parse(packet)
                about = frame.open_namespace.about
                if packet.fds:
                    raise BadFrame("file descriptors travel beside Hello only")
                self._sessions.confirm(record)
                if frame.WhichOneof("frame") == "bye":
                    self._sessions.ended(record)
                    return
                await self._handle(record, frame)
            except KVTierError as error:
                bad_count += isinstance(error, BadFrame)
                facts = refusal_facts(self._tenant, link.connection, error)
                log.info("session frame refused", extra={"session": record.id, **facts})
                self._answer_error(link, error, about)
            finally:
                packet.close_fds()
        facts = {"session": record.id, "tenant": self._tenant.name or None}
        log.warning("session closed after bad frames", extra=facts)

    async def _handle(self, record: SessionRecord, frame: pb.ClientFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "open_namespace":
            await self._on_open_namespace(record, frame.open_namespace)
            return
        handler = self._handlers.get(kind or "")
        if handler is None:
            raise BadFrame(
                "Hello was said already" if kind == "hello" else "no frame that this daemon knows"
            )
        handler(record, frame)

    async def _on_open_namespace(self, record: SessionRecord, asked: pb.OpenNamespace) -> None:
        opened = await self._namespaces.open_for(asked.spec, record.caller.peer)
        if not record.is_live:
            return
        layout = SlotLayout(opened.spec.shard_bytes, opened.spec.shard_count)
        answer = pb.NamespaceOpened(
            namespace_id=opened.id,
            fingerprint=opened.fingerprint,
            epoch=self._core.namespace_epoch(opened.id),
            about=asked.about,
            slot_bytes=opened.slot_bytes,
            slot_count_max=opened.slot_count_max,
            wants_token_ids=self._facts.wants_token_ids,
            segment_shard_bytes=layout.padded_shard_bytes,
        )
        # Before the offers that joining brings.
        self._sessions.send(record.id, pb.DaemonFrame(namespace_opened=answer))
        self._core.post(NamespaceJoined(record.id, opened.id))

    def _on_slab_mapped(self, record: SessionRecord, frame: pb.ClientFrame) -> None:
        slab = SlabId(frame.slab_mapped.slab_id)
        if slab not in record.offered:
            raise BadFrame(f"slab {slab} was not offered to this session")
        self._core.post(SlabMapped(record.id, slab))

    def _on_slab_unmapped(self, record: SessionRecord, frame: pb.ClientFrame) -> None:
        slab = SlabId(frame.slab_unmapped.slab_id)
        if slab not in record.offered:
            raise BadFrame(f"slab {slab} was not offered to this session")
        record.offered.discard(slab)
        self._core.post(SlabUnmapped(record.id, slab))

    def _on_quiet(self, record: SessionRecord, frame: pb.ClientFrame) -> None:
        self._core.post(SessionQuiet(record.id, SessionId(frame.quiet.session_id)))

    def _answer_error(self, link: Link, error: KVTierError, about: int) -> None:
        name = type(error).__name__
        self._metrics.calls.frame_errors.labels(name if name in FRAME_ERRORS else "other").inc()
        answer = pb.SessionError(name=name, message=str(error)[:1024], about=about)
        link.send(pb.DaemonFrame(error=answer).SerializeToString())


def _parse(packet: Packet) -> pb.ClientFrame:
    if packet.is_truncated:
        raise BadFrame(f"a frame may have {FRAME_BYTES_MAX} bytes: this one was cut")
    if packet.is_missing_fds:
        raise BadFrame("file descriptors beside the frame were cut: send one at most")
    try:
        return pb.ClientFrame.FromString(packet.data)
    except DecodeError:
        raise BadFrame(f"{len(packet.data)} bytes are no ClientFrame of kvtier.v1") from None


def _take_pidfd(packet: Packet) -> int | None:
    """The pidfd beside Hello; whatever else came stays in the packet and is closed."""
    if len(packet.fds) > 1:
        raise BadFrame(f"{len(packet.fds)} file descriptors beside Hello: send a pidfd only")
    if packet.fds and not is_pidfd(packet.fds[0]):
        raise BadFrame("the file descriptor beside Hello is no pidfd")
    return packet.fds.pop() if packet.fds else None
