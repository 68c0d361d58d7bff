"""gRPC for other machines: the daemon itself ends TLS, asks who it is, and passes bytes on.

It runs in a thread of its own: nobody's handshake and nobody's bytes delay the calls of engines.
Who has not shown a certificate costs little: of `HANDSHAKES_MAX` handshakes under way the oldest
ends when one more begins, and each within `hello_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import uvloop

from kvtier.clock import wall_seconds
from kvtier.config_address import split_address
from kvtier.errors import ConfigError, Forbidden, KVTierError, LimitExceeded
from kvtier.metrics.calls import CallMetrics
from kvtier.server.certificates import Grants, TlsFiles, names_of, seconds_left
from kvtier.server.passage import PIECE_BYTES, Passage
from kvtier.server.security import Peer
from kvtier.server.threads import call_soon

log = logging.getLogger(__name__)

BACKLOG = 128
HANDSHAKES_MAX = 64
ACCEPT_PAUSE_SECONDS = 0.5
SHUTDOWN_SECONDS = 2.0  # For a client that was told of the end.


@dataclass(eq=False, slots=True)
class _Open:
    """A connection that was let in."""

    names: list[str]
    peer: Peer
    limit: asyncio.Timeout
    is_ended: bool = False  # Not by time: the lists have changed.


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What a connection is held to."""

    files: TlsFiles
    grants: Grants
    hello_seconds: float


class TlsDoor:
    """The port."""

    def __init__(
        self,
        settings: TlsSettings,
        passages: Mapping[str, Passage],
        metrics: CallMetrics,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`passages`: by tenant. `fail` is called in this door's thread, for a mistake of ours."""
        self._settings = settings
        self._grants = settings.grants
        self._passages = passages
        self._metrics = metrics
        self._fail = fail
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-tls", daemon=True)
        # Handshakes under way, the oldest first, each with its client's address.
        self._greeting: dict[asyncio.Task[None], str] = {}
        self._open: set[_Open] = set()

    def listen(self, address: str) -> str:
        """Bind; the address with its port. Raises ConfigError."""
        host, port = split_address("grpc.tcp", address)
        try:
            self._listener = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=BACKLOG,
                dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise ConfigError(f"grpc.tcp: cannot listen at {address} ({error.strerror})") from None
        self._listener.setblocking(False)
        bound = self._listener.getsockname()[1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def start(self) -> None:
        assert self._listener is not None, "listen comes first"
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._serving = self._loop.create_task(self._accept())
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and end every connection; twice changes nothing."""
        if self._loop is not None and self._serving is not None:
            call_soon(self._loop, self._cancel)
            self._thread.join(2 * SHUTDOWN_SECONDS)
        elif self._listener is not None:
            self._listener.close()

    def regrant(self, grants: Grants) -> None:
        """From now on these lists count; who is connected, and is in none of them any more or in
        another one, is not."""
        if self._loop is not None:
            call_soon(self._loop, partial(self._regrant, grants))

    # ------------------------------------------------------------------------ in its own thread

    def _run(self) -> None:
        assert self._loop is not None, "start comes first"
        assert self._serving is not None, "start comes first"
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  # Our own mistake: it ends the daemon.
            self._fail(error)
        finally:
            self._loop.close()

    def _cancel(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        log.error("callback failed", extra={"reason": context.get("message"), "error": error})

    def _regrant(self, grants: Grants) -> None:
        self._grants = grants
        for one in self._open:
            if not (grants.is_peer(one.names, one.peer) or one.limit.expired()):
                one.is_ended = True
                one.limit.reschedule(asyncio.get_running_loop().time())

    async def _accept(self) -> None:
        assert self._listener is not None, "listen comes first"
        loop = asyncio.get_running_loop()
        with self._listener:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        connection, address = await loop.sock_accept(self._listener)
                    except OSError as error:
                        log.warning("cannot accept", extra={"reason": error.strerror})
                        await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                        continue
                    if len(self._greeting) >= HANDSHAKES_MAX:
                        self._make_room()
                    task = tasks.create_task(self._serve(connection, address[0]))
                    self._greeting[task] = address[0]

    def _make_room(self) -> None:
        oldest = next(iter(self._greeting))
        address = self._greeting.pop(oldest)
        oldest.cancel()
        self._refuse(address, "crowd", f"more than {HANDSHAKES_MAX} handshakes were under way")

    async def _serve(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None, "a task serves"
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._shake_hands(connection)
            names, peer, seconds = self._admit(writer)
        # The library's words for what came; a mistake of ours is an AssertionError.
        except (OSError, RuntimeError, ValueError, KVTierError) as error:
            self._refuse(address, *_told(error))
            if writer is not None:
                writer.transport.abort()
            return
        finally:
            self._greeting.pop(task, None)
        one = _Open(names, peer, asyncio.timeout(seconds))
        try:
            async with one.limit:
                self._open.add(one)
                await self._passages[peer.tenant].carry(reader, writer, peer)
        except TimeoutError:
            if one.is_ended:
                log.info("certificate listed otherwise", extra=_facts(address, peer))
            else:
                log.info("certificate expired", extra=_facts(address, peer))
        finally:
            self._open.discard(one)

    async def _shake_hands(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError, of which ssl.SSLError and TimeoutError are kinds."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._settings.files.context(),
                ssl_handshake_timeout=self._settings.hello_seconds,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except BaseException:
            connection.close()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _admit(self, writer: asyncio.StreamWriter) -> tuple[list[str], Peer, float]:
        """What its certificate says, who that is, and for how long; raises Forbidden,
        LimitExceeded."""
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        if tls.selected_alpn_protocol() != "h2":
            raise Forbidden("no gRPC client: it does not offer HTTP/2")
        names = names_of(tls)
        peer = self._grants.peer_of(names)
        self._passages[peer.tenant].require_room(peer.tenant)
        return names, peer, seconds_left(tls, wall_seconds())

    def _refuse(self, address: str, why: str, reason: str) -> None:
        self._metrics.refused_connections.labels(why).inc()
        log.warning("tls connection refused", extra={"address": address, "reason": reason})


def _facts(address: str, peer: Peer) -> dict[str, object]:
    return {
        "address": address,
        "tenant": peer.tenant or None,
        "certificate": peer.certificate,
    }


def _told(error: Exception) -> tuple[str, str]:
    """Why, of a closed set, and in words."""
    if isinstance(error, LimitExceeded):
        return "room", str(error)
    if isinstance(error, Forbidden):
        return "unknown", str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return "certificate", f"its certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "certificate", "it has no certificate"
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "late", "the handshake took longer than server.hello_seconds"
    if isinstance(error, ConnectionError):
        return "handshake", "it hung up in the middle of it"
    return "handshake", getattr(error, "reason", None) or str(error) or type(error).__name__
