"""What every call passes through, by gRPC or by the lane: limit, token, role, errors, metrics.

A mistake of ours inside a call would be swallowed by gRPC (UNKNOWN, carry on); here it is handed to
the core loop, which ends the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from prometheus_client import Gauge

from kvtier.errors import BadRequest, KVTierError, LimitExceeded
from kvtier.lane import LANE_CALLS, pack
from kvtier.metrics.labels import OUTCOMES
from kvtier.server import logs
from kvtier.server.base import Base
from kvtier.server.call_limits import CallLimits
from kvtier.server.lane import Answer, refusal
from kvtier.server.security import ACCESS, Access, Caller, Peer, Tokens, check_rights
from kvtier.server.slow_calls import SlowCalls
from kvtier.server.turnstile import Turnstile
from kvtier.server.wire import status_of
from kvtier.types import REQUEST_ID_CHARS_MAX
from kvtier.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = "kvtier.v1.KVTier"
MESSAGE_BYTES_MAX = 4 << 20
# A client that asks again at once, and again, would cost as much as one whose calls are answered.
REFUSED_SECONDS = 0.02
_GIVING_BACK = frozenset({"Commit", "Abort", "Release"})
_NAMED = frozenset({"Match", "Acquire"})  # Calls that may name the engine's request.

M = TypeVar("M", bound=Message)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Message, Message]
    Service = grpc.GenericRpcHandler[Message, Message]
    RpcHandler = grpc.RpcMethodHandler[Message, Message]
# gRPC's word for who is at the other end -> who that is; raises Forbidden.
OriginOf = Callable[[str], Peer]
Send = Callable[[Message], Awaitable[None]]
# Messages differ by call, and the table below joins each handler with its message class: so these
# say "a callable" and no more.
Unary = Callable[..., Awaitable[Message]]
Streaming = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are no message of its class, or too many."""

    error: KVTierError


