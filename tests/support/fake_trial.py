"""An engine for `kvtier selftest` that is none: its tokens follow from the prompt, its times too.

`python tests/support/fake_trial.py …` stands in for vLLM's Python: it takes the words that
`EngineStarter` gives, and speaks for `kvtier.connector.vllm.trial`. What kvtier holds is a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.cli.selftest_engine import Answer, EngineFailed, parsed

BLOCK_TOKENS = 32
TOKEN_SECONDS = 0.001  # Of prefill.
COUNTS = {"vllm:kvtier_offloaded_blocks": 0.0, "vllm:kvtier_onboarded_blocks": 0.0}


@dataclass
class Faults:
    """What goes wrong, and how near to each other the two likeliest tokens are where it shows."""

    wrong_after_hit: bool = False  # Tokens that wrong KV gives.
    own_hit_differs: bool = False  # From a cold prefill, whoever the hit is from.
    gap: float = 1.0
    forgets: bool = False
    slow_hits: bool = False
    slow_misses: bool = False
    deaf: bool = False  # Nothing is ever offloaded.
    dies: bool = False  # At the first prompt with kvtier.
    dies_with_daemon: bool = False
    hangs: bool = False


@dataclass
class Held:
    """The prompts in kvtier, whole; and what became of the daemon."""

    prompts: set[str] = field(default_factory=set)
    is_up: bool = True
    was_killed: bool = False

    def kill(self) -> None:
        self.is_up, self.was_killed = False, True
        self.prompts.clear()

    def start(self) -> None:
        self.is_up = True


class FakeEngine:
    """The same words as `kvtier.connector.vllm.trial.TrialEngine`."""

    def __init__(self, held: Held | None, faults: Faults) -> None:
        self._held = held
        self._faults = faults
        self._own: set[str] = set()
        self._counts = dict(COUNTS)

    def facts(self) -> dict[str, Any]:
        return {
            "vllm": "0.0", "device": "none", "block_tokens": BLOCK_TOKENS,
            "model_tokens_max": 4096, "vocabulary": 512,
        }  # fmt: skip

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if order["do"] == "counts":
            return {"counts": dict(self._counts)}
        answers = [self._answer(prompt, order["tokens"]) for prompt in order["prompts"]]
        slow = 1.5 if self._held is not None and self._faults.slow_misses else 1.0
        return {"answers": answers, "seconds": slow * sum(a["first_seconds"] for a in answers)}

    def _answer(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        name, held, faults = json.dumps(list(prompt)), self._held, self._faults
        if faults.hangs:
            time.sleep(600)
        blocks = len(prompt) // BLOCK_TOKENS
        is_own = name in self._own
        is_onboarded = held is not None and not is_own and name in held.prompts
        if held is not None and (faults.dies or (faults.dies_with_daemon and not held.is_up)):
            raise EngineFailed("it has ended")
        is_onboarded = is_onboarded and not faults.forgets
        hit_tokens = blocks * BLOCK_TOKENS if is_own or is_onboarded else 0
        self._own.add(name)
        if held is not None and blocks and not hit_tokens:
            missed = 'vllm:kvtier_missed_requests{reason="absent"}'
            self._counts[missed] = self._counts.get(missed, 0.0) + 1
        if held is not None and held.is_up and not faults.deaf:
            self._counts["vllm:kvtier_onboarded_blocks"] += blocks * is_onboarded
            self._counts["vllm:kvtier_offloaded_blocks"] += blocks * (name not in held.prompts)
            held.prompts.add(name)
        is_other = (faults.wrong_after_hit and is_onboarded) or (
            faults.own_hit_differs and hit_tokens > 0
        )
        seconds = TOKEN_SECONDS * (len(prompt) - hit_tokens)
        if is_onboarded and faults.slow_hits:
            seconds = TOKEN_SECONDS * len(prompt)
        tokens = tokens_of(name, count)
        likely = [[[token, -1.0], [0, -1.0 - faults.gap]] for token in tokens]
        return {
            "tokens": [*tokens[:1], *(0 for _ in tokens[1:])] if is_other else tokens,
            "likely": likely, "hit_tokens": hit_tokens, "first_seconds": seconds,
            "finish": "length",
        }  # fmt: skip


class EngineHere:
    """An engine of this process, as `Play` wants it."""

    def __init__(self, engine: Any) -> None:
        self.facts = engine.facts()
        self._engine = engine
        self._begun: tuple[Sequence[int], int] | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, together: bool = False
    ) -> tuple[list[Answer], float]:
        order = {"do": "generate", "prompts": prompts, "tokens": tokens, "together": together}
        answer = json.loads(json.dumps(self._engine.obey(order)))
        return [parsed(one) for one in answer["answers"]], answer["seconds"]

    def begin(self, prompt: Sequence[int], tokens: int) -> None:
        self._begun = prompt, tokens

    def finish(self) -> tuple[list[Answer], float]:
        assert self._begun is not None, "nothing was begun"
        return self.generate([self._begun[0]], self._begun[1])

    def counts(self) -> dict[str, float]:
        found: dict[str, float] = self._engine.obey({"do": "counts"})["counts"]
        return found


class FakeEngines:
    """The factory that `Play` is given."""

    def __init__(self, held: Held, faults: Faults) -> None:
        self.started: list[bool] = []
        self._held, self._faults = held, faults

    @contextmanager
    def __call__(self, with_kvtier: bool) -> Iterator[EngineHere]:
        self.started.append(with_kvtier)
        yield EngineHere(FakeEngine(self._held if with_kvtier else None, self._faults))


def tokens_of(name: str, count: int) -> list[int]:
    digest = hashlib.sha256(name.encode()).digest()
    return [1 + digest[place % len(digest)] for place in range(count)]


def main(words: list[str]) -> int:
    """Faults come as `--fake=NAME` among vLLM's arguments, and `--held=FILE` keeps the prompts."""
    if words[0] == "-c":
        sys.stdout.write(json.dumps(json.loads(os.environ.get("FAKE_MISSING", "[]"))))
        return 0
    with os.fdopen(int(words[2]), "w") as answers:
        order = json.loads(sys.stdin.readline())
        given = [word.partition("=")[2] for word in order["arguments"] if "--fake=" in word]
        [file] = [Path(word[7:]) for word in order["arguments"] if word.startswith("--held=")]
        held = None
        if order["transfer"] is not None:
            if "refuse" in given:
                sys.stderr.write("noise\nkvtier.errors.Unsupported: kvtier: KV on x: run without\n")
                return 1
            held = Held(set(json.loads(file.read_text())) if file.exists() else set())
        engine = FakeEngine(held, Faults(**{name: True for name in given if name != "refuse"}))
        _tell(answers, engine.facts())
        for line in sys.stdin:
            _tell(answers, engine.obey(json.loads(line)))
            if held is not None:
                file.write_text(json.dumps(sorted(held.prompts)))
    return 0


def _tell(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
