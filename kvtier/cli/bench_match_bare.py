"""The least that a match over gRPC can cost here: a server that reads the hashes and answers.

Same library, event loop, messages and memory settings as the daemon; no kvtier behind it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import grpc
import uvloop

from kvtier.cli.peer import Order, serve
from kvtier.server.calls import SERVICE
from kvtier.server.heap import keep_message_memory
from kvtier.v1 import kvtier_pb2 as pb


class _BareServer:
    """One order: open."""

    def __init__(self) -> None:
        # Abstract: no file to remove.
        self._address = f"unix-abstract:kvtier-bench-bare-{os.getpid()}"
        self._ready = threading.Event()

    def handle(self, order: Order) -> Order:
        keep_message_memory()
        # A daemon thread: it ends with the process, which ends with its input.
        threading.Thread(target=self._run, name="bare", daemon=True).start()
        self._ready.wait()
        return {"address": self._address}

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        match = grpc.unary_unary_rpc_method_handler(
            _match, pb.MatchRequest.FromString, pb.MatchResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Match": match})
        server = grpc.aio.server(handlers=[handler])
        server.add_insecure_port(self._address)
        await server.start()
        self._ready.set()
        await server.wait_for_termination()


async def _match(request: pb.MatchRequest, _context: object) -> pb.MatchResponse:
    return pb.MatchResponse(matched_count=len(request.hashes))


if __name__ == "__main__":
    sys.exit(serve(_BareServer().handle))