class _Service(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # No generic at run time.
    """Counts calls as soon as gRPC has their names: of one whose message is too large for it, or
    never whole, it tells no more."""

    def __init__(self, made: Mapping[str, RpcHandler], unread: Gauge) -> None:
        self._made = {f"/{SERVICE}/{name}": handler for name, handler in made.items()}
        self._unread = unread

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> RpcHandler | None:
        found = self._made.get(handler_call_details.method)
        if found is not None:
            self._unread.inc()
        return found


@dataclass(slots=True)
class Handlers:
    """The servicer's methods by RPC name and by kind."""

    unary: dict[str, Unary] = field(default_factory=dict)  # (request, caller) -> response
    streaming: dict[str, Streaming] = field(default_factory=dict)  # (request, caller, send)
    collecting: dict[str, Unary] = field(default_factory=dict)  # (requests) -> response


class Calls:
    """Wraps handlers; counts calls under way."""

    def __init__(
        self,
        base: Base,
        tokens: Tokens,
        *,
        limits: CallLimits,
        is_shared: bool = False,
        slow_call_seconds: float = float("inf"),
    ) -> None:
        """`is_shared`: several tenants call."""
        self._core = base.core
        self._tokens = tokens
        self._clock = base.clock
        self._metrics = base.metrics
        self._slow = SlowCalls(base, slow_call_seconds)
        self.limits = limits
        self._turnstile = Turnstile(is_needed=is_shared)

    def service(self, handlers: Handlers, origin_of: OriginOf) -> Service:
        """The whole service; every RPC of the protocol must have a handler."""
        made = {}
        for method in pb.DESCRIPTOR.services_by_name["KVTier"].methods:
            name = method.name
            decode = _decoder(getattr(pb, method.input_type.name))
            if method.client_streaming:
                made[name] = grpc.stream_unary_rpc_method_handler(
                    self._collecting(name, handlers.collecting[name], origin_of), decode, _encode
                )
            elif method.server_streaming:
                made[name] = grpc.unary_stream_rpc_method_handler(
                    self._streaming(name, handlers.streaming[name], origin_of), decode, _encode
                )
            else:
                made[name] = grpc.unary_unary_rpc_method_handler(
                    self._unary(name, handlers.unary[name], origin_of), decode, _encode
                )
        return _Service(made, self._metrics.calls.unread_calls)

    def lane(self, handlers: Handlers) -> Answer:
        """The calls of the lane, by number: the same handlers, without gRPC around them."""
        methods = pb.DESCRIPTOR.services_by_name["KVTier"].methods_by_name
        made: list[tuple[str, Callable[[bytes], Message | _Malformed], Unary]] = []
        for name in LANE_CALLS:
            decode = _decoder(getattr(pb, methods[name].input_type.name))
            handler = handlers.unary.get(name) or _once(handlers.streaming[name])
            made.append((name, decode, handler))

        async def answer(number: int, payload: bytes, origin: Peer) -> bytes:
            try:
                if number >= len(made):
                    raise BadRequest(f"the lane has no call {number}: use gRPC")
                name, decode, handler = made[number]
                await self._turnstile.enter(origin.tenant)
                return pack(0, _encode(await self._perform(name, handler, decode(payload), origin)))
            except KVTierError as error:
                return refusal(status_of(error).value[0], _text_of(error))
            except Exception as error:  # noqa: BLE001  # Our own mistake: it ends the daemon.
                self._core.fail(error)
                return refusal(grpc.StatusCode.INTERNAL.value[0], _OUR_MISTAKE)

        return answer

    def _unary(
        self, name: str, handler: Unary, origin_of: OriginOf
    ) -> Callable[..., Awaitable[Message]]:
        async def call(request: Message, context: Context) -> Message:
            self._metrics.calls.unread_calls.dec()
            try:
                origin = origin_of(context.peer())
                await self._turnstile.enter(origin.tenant)
                return await self._perform(name, handler, request, origin)
            except BaseException as error:  # noqa: BLE001  # Sorted and raised again there.
                await self._refuse(error, context)

        return call

    async def _perform(
        self, name: str, handler: Unary, request: Message | _Malformed, origin: Peer
    ) -> Message:
        """Admit and run one call, and count it."""
        started = self._clock.now()
        outcome = "ok"
        caller: Caller | None = None
        mark = logs.request_id.set(_request_id_of(request)) if name in _NAMED else None
        try:
            with self.limits.under_way(origin.tenant):
                gives_back = name in _GIVING_BACK
                if not self.limits.may_begin(origin.tenant, started, gives_back=gives_back):
                    self._metrics.tenants.refused_calls.labels(origin.tenant).inc()
                    await asyncio.sleep(REFUSED_SECONDS)
                    raise self.limits.refusal(origin.tenant)
                caller = self._admit(request, ACCESS[name], origin, started)
                return await handler(request, origin if caller is None else caller)
        except BaseException as error:
            outcome = _outcome_of(error)
            if isinstance(error, KVTierError):
                log.info("call refused", extra=_refusal_facts(name, caller or origin, error))
            raise
        finally:
            seconds = self._clock.now() - started
            self._metrics.calls.note_call(name, outcome, seconds)
            if seconds > self._slow.seconds_max:
                self._slow.note(name, request, caller, outcome, seconds)
            if mark is not None:
                logs.request_id.reset(mark)

    def _streaming(
        self, name: str, handler: Streaming, origin_of: OriginOf
    ) -> Callable[..., Awaitable[None]]:
        async def respond(request: Message, caller: Caller | None, send: Send) -> Message:
            await handler(request, caller, send)
            return pb.GetResponse()  # Never sent.

        async def call(request: Message, context: Context) -> None:
            async def forward(message: Message, caller: Caller | None) -> Message:
                return await respond(message, caller, context.write)

            await self._unary(name, forward, origin_of)(request, context)

        return call

    def _collecting(
        self, name: str, handler: Unary, origin_of: OriginOf
    ) -> Callable[..., Awaitable[Message]]:
        async def call(requests: AsyncIterator[Message], context: Context) -> Message:
            async def collect(first: Message, caller: Caller | None) -> Message:
                return await handler(first, caller, _checked(requests))

            try:
                first = await anext(requests)
            except StopAsyncIteration:
                first = pb.PutRequest()  # Has no token: refused by name.
            return await self._unary(name, collect, origin_of)(first, context)

        return call

    def _admit(
        self, request: Message | _Malformed, access: Access, origin: Peer, now: float
    ) -> Caller | None:
        if isinstance(request, _Malformed):
            raise request.error
        self.limits.check_room(origin.tenant)
        if access.form is None:
            check_rights(origin, access)
            return None
        if len(getattr(request, "request_id", "")) > REQUEST_ID_CHARS_MAX:
            raise BadRequest(f"request_id is too long: at most {REQUEST_ID_CHARS_MAX} characters")
        token: bytes = request.token  # type: ignore[attr-defined]  # Every request has one.
        return self._tokens.caller(token, access, origin, now=now)

    async def _refuse(self, error: BaseException, context: Context) -> NoReturn:
        """End the call with the error's name; our own mistakes end the daemon."""
        if isinstance(error, KVTierError):
            await context.abort(status_of(error), _text_of(error))
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            raise error  # Cancelled, or ending.
        if _is_broken_call(error):
            raise asyncio.CancelledError from error
        self._core.fail(error)
        await context.abort(grpc.StatusCode.INTERNAL, _OUR_MISTAKE)
        raise AssertionError("abort raises")


_OUR_MISTAKE = "the daemon found a mistake of its own"
_NO_MESSAGE = "the bytes are no message of kvtier.v1: check the protocol version"


def _request_id_of(request: Message | _Malformed) -> str:
    """To be logged, so cut also where the call will be refused for it."""
    return str(getattr(request, "request_id", ""))[:REQUEST_ID_CHARS_MAX]


def _refusal_facts(name: str, who: Caller | Peer, error: KVTierError) -> dict[str, object]:
    peer = who.peer if isinstance(who, Caller) else who
    return {
        "call": name,
        "session": who.session if isinstance(who, Caller) else None,
        "tenant": peer.tenant or None,
        "uid": peer.uid,
        "certificate": peer.certificate or None,
        "error": type(error).__name__,
        "reason": str(error),
    }


def _text_of(error: KVTierError) -> str:
    return f"{type(error).__name__}: {error}"[:1024]


def _once(handler: Streaming) -> Unary:
    """A streaming handler that sends one final message, as one that returns it."""

    async def call(request: Message, caller: Caller | None) -> Message:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            is_pending = isinstance(message, pb.AcquireResponse) and message.HasField("pending")
            if not is_pending:
                sent.append(message)

        await handler(request, caller, send)
        assert len(sent) == 1, "a call by the lane has one answer"
        return sent[0]

    return call


async def _checked(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise request.error
        yield request


def _decoder(kind: type[M]) -> Callable[[bytes], M | _Malformed]:
    """gRPC answers UNKNOWN when a deserializer raises; a value can be refused by name."""
    parse = kind.FromString

    def decode(data: bytes) -> M | _Malformed:
        if len(data) > MESSAGE_BYTES_MAX:
            text = f"a message of {len(data)} bytes: send {MESSAGE_BYTES_MAX} at most"
            return _Malformed(LimitExceeded(text))
        try:
            return parse(data)
        except DecodeError:
            return _Malformed(BadRequest(_NO_MESSAGE))

    return decode


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


def _outcome_of(error: BaseException) -> str:
    name = type(error).__name__
    if name in OUTCOMES:
        return name
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"


def _is_broken_call(error: Exception) -> bool:
    """gRPC's own errors when the peer is gone in the middle of a stream."""
    return isinstance(error, grpc.aio.UsageError | grpc.aio.InternalError | grpc.RpcError)
