"""The synchronous channel of one session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from kvtier.client.calls import CHANNEL_OPTIONS, A, Call, Q
from kvtier.client.lane import Lane, LaneFailure, LaneRefused
from kvtier.client.tls import ClientTls
from kvtier.lane import LANE_CALLS

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)


class Unary(Protocol[Request_contra, Reply_co]):
    """A call with one request and one answer; raises grpc.RpcError."""

    def __call__(self, request: Request_contra, *, timeout: float) -> Reply_co: ...


class Rpc:
    """A channel, the lane where there is one, and their calls, made once each.

    A new session makes a new one.
    """

    def __init__(
        self, address: str, lane: Lane | None = None, tls: ClientTls | None = None
    ) -> None:
        """Raises ConfigError when the files of `tls` cannot be read."""
        options = list(CHANNEL_OPTIONS)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self._lane = lane
        self._made: dict[tuple[str, str], object] = {}

    def unary(self, call: Call[Q, A]) -> Unary[Q, A]:
        made = self._made.get(("unary", call.name))
        if made is None:
            if self._lane is not None and call.name in LANE_CALLS:
                made = self._by_lane(self._lane, call)
            else:
                made = self.over_grpc(call)
            self._made["unary", call.name] = made
        return cast("Unary[Q, A]", made)

    def _by_lane(self, lane: Lane, call: Call[Q, A]) -> Unary[Q, A]:
        number, encode, decode = LANE_CALLS.index(call.name), _serializer(call), _parser(call)

        def perform(request: Q, *, timeout: float) -> A:
            try:
                answer = lane.call(number, encode(request), timeout_seconds=timeout)
            except LaneRefused as refused:
                if refused.left_seconds <= 0:
                    raise
                return self.over_grpc(call)(request, timeout=refused.left_seconds)
            try:
                return decode(answer)
            except DecodeError:
                # As gRPC does: the call was run, what it did is unknown.
                raise LaneFailure(grpc.StatusCode.INTERNAL, "the answer is no message") from None

        return perform

    def over_grpc(self, call: Call[Q, A]) -> grpc.UnaryUnaryMultiCallable[Q, A]:
        """Not by the lane: for whoever wants a future."""
        return self._channel.unary_unary(call.path, _serializer(call), _parser(call))

    def answer_stream(self, call: Call[Q, A]) -> grpc.UnaryStreamMultiCallable[Q, A]:
        made = self._made.get(("answer_stream", call.name))
        if made is None:
            made = self._made["answer_stream", call.name] = self._channel.unary_stream(
                call.path, _serializer(call), _parser(call)
            )
        return cast("grpc.UnaryStreamMultiCallable[Q, A]", made)

    def request_stream(self, call: Call[Q, A]) -> grpc.StreamUnaryMultiCallable[Q, A]:
        made = self._made.get(("request_stream", call.name))
        if made is None:
            made = self._made["request_stream", call.name] = self._channel.stream_unary(
                call.path, _serializer(call), _parser(call)
            )
        return cast("grpc.StreamUnaryMultiCallable[Q, A]", made)

    def close(self) -> None:
        """Cancels what is in flight."""
        if self._lane is not None:
            self._lane.close()
        self._channel.close()

    def forget_in_child(self) -> None:
        """A forked child must not even free the channel: gRPC's threads are not there."""
        if self._lane is not None:
            self._lane.close_in_child()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._channel))


def cancel(call: grpc.RpcContext) -> None:
    """End the call now; nothing happens to one that has ended."""
    call.cancel()


def _serializer(call: Call[Q, A]) -> Callable[[Q], bytes]:
    return call.request.SerializeToString


def _parser(call: Call[Q, A]) -> Callable[[bytes], A]:
    return call.answer.FromString
