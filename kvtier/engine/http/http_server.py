"""The engine behind OpenAI's HTTP interface, on this machine's loopback alone.

POST /v1/completions, /v1/chat/completions    answers, whole or as server-sent events
GET  /v1/models, /healthz
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvtier.engine.http.openai_api import Answers, Body, Call, TextModel, parse_call
from kvtier.engine.http.service import EngineService
from kvtier.errors import BadRequest, KVTierError, LimitExceeded

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
BODY_BYTES_MAX = 4 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAiServer:
    """Handlers over one engine; `model` is its name to clients."""

    def __init__(self, service: EngineService, text_model: TextModel, model: str) -> None:
        self._service = service
        self._text_model = text_model
        self._model = model
        self._created = int(time.time())

    def application(self) -> web.Application:
        application = web.Application(
            middlewares=[_only_local, _errors], client_max_size=BODY_BYTES_MAX
        )
        application.add_routes(
            [
                web.post("/v1/completions", partial(self._answer, "completion")),
                web.post("/v1/chat/completions", partial(self._answer, "chat")),
                web.get("/v1/models", self._models),
                web.get("/healthz", self._health),
            ]
        )
        return application

    async def _answer(self, kind: str, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError):  # LookupError: an unknown charset.
            raise BadRequest("the body is no JSON") from None
        # On another thread: a long prompt takes a while to be cut into tokens.
        call = await asyncio.to_thread(
            parse_call, kind, body, self._text_model, seed=secrets.randbits(63)
        )
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        name = f"{prefix}-{uuid.uuid4().hex}"
        answers = Answers.of(call, self._text_model, name, self._model, int(time.time()))
        if call.is_streaming:
            return await self._stream(request, call, answers)
        async with aclosing(self._service.submit(call.prompt_ids, call.params)) as outputs:
            async for output in outputs:
                answers.feed(output)
                if answers.is_over:  # A stop's text may be, while the engine goes on.
                    break
        return web.json_response(answers.answer())

    async def _stream(
        self, request: web.Request, call: Call, answers: Answers
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        async with aclosing(self._service.submit(call.prompt_ids, call.params)) as outputs:
            # An error before the first token is an answer with a status of its own.
            output = await anext(outputs)
            await response.prepare(request)
            await _send(response, answers.first())
            try:
                while True:  # Ends with the last output.
                    await _send(response, answers.feed(output))
                    if answers.is_over:
                        break
                    output = await anext(outputs)
            except KVTierError as error:  # The status is out: the stream has to tell.
                await _send(response, _error_body(503, str(error)))
        if call.with_usage and answers.is_over:
            await _send(response, answers.last())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": self._created}
        return web.json_response({"object": "list", "data": [model | {"owned_by": "kvtier"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


async def serve(
    server: OpenAiServer, port: int, started: Callable[[int], object], stop: asyncio.Event
) -> None:
    """Until `stop`; `started` is told the port. Raises OSError where it is taken."""
    log.addFilter(_is_of_ours)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        logger=log,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        started(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


def _is_of_ours(record: logging.LogRecord) -> bool:
    """Not of bytes that are no HTTP, nor of who hangs up: anybody could fill the log with it."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


async def _send(response: web.StreamResponse, body: Body | None) -> None:
    if body is not None:
        await response.write(f"data: {json.dumps(body)}\n\n".encode())


@web.middleware
async def _only_local(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page of another site can make a browser ask us, by a name of its own or from its origin."""
    host = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
    origin = request.headers.get("Origin")
    if host not in _LOOPBACK or origin is not None:
        return _error(403, "only programs on this machine are answered, by a loopback name")
    return await handler(request)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except LimitExceeded as error:
        return _error(429, str(error))
    except KVTierError as error:
        return _error(503, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason)


def _error(status: int, text: str) -> web.Response:
    return web.json_response(_error_body(status, text), status=status)


def _error_body(status: int, text: str) -> Body:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}
