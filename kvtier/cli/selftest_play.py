"""What `kvtier selftest vllm` does: engines without and with kvtier, in turns, on one daemon.

    without   cold prompts, the same again (vLLM's own hits), loads of misses
    with      the same prompts for the first time: offloaded; later engines: hits; loads of misses
    …         once a round, then one more engine with kvtier, under which the daemon is killed

One engine at a time: two would not fit on one device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvtier.cli.output import say
from kvtier.cli.selftest_engine import Answer, EngineFailed, TrialEngine
from kvtier.cli.selftest_judge import Killed, Seen
from kvtier.clock import Clock, SystemClock
from kvtier.errors import ConfigError

# In /metrics these have `_total` behind them.
OFFLOADED = "vllm:kvtier_offloaded_blocks"
ONBOARDED = "vllm:kvtier_onboarded_blocks"
MISSED_BY = 'vllm:kvtier_missed_requests{reason="'
# How long an engine may take to meet the daemon, and to hand over what it computed. A new session
# waits for memory that the daemon has to populate.
MEET_SECONDS = 60.0
SETTLE_SECONDS = 30.0
QUIET_SECONDS = 1.0  # With nothing offloaded: it has all been.
LOADS_PER_ENGINE = 3
_POLL_SECONDS = 0.1
_KILL_AFTER_SECONDS = 0.02  # Into an answer.
# Tokens that a vocabulary has for other things often lie at its ends.
_TOKEN_MIN, _TOKEN_MAX = 16, 20_000
# No prompt has as many blocks as this has tokens: any block size leaves an unfinished block.
_ODD_TOKENS = 7
_UNIT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PlayOptions:
    tokens: int
    prompt_count: int
    output_tokens: int
    rounds: int
    request_count: int
    seed: int

    @property
    def prompt_tokens(self) -> int:
        """Never a whole number of blocks, or vLLM would compute the last one again."""
        return self.tokens // _UNIT_TOKENS * _UNIT_TOKENS - _UNIT_TOKENS + _ODD_TOKENS

    @property
    def load_tokens(self) -> int:
        """Of each prompt of a load."""
        return max(_UNIT_TOKENS, self.tokens // 4)


class Killable(Protocol):
    """A daemon of our own; started again it need not know what it held."""

    def kill(self) -> None: ...

    def start(self) -> None: ...


EngineFactory = Callable[[bool], AbstractContextManager[TrialEngine]]


class Play:
    """`engine_of(with_kvtier)` starts an engine; `daemon` is None where it may not be killed."""

    def __init__(
        self,
        options: PlayOptions,
        engine_of: EngineFactory,
        daemon: Killable | None,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seen = Seen(prompt_tokens=options.prompt_tokens)
        self._options = options
        self._engine_of = engine_of
        self._daemon = daemon
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._rng = random.Random(options.seed)
        self._vocabulary = 0
        self._prompts: list[list[int]] = []
        self._victim: list[int] = []  # The prompt the daemon is killed under.

    def run(self) -> Seen:
        """Raises Unavailable when an engine does not start; one that fails later is seen."""
        try:
            for number in range(self._options.rounds):
                self.round(number)
            self.last_engine()
        except EngineFailed as error:
            self.seen.failure = str(error)
        return self.seen

    def round(self, number: int) -> None:
        loads: list[list[list[int]]] = []
        say(f"round {number + 1} of {self._options.rounds}: vLLM without kvtier")
        with self._engine_of(False) as engine:
            if number == 0:
                self._learn(engine)
            loads = [self._load() for _ in range(LOADS_PER_ENGINE)]
            self._heat(engine)
            if number == 0:
                self._reference(engine)
            without = self._measure(engine, loads)
        say(f"round {number + 1} of {self._options.rounds}: vLLM with kvtier")
        with self._engine_of(True) as engine:
            self._meet(engine)
            self._heat(engine)
            if number == 0:
                self.seen.filled = self._ask(engine)
                self._settle(engine)
            else:
                self._take_warm(engine)
            self.seen.loads.append((without, self._measure(engine, loads)))
            self.seen.counts = engine.counts()

    def last_engine(self, *, may_kill: bool = True) -> None:
        """Hits once more; and then, if it is ours, the end of the daemon."""
        say("vLLM with kvtier, started again")
        with self._engine_of(True) as engine:
            self._meet(engine)
            self._heat(engine)
            self._take_warm(engine)
            self.seen.counts = engine.counts()
            if may_kill and self._daemon is not None and self.seen.killed is not None:
                self._kill(engine, self._daemon, self.seen.killed)

    # --------------------------------------------------------------------------- parts

    def _learn(self, engine: TrialEngine) -> None:
        """What the first engine is decides what it can be asked."""
        options, facts = self._options, engine.facts
        longest = options.prompt_tokens + options.output_tokens
        if longest > facts["model_tokens_max"]:
            raise ConfigError(
                f"--tokens {options.tokens} with --output-tokens {options.output_tokens} do not"
                f" fit into the engine's {facts['model_tokens_max']}: ask for fewer, or give"
                " --vllm-arg=--max-model-len"
            )
        self.seen.facts = dict(facts)
        self.seen.block_tokens = int(facts["block_tokens"])
        if self.seen.full_tokens == 0:
            raise ConfigError(
                f"--tokens {options.tokens}: a block has {facts['block_tokens']} tokens, and no"
                " prompt would fill one; ask for more"
            )
        self._vocabulary = int(facts["vocabulary"])
        self._prompts = [self._prompt() for _ in range(options.prompt_count)]
        self._victim = self._prompt()

    def _prompt(self, tokens: int = 0) -> list[int]:
        """Never seen before, from its first token on."""
        least = min(_TOKEN_MIN, self._vocabulary // 4)
        most = min(_TOKEN_MAX, self._vocabulary - 1)
        count = tokens or self._options.prompt_tokens
        return [self._rng.randint(least, most) for _ in range(count)]

    def _load(self) -> list[list[int]]:
        return [self._prompt(self._options.load_tokens) for _ in range(self._options.request_count)]

    def _ask(self, engine: TrialEngine) -> list[Answer]:
        return engine.generate(self._prompts, self._options.output_tokens)[0]

    def _heat(self, engine: TrialEngine) -> None:
        """What only first requests pay: compiling, allocating, capturing."""
        engine.generate([self._prompt()], self._options.output_tokens)
        engine.generate(self._load(), self._options.output_tokens, together=True)

    def _reference(self, engine: TrialEngine) -> None:
        self.seen.cold = self._ask(engine)
        self.seen.local = self._ask(engine)
        answers, seconds = engine.generate([self._victim], self._options.output_tokens)
        if self._daemon is not None:
            self.seen.killed = Killed(answers[0], seconds)

    def _take_warm(self, engine: TrialEngine) -> None:
        before = engine.counts()
        self.seen.warm.append(self._ask(engine))
        more = {k: n - before.get(k, 0.0) for k, n in engine.counts().items()}
        self.seen.onboarded_blocks.append(more.get(ONBOARDED, 0.0))
        for key, count in more.items():
            if count and key.startswith(MISSED_BY):
                reason = key.removeprefix(MISSED_BY).rstrip('"}')
                self.seen.missed[reason] = self.seen.missed.get(reason, 0) + round(count)

    def _measure(self, engine: TrialEngine, loads: list[list[list[int]]]) -> list[float]:
        tokens = self._options.output_tokens
        return [engine.generate(load, tokens, together=True)[1] for load in loads]

    def _meet(self, engine: TrialEngine) -> None:
        """Until something of the engine's has arrived in the daemon: both sides are there."""
        if not self._is_offloading(engine, MEET_SECONDS):
            raise EngineFailed(
                f"nothing of vLLM's arrived in the daemon within {MEET_SECONDS:g} s: can its"
                " processes open the daemon's socket, and has the daemon memory left?"
                " `kvtier stats` shows both"
            )

    def _is_offloading(self, engine: TrialEngine, seconds: float) -> bool:
        before = engine.counts().get(OFFLOADED, 0.0)
        deadline = self._clock.now() + seconds
        while engine.counts().get(OFFLOADED, 0.0) <= before:
            if self._clock.now() > deadline:
                return False
            engine.generate([self._prompt(2 * self.seen.block_tokens + 1)], 2)
            self._sleep(_POLL_SECONDS)
        return True

    def _settle(self, engine: TrialEngine) -> None:
        """Until nothing more is offloaded; short requests make the engine step."""
        started = moved = self._clock.now()
        last = -1.0
        while self._clock.now() < min(moved + QUIET_SECONDS, started + SETTLE_SECONDS):
            engine.generate([self._prompt(8)], 1)
            count = engine.counts().get(OFFLOADED, 0.0)
            if count != last:
                last, moved = count, self._clock.now()
            self._sleep(_POLL_SECONDS)

    def _kill(self, engine: TrialEngine, daemon: Killable, killed: Killed) -> None:
        say("kill -9 of the daemon, under an answer")
        engine.begin(self._victim, self._options.output_tokens)
        self._sleep(_KILL_AFTER_SECONDS)
        daemon.kill()
        killed.was_killed = True
        answers, killed.during_seconds = engine.finish()
        killed.during = answers[0]
        engine.generate([self._prompt()], self._options.output_tokens)  # With nobody there.
        say("the daemon is started again")
        daemon.start()
        killed.is_offloading_again = self._is_offloading(engine, MEET_SECONDS)
