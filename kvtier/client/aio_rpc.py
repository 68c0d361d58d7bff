"""The asyncio channel of one session."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc.aio

from kvtier.client.calls import CHANNEL_OPTIONS, A, Call, Q
from kvtier.client.tls import ClientTls


class AioRpc:
    """See `rpc.Rpc`; belongs to the event loop that runs when it is made."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        options = list(CHANNEL_OPTIONS)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        self._made: dict[tuple[str, str], object] = {}
        self._closing: asyncio.Task[None] | None = None

    def unary(self, call: Call[Q, A]) -> grpc.aio.UnaryUnaryMultiCallable[Q, A]:
        made = self._made.get(("unary", call.name))
        if made is None:
            made = self._made["unary", call.name] = self._channel.unary_unary(
                call.path, call.request.SerializeToString, call.answer.FromString
            )
        return cast("grpc.aio.UnaryUnaryMultiCallable[Q, A]", made)

    def answer_stream(self, call: Call[Q, A]) -> grpc.aio.UnaryStreamMultiCallable[Q, A]:
        made = self._made.get(("answer_stream", call.name))
        if made is None:
            made = self._made["answer_stream", call.name] = self._channel.unary_stream(
                call.path, call.request.SerializeToString, call.answer.FromString
            )
        return cast("grpc.aio.UnaryStreamMultiCallable[Q, A]", made)

    def request_stream(self, call: Call[Q, A]) -> grpc.aio.StreamUnaryMultiCallable[Q, A]:
        made = self._made.get(("request_stream", call.name))
        if made is None:
            made = self._made["request_stream", call.name] = self._channel.stream_unary(
                call.path, call.request.SerializeToString, call.answer.FromString
            )
        return cast("grpc.aio.StreamUnaryMultiCallable[Q, A]", made)

    async def close(self) -> None:
        """Cancels what is in flight."""
        await self._channel.close(grace=None)

    def close_soon(self) -> None:
        """Close from a call that must not wait for it."""
        self._closing = asyncio.get_running_loop().create_task(self.close())
