"""The reference engine's server on a loop of its own in another thread. Needs aiohttp."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.engine.engine import Engine
from kvtier.engine.http.http_server import OpenAiServer, serve
from kvtier.engine.http.openai_api import TextModel
from kvtier.engine.http.service import EngineService


@dataclass
class Served:
    port: int
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def served_engine(engine: Engine, text_model: TextModel) -> Iterator[Served]:
    service, stop = EngineService(engine), asyncio.Event()
    bound: list[int] = []
    is_up = threading.Event()
    loop = asyncio.new_event_loop()

    def started(port: int) -> None:
        bound.append(port)
        is_up.set()

    server = OpenAiServer(service, text_model, "tiny")
    thread = threading.Thread(
        target=loop.run_until_complete, args=(serve(server, 0, started, stop),)
    )
    service.start()
    thread.start()
    try:
        assert is_up.wait(10)
        yield Served(bound[0], engine)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        service.close()
        loop.close()
