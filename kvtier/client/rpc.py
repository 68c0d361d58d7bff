"""The synchronous channel of one session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

import grpc

from kvtier.client.calls import CHANNEL_OPTIONS, A, Call, Q


class Rpc:
    """A channel and its calls, made once each. A new session makes a new one."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self._made: dict[tuple[str, str], object] = {}

    def unary(self, call: Call[Q, A]) -> grpc.UnaryUnaryMultiCallable[Q, A]:
        made = self._made.get(("unary", call.name))
        if made is None:
            made = self._made["unary", call.name] = self._channel.unary_unary(
                call.path, _serializer(call), _parser(call)
            )
        return cast("grpc.UnaryUnaryMultiCallable[Q, A]", made)

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
        self._channel.close()

    def forget_in_child(self) -> None:
        """A forked child must not even free the channel: gRPC's threads are not there."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._channel))


def cancel(call: grpc.RpcContext) -> None:
    """End the call now; nothing happens to one that has ended."""
    call.cancel()


def _serializer(call: Call[Q, A]) -> Callable[[Q], bytes]:
    return call.request.SerializeToString


def _parser(call: Call[Q, A]) -> Callable[[bytes], A]:
    return call.answer.FromString
