"""Opens and keeps a by-value session over gRPC, for whoever cannot use the session socket."""

from __future__ import annotations

import grpc

from kvtier.client import calls, codec
from kvtier.client.calls import A, Call, Q
from kvtier.client.doors import SessionEnded, is_protocol_known
from kvtier.client.link import Link, OpenSession
from kvtier.client.rpc import Rpc
from kvtier.client.values import Namespace, NamespaceState, SessionRef
from kvtier.errors import KVTierError, ProtocolMismatch, Unauthenticated, Unavailable
from kvtier.types import PROTOCOL_VERSION
from kvtier.v1 import kvtier_pb2 as pb
from kvtier.version import VERSION


class GreetDoor:
    """See `doors.Door`. Each namespace has its own by-value session, and token, at the daemon."""

    def __init__(self, link: Link, address: str) -> None:
        self._link = link
        self._address = address
        self._rpc: Rpc | None = None
        self._session: OpenSession | None = None
        self._asked: set[int] = set()
        self._used_at = 0.0  # When every by-value session was last used, monotonic seconds.

    def open(self) -> OpenSession:
        self._asked.clear()
        self._rpc = Rpc(self._address, tls=self._link.settings.tls)
        answer = self._greet(pb.GreetRequest())
        if not is_protocol_known(answer.protocol):
            raise ProtocolMismatch(
                f"the daemon speaks protocol {answer.protocol}, this client {PROTOCOL_VERSION}: "
                "upgrade the older one"
            )
        self._link.enter_generation(answer.generation)
        self._used_at = self._link.clock.now()
        self._session = OpenSession(
            ref=SessionRef(answer.generation, 0),
            token=answer.token,
            by_value=True,
            by_value_reason=f"connected to {self._address}, not to a session socket",
            lease_ns_max=0,
            grpc_address=self._address,
            rpc=self._rpc,
        )
        return self._session

    def fileno(self) -> int | None:
        return None

    @property
    def has_unsent(self) -> bool:
        return False

    def receive(self) -> None:
        """Nothing comes by itself over gRPC."""

    def advance(self) -> None:
        for namespace in self._link.namespaces:
            if namespace.about not in self._asked and not self._link.is_closing():
                self._open_namespace(namespace)
                self._asked.add(namespace.about)
        self._keep_alive()

    @property
    def due_seconds(self) -> float | None:
        due_at = self._used_at + self._link.settings.keepalive_seconds
        return max(0.0, due_at - self._link.clock.now())

    def _keep_alive(self) -> None:
        """By-value sessions end unless they are used: match nothing under each of them."""
        now = self._link.clock.now()
        if self._session is None or now < self._used_at + self._link.settings.keepalive_seconds:
            return
        self._used_at = now
        states = [namespace.state for namespace in self._link.namespaces]
        for token in [self._session.token, *(state.token for state in states if state)]:
            try:
                self._call(calls.MATCH, pb.MatchRequest(token=token))
            except Unauthenticated:
                raise SessionEnded("the daemon has forgotten our by-value session") from None
            except KVTierError:
                pass  # Any other answer is an answer; none is the breaker's business.

    def _open_namespace(self, namespace: Namespace) -> None:
        assert self._session is not None
        try:
            answer = self._greet(pb.GreetRequest(spec=codec.spec_message(namespace.spec)))
        except Unavailable:
            raise
        except KVTierError as error:
            self._link.namespace_refused(namespace, error)
            return
        if answer.generation != self._session.ref.generation:
            raise SessionEnded("another daemon answers now")
        state = NamespaceState(
            namespace_id=answer.namespace_id,
            fingerprint=answer.fingerprint,
            epoch=answer.epoch,
            slot_bytes=0,
            session=self._session.ref,
            token=answer.token,
        )
        self._link.namespace_opened(namespace, state)

    def _greet(self, request: pb.GreetRequest) -> pb.GreetResponse:
        request.protocol = PROTOCOL_VERSION
        request.client_version = VERSION
        return self._call(calls.GREET, request)

    def _call(self, call: Call[Q, A], request: Q) -> A:
        if self._rpc is None or self._link.is_closing():
            raise SessionEnded("the client is closed")
        timeout = self._link.settings.connect_timeout_seconds
        try:
            return self._rpc.unary(call)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise codec.error_of(error.code(), error.details()) from None
        except ValueError:  # gRPC's word for a channel that `interrupt` has closed.
            raise SessionEnded("the client is closed") from None

    def close(self, *, orderly: bool) -> None:
        """By-value sessions hold nothing; the daemon forgets them by itself."""
        if self._rpc is not None:
            self._rpc.close()
            self._rpc = None

    def interrupt(self) -> None:
        rpc = self._rpc
        if rpc is not None:
            rpc.close()

    def close_in_child(self) -> None:
        if self._rpc is not None:
            self._rpc.forget_in_child()
