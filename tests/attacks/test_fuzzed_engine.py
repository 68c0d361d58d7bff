"""The reference engine's HTTP: what comes there is answered or refused, and takes nothing along."""

from __future__ import annotations

import json
import logging
import random
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest

from kvtier.engine.config import EngineConfig
from kvtier.engine.engine import Engine
from tests.support.engines import wait_until
from tests.support.fuzzing import fuzz, mutated, mutated_value, nested
from tests.support.letters import Letters
from tests.support.tiny_models import tiny_model

pytest.importorskip("aiohttp", reason="kvtier[http] is not installed")

from tests.support.served_engine import Served, served_engine

pytestmark = [pytest.mark.full_form, pytest.mark.timeout(900)]

GREEDY: dict[str, Any] = {"prompt": "Tell me of the sun", "temperature": 0, "max_tokens": 12}
TURN = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", GREEDY | {"n": 2, "seed": 7, "top_p": 0.5, "stop": ["x", "yz"]}),
    ("completions", {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": 1}}),
    ("chat/completions", {"messages": [TURN, TURN], "max_completion_tokens": 4, "logprobs": False}),
    ("chat/completions", {"messages": [TURN], "stream": True, "max_tokens": 3, "user": "me"}),
]
# What a client may be told; 500 would be a mistake of ours.
RESET = struct.pack("ii", 1, 0)  # Closed at once, whatever is on its way.
STATUSES = {200, 400, 403, 404, 405, 413, 414, 417, 429, 431, 503}


def request_of(path: str, body: bytes, more: str = "") -> bytes:
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{more}\r\n".encode() + body


def drawn(chance: random.Random) -> bytes:
    """Mostly HTTP, whose body is nearly right."""
    path, value = chance.choice(BODIES)
    changed: object = value
    for _ in range(chance.randrange(3)):
        changed = mutated_value(chance, changed)
    body = nested(chance) if chance.random() < 0.05 else json.dumps(changed).encode()
    if chance.random() < 0.2:
        body = mutated(chance, body)
    if chance.random() < 0.1:
        pieces = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in (body[:9], body[9:]) if one)
        head = request_of(path, b"", "Transfer-Encoding: chunked\r\n")
        return mutated(chance, head.replace(b"Content-Length: 0\r\n", b"") + pieces + b"0\r\n\r\n")
    request = request_of(path, body)
    return mutated(chance, request) if chance.random() < 0.3 else request


def status_of(answer: bytes) -> int | None:
    """Of a whole first line; None before there is one."""
    line, end, _ = answer.partition(b"\r\n")
    return int(line.split()[1]) if end and line.startswith(b"HTTP/1.") else None


def test_fuzzed_http_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = Engine(tiny_model(), EngineConfig(block_tokens=4, device_block_count=512))
    statuses: set[int] = set()
    with served_engine(engine, Letters()) as served:
        right = answer_to(served)

        def attempt(chance: random.Random) -> None:
            with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
                with suppress(OSError):  # It may hang up in the middle of what is too much.
                    connection.sendall(drawn(chance))
                if chance.random() < 0.2:
                    return  # And is not there to hear.
                connection.settimeout(0.2)
                with suppress(OSError):
                    status = status_of(connection.recv(1 << 16))
                    if status is not None:
                        assert status in STATUSES, status
                        statuses.add(status)

        fuzz("HTTP of the engine", attempt)
        assert {200, 400} <= statuses, statuses
        assert answer_to(served) == right
        assert wait_until(lambda: engine.unfinished_count == 0, 30.0)
        pool = engine.scheduler.pool
        assert pool.free_count == pool.block_count, "a request runs on for nobody"
    assert not caplog.records, caplog.text[:4000]


def test_neither_garbage_nor_a_client_that_hangs_up_leaves_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    engine = Engine(tiny_model(), EngineConfig(block_tokens=4, device_block_count=512))
    body = json.dumps(GREEDY | {"stream": True, "max_tokens": 200, "n": 4}).encode()
    garbage = request_of("completions", body).replace(b"127.0.0.1", b"127.0.0.\x03")
    with served_engine(engine, Letters()) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            connection.sendall(garbage)
            assert status_of(connection.recv(1 << 16)) == 400
        for _ in range(20):  # As a rule a write comes before the end of one of them is seen.
            with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
                connection.sendall(request_of("completions", body))
                assert status_of(connection.recv(1 << 16)) == 200
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        assert wait_until(lambda: engine.unfinished_count == 0, 30.0)
    assert not caplog.records, caplog.text[:4000]


def answer_to(served: Served) -> str:
    """Of a request that is right."""
    data = json.dumps(GREEDY).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(request_of("completions", data, "Connection: close\r\n"))
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    return text
