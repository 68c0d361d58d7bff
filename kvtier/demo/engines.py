"""The demo's end of an engine process: orders, answers, and an end whatever happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvtier.cli.interrupts import deferred_interrupts
from kvtier.cli.private_daemon import end_process
from kvtier.demo.report import Answer
from kvtier.errors import Unavailable

WORKER = "kvtier.demo.worker"
EXIT_SECONDS_MAX = 15.0
# In the order of the worker's message and of the dataclass.
_COUNTS = ("engine_cache_count", "kvtier_count", "computed_count", "prompt_count")
_FIGURES = ("onboarded_bytes", "onboard_seconds", "offloaded_bytes", "hook_seconds_max")

Message = dict[str, object]
TokenHandler = Callable[[int], None]  # Told how many tokens have come.


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and the chat so far as tokens."""

    answer: Answer
    history: tuple[int, ...]
    is_ended: bool  # By the model; else it was cut off at tokens_max.
    token_times: tuple[float, ...]  # When each token came; monotonic.


class EngineProcess:
    """A worker process; `wait_ready` comes before everything else."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.document_token_count = 0
        self._process = process

    def load(self, socket: Path | None) -> None:
        """Start loading and warming up; returns at once."""
        self._tell({"what": "load", "socket": None if socket is None else str(socket)})

    def wait_ready(self) -> None:
        self.document_token_count = cast(int, self._hear()["document_token_count"])

    def ask(
        self,
        history: Sequence[int],
        text: str,
        *,
        tokens_max: int,
        on_token: TokenHandler = lambda _: None,
    ) -> Reply:
        """Send the next turn of a chat, and wait for its whole answer."""
        self._tell(
            {"what": "ask", "history": list(history), "text": text, "tokens_max": tokens_max}
        )
        times: list[float] = []
        while True:  # Ends with the answer, or with the process.
            message = self._hear()
            if message["what"] != "token":
                return self._reply(message, tuple(times))
            times.append(time.monotonic())
            on_token(len(times))

    def checksums(self, token_ids: Sequence[int]) -> dict[str, str]:
        """xxh3-64 of the device blocks of these tokens, by block hash."""
        self._tell({"what": "checksums", "token_ids": list(token_ids)})
        return cast("dict[str, str]", self._hear()["blocks"])

    def logit_gap(self, token_ids: Sequence[int], pair: tuple[int, int]) -> float:
        """How far apart the logits of two tokens are after `token_ids`."""
        self._tell({"what": "gap", "token_ids": list(token_ids), "pair": list(pair)})
        return cast(float, self._hear()["gap"])

    def leave(self) -> None:
        """Let the engine end in order, and wait until its process is gone."""
        assert self._process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS_MAX)

    def _reply(self, message: Message, times: tuple[float, ...]) -> Reply:
        answer = Answer(
            engine=self.name,
            **{name: cast(int, message[name]) for name in _COUNTS},
            ttft_seconds=cast(float, message["ttft_seconds"]),
            seconds=cast(float, message["seconds"]),
            token_ids=tuple(cast("list[int]", message["token_ids"])),
            text=str(message["text"]),
            tier_blocks=cast("dict[str, int]", message.get("tier_blocks", {})),
            **{name: message[name] for name in _FIGURES if name in message},  # type: ignore[arg-type]
            connected=bool(message["connected"]),
        )
        history = tuple(cast("list[int]", message["history"]))
        return Reply(answer, history, bool(message["is_ended"]), times)

    def _tell(self, message: Message) -> None:
        assert self._process.stdin is not None, "stdin is a pipe"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _hear(self) -> Message:
        assert self._process.stdout is not None, "stdout is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return cast(Message, json.loads(line))

    def _ended(self) -> Unavailable:
        return Unavailable(f"engine {self.name} has ended before its time, see above")


@contextmanager
def started_engine(name: str, socket: Path | None) -> Iterator[EngineProcess]:
    """A process that has begun to load; gone when the block is left."""
    process: subprocess.Popen[str] | None = None
    try:
        with deferred_interrupts():
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # ctrl-C goes to the demo alone, which ends everything in order.
                start_new_session=True,
            )
        engine = EngineProcess(name, process)
        engine.load(socket)
        yield engine
    finally:
        if process is not None:
            end_process(process)
