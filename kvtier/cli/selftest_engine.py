"""vLLM's engine in a process of its own, as `kvtier selftest vllm` drives it.

The process is `kvtier.connector.vllm.trial`, run by vLLM's Python; nothing of vLLM is imported
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from kvtier.errors import KVTierError, Unavailable

ANSWER_SECONDS = 900.0  # For one order: beyond it the engine hangs.
END_SECONDS = 60.0
_LOG_LINES = 6
_ERROR = re.compile(r"\b(\w*(Error|Exception)|Unsupported|BadRequest): \S")
_PROBE_SECONDS = 60.0
_PROBE = """
import importlib.util, json, sys
print(json.dumps([name for name in ("vllm", "kvtier") if importlib.util.find_spec(name) is None]))
"""


class EngineFailed(KVTierError):
    """An engine that had started died, or did not answer: a check that does not hold."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said to one prompt, how soon, and how much of the prompt it had already."""

    tokens: tuple[int, ...]
    # At each place the likeliest tokens with their logprobs, the likeliest first.
    likely: tuple[tuple[tuple[int, float], ...], ...]
    hit_tokens: int
    first_seconds: float
    finish: str = "length"


class TrialEngine(Protocol):
    """An engine that runs; `facts` are those of `kvtier.connector.vllm.trial`."""

    facts: dict[str, Any]

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, together: bool = False
    ) -> tuple[list[Answer], float]:
        """The answers, one prompt after the other or all together, and the seconds of it all."""

    def begin(self, prompt: Sequence[int], tokens: int) -> None:
        """Start on one prompt and return at once; `finish` follows."""

    def finish(self) -> tuple[list[Answer], float]:
        """What `begin` has begun. Raises EngineFailed."""

    def counts(self) -> dict[str, float]:
        """vLLM's and kvtier's metrics, by name, summed over labels."""


@dataclass(slots=True)
class EngineStarter:
    """Starts the user's vLLM; `arguments` are those of its command line."""

    python: str
    arguments: list[str]
    start_seconds: float
    environment: Mapping[str, str]

    def check(self) -> None:
        """Raises Unavailable when vLLM or kvtier is not there."""
        try:
            done = subprocess.run(
                [self.python, "-c", _PROBE],
                check=False,
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                env=dict(self.environment),
            )
            missing = json.loads(done.stdout) if done.returncode == 0 else None
        except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            raise Unavailable(f"{self.python} does not run as Python: {error}") from error
        if missing is None:
            raise Unavailable(f"{self.python} does not run as Python: {done.stderr.strip()[-300:]}")
        if "vllm" in missing:
            raise Unavailable(
                f"vLLM is not installed for {self.python}: name the Python of your vLLM with"
                " --python"
            )
        if "kvtier" in missing:
            raise Unavailable(
                f"kvtier is not installed beside vLLM: run `{self.python} -m pip install kvtier`"
            )

    @contextmanager
    def __call__(self, transfer: Mapping[str, Any] | None) -> Iterator[TrialEngine]:
        """Ready when entered, gone with all its processes when left. Raises Unavailable."""
        number, name = tempfile.mkstemp(prefix="kvtier-selftest-", suffix=".log")
        engine = EngineProcess(*self._spawn(number), Path(name))
        try:
            order = {"arguments": self.arguments, "transfer": transfer}
            try:
                engine.facts = engine.ask(order, self.start_seconds)
            except EngineFailed as error:
                who = "vLLM" if transfer is None else "vLLM with kvtier"
                raise Unavailable(f"{who} did not start: {error}") from error
            yield engine
        except BaseException:  # Ctrl-C too: nobody waits for an answer then.
            engine.kill()
            raise
        finally:
            engine.end()

    def _spawn(self, log_number: int) -> tuple[subprocess.Popen[str], IO[bytes]]:
        ours, theirs = os.pipe()
        command = [self.python, "-m", "kvtier.connector.vllm.trial", str(theirs)]
        with os.fdopen(log_number, "w") as out:
            # Its own session: ctrl-C goes to us alone, and its children are ended with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                pass_fds=(theirs,),
                env=dict(self.environment),
                start_new_session=True,
            )
        os.close(theirs)
        return process, os.fdopen(ours, "rb", buffering=0)


class EngineProcess:
    """Orders and answers, one line each, every one within a bound.

    vLLM's log is removed at the end, unless something failed.
    """

    def __init__(self, process: subprocess.Popen[str], answers: IO[bytes], log: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._process = process
        self._answers = answers
        self._log = log
        self._rest = b""
        self._has_failed = False

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, together: bool = False
    ) -> tuple[list[Answer], float]:
        self._order(_generate(prompts, tokens, together))
        return self.finish()

    def begin(self, prompt: Sequence[int], tokens: int) -> None:
        self._order(_generate([prompt], tokens, False))

    def finish(self) -> tuple[list[Answer], float]:
        answer = self._answer(ANSWER_SECONDS)
        return [parsed(one) for one in answer["answers"]], float(answer["seconds"])

    def counts(self) -> dict[str, float]:
        found: dict[str, float] = self.ask({"do": "counts"}, ANSWER_SECONDS)["counts"]
        return found

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self._order(order)
        return self._answer(seconds)

    def end(self) -> None:
        """Its input ends, and so should it; what is left of its session is killed."""
        assert self._process.stdin is not None, "a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()
        self._answers.close()
        if not self._has_failed:
            self._log.unlink(missing_ok=True)

    def kill(self) -> None:
        """It and all its processes, at once; nothing happens to those that are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("it has ended") from None

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._failed(f"no answer within {seconds:g} s")
            part = self._answers.read(1 << 16)
            if not part:
                raise self._failed("it has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, what: str) -> EngineFailed:
        self._has_failed = True
        reason = reason_in(self._log.read_text(errors="replace"))
        return EngineFailed(f"{what}\n{reason}\nvLLM's whole log: {self._log}")


def reason_in(log: str) -> str:
    """What of vLLM's log tells why: our own error; else the first one, and the log's end."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    own = [line for line in errors if "kvtier: " in line]
    found = own[-1:] or list(dict.fromkeys([*errors[:1], *lines[-_LOG_LINES:]]))
    return "\n".join(f"  | {line[-400:]}" for line in found)


def _generate(prompts: Sequence[Sequence[int]], tokens: int, together: bool) -> dict[str, Any]:
    return {
        "do": "generate",
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "together": together,
    }


def parsed(one: Mapping[str, Any]) -> Answer:
    """One answer as it came in JSON."""
    likely = tuple(tuple((int(t), float(p)) for t, p in place) for place in one["likely"])
    return Answer(
        tuple(one["tokens"]), likely, one["hit_tokens"], one["first_seconds"], one["finish"]
    )
