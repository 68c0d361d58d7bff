"""What happens in the demo, in which order.

    turns 1, 2   engine A beside a daemon, engine C alone; then A exits
    turn 3       engine B, a new process, beside the same daemon; engine D, a new process, alone
    turn 4       engine B answers, and the daemon is killed in the middle; then B exits
    turn 5       the daemon is started again; engine E beside it, engine F alone, both new processes

The engines without kvtier run the same code in processes as fresh and as warm, one engine computing
at a time. C stays up: what it answers from its own cache is what B's answers must be equal to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise

from kvtier.cli import environment
from kvtier.cli.connect import connected
from kvtier.cli.private_daemon import DIRECTORY, PrivateDaemon, private_daemon
from kvtier.demo.engines import EngineProcess, Reply, TokenHandler, started_engine
from kvtier.demo.handbook import HANDBOOK, QUESTIONS
from kvtier.demo.report import ByteCheck, Kill, Parting, Report, TokenCheck, Turn, WarmStart
from kvtier.engine.files.tokenizer import ChatMessage, render_chat
from kvtier.errors import Unavailable

MODEL = "SmolLM2-135M-Instruct, float32"
BLOCK_TOKENS = 16
TOKENS_MAX = 40
KILL_TOKENS_MAX = 48
KILL_AFTER_TOKENS = 16
RESTART_INDEX = 2  # Turns before it are A's.
KILL_INDEX = 3
WARM_INDEX = 4
DAEMON_OPTIONS = {
    "dram.bytes": "512MiB",
    "dram.slab_bytes": "64MiB",
    "nvme.paths": f"{DIRECTORY}/nvme",
    "nvme.bytes": "512MiB",
    # Everything is written down: a demo wears no disk out.
    "nvme.write_bytes_per_hour": "1TiB",
}
# How long the prefix has stood on NVMe before the daemon is killed, and the wait for it.
STANDING_SECONDS = 2.0
STANDING_SECONDS_MAX = 60.0
_END_OF_TURN = "<|im_end|>"

Say = Callable[[str], None]


@dataclass(slots=True)
class Chat:
    """The conversation so far; every engine is asked with the same tokens."""

    history: Sequence[int] = ()
    is_ended: bool = True

    def next_text(self, question: str) -> str:
        """What comes after the history: the question in the model's chat template."""
        user = ChatMessage("user", question)
        if not self.history:
            return render_chat([ChatMessage("system", HANDBOOK), user])
        # Without a system message render_chat puts in its own: leave out all before the question.
        rendered = render_chat([ChatMessage("system", ""), user])
        turn = rendered[rendered.index("<|im_start|>user") :]
        return ("" if self.is_ended else _END_OF_TURN) + "\n" + turn

    def go_on(self, reply: Reply) -> None:
        self.history, self.is_ended = reply.history, reply.is_ended


class Play:
    """One performance; `turns` grows as it goes."""

    def __init__(self, daemon: PrivateDaemon, stack: ExitStack, say: Say) -> None:
        self._daemon = daemon
        self._stack = stack
        self._say = say
        self._chat = Chat()
        self.turns: list[Turn] = []

    def start(self, with_kvtier: str, without: str) -> tuple[EngineProcess, EngineProcess]:
        """Two fresh processes, loaded and warmed up: one beside the daemon, one alone."""
        self._say(f"engines {with_kvtier} and {without} load the model and warm up ...")
        sockets = {with_kvtier: self._daemon.socket, without: None}
        pair = [
            self._stack.enter_context(started_engine(name, socket))
            for name, socket in sockets.items()
        ]
        for engine in pair:
            engine.wait_ready()
        return pair[0], pair[1]

    def turn(self, with_kvtier: EngineProcess, without: EngineProcess) -> tuple[Reply, Reply]:
        """The next question to both, one after the other; the first one changes every turn."""
        number = len(self.turns)
        engines = [with_kvtier, without] if number % 2 == 0 else [without, with_kvtier]
        replies = {engine: self.ask(engine) for engine in engines}
        self.note_turn(replies[with_kvtier], replies[without])
        return replies[with_kvtier], replies[without]

    def ask(
        self,
        engine: EngineProcess,
        *,
        tokens_max: int = TOKENS_MAX,
        on_token: TokenHandler = lambda _: None,
    ) -> Reply:
        number = len(self.turns)
        text = self._chat.next_text(QUESTIONS[number])
        reply = engine.ask(self._chat.history, text, tokens_max=tokens_max, on_token=on_token)
        ttft, seconds = reply.answer.ttft_seconds, reply.answer.seconds
        self._say(
            f"turn {number + 1}, engine {engine.name}: first token after {ttft:5.2f} s, "
            f"{len(reply.answer.token_ids)} tokens in {seconds:.1f} s"
        )
        return reply

    def note_turn(self, with_kvtier: Reply, without: Reply) -> None:
        """The chat goes on with kvtier's answer, whatever the other one said."""
        self.turns.append(Turn(QUESTIONS[len(self.turns)], with_kvtier.answer, without.answer))
        self._chat.go_on(with_kvtier)

    def kill_turn(self, with_kvtier: EngineProcess, without: EngineProcess) -> Kill:
        """The next question; the daemon is killed while the answer streams."""
        connected_before = self.turns[-1].with_kvtier.connected

        def on_token(count: int) -> None:
            if count == KILL_AFTER_TOKENS:
                os.kill(self._daemon.pid, signal.SIGKILL)
                self._say(f"kill -9: the daemon is gone, engine {with_kvtier.name} is answering")

        without_reply = self.ask(without, tokens_max=KILL_TOKENS_MAX)
        reply = self.ask(with_kvtier, tokens_max=KILL_TOKENS_MAX, on_token=on_token)
        self.note_turn(reply, without_reply)
        times = reply.token_times[KILL_AFTER_TOKENS - 1 :]
        return Kill(
            after_token_count=min(KILL_AFTER_TOKENS, len(reply.token_times)),
            token_count=len(reply.token_times),
            connected_before=connected_before,
            longest_pause_seconds=max((b - a for a, b in pairwise(times)), default=0.0),
        )

    def wait_standing(self) -> None:
        """Until every resident block is on NVMe, and for a while after that."""
        with connected(self._daemon.socket, name="kvtier demo") as client:
            deadline = time.monotonic() + STANDING_SECONDS_MAX
            while True:  # Ends at the deadline.
                stats = client.stats()
                standing_count = sum(t.ready_count for t in stats.tiers if t.tier == "nvme")
                if standing_count >= sum(one.block_count for one in stats.namespaces) > 0:
                    break
                if time.monotonic() > deadline:
                    raise Unavailable(f"not all blocks are on NVMe after {STANDING_SECONDS_MAX} s")
                time.sleep(0.05)
        self._say(f"all {standing_count} blocks are on NVMe")
        time.sleep(STANDING_SECONDS)

    def warm_start(self, former: Sequence[int], checksums: dict[str, str]) -> WarmStart:
        """The daemon again, after its kill; `former` are the tokens whose blocks stood on NVMe."""
        self._daemon.kill()  # It is; this one waits until it is gone.
        self._daemon.start()
        self._say(f"the daemon is started again, ready after {self._daemon.start_seconds:.2f} s")
        fresh, cold = self.start("E", "F")
        hit, cold_reply = self.turn(fresh, cold)
        parting = _parting(hit, cold_reply, cold)
        checks = _compare(checksums, fresh.checksums(former), hit.answer.kvtier_count)
        return WarmStart(WARM_INDEX, len(checksums), checks, parting, self._daemon.start_seconds)


def perform(say: Say) -> Report:
    """The whole demo, some 80 seconds on two idle cores. Leaves no process and no file behind."""
    started = time.monotonic()
    with ExitStack() as stack:
        say("the daemon starts ...")
        daemon = stack.enter_context(private_daemon(DAEMON_OPTIONS))
        start_seconds = daemon.start_seconds
        play = Play(daemon, stack, say)
        first, steady = play.start("A", "C")
        document_token_count = first.document_token_count
        for _ in range(RESTART_INDEX):
            last, _ = play.turn(first, steady)
        offloaded = first.checksums(last.history)
        say("engine A exits")
        first.leave()

        second, cold = play.start("B", "D")
        local_hit = play.ask(steady)
        hit, cold_reply = play.turn(second, cold)
        tokens = TokenCheck(local_hit.answer, _parting(hit, cold_reply, cold))
        check = _compare(offloaded, second.checksums(last.history), hit.answer.kvtier_count)
        cold.leave()
        standing = second.checksums(hit.history)
        play.wait_standing()
        kill = play.kill_turn(second, steady)
        second.leave()
        warm = play.warm_start(hit.history, standing)
    return Report(
        document_token_count=document_token_count,
        block_tokens=BLOCK_TOKENS,
        turns=tuple(play.turns),
        restart_index=RESTART_INDEX,
        kill_index=KILL_INDEX,
        tokens=tokens,
        bytes=check,
        kill=kill,
        warm=warm,
        daemon_start_seconds=start_seconds,
        seconds=time.monotonic() - started,
        model=MODEL,
        environment={**environment.describe(), "torch": metadata.version("torch")},
    )


def _parting(hit: Reply, other: Reply, engine: EngineProcess) -> Parting | None:
    """Where the answers part; `engine` says how near the two tokens were."""
    ours, theirs = hit.answer.token_ids, other.answer.token_ids
    for index, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if one != two:
            context = hit.history[: hit.answer.prompt_count + index]
            return Parting(index, engine.logit_gap(context, (one, two)))
    return None


def _compare(offloaded: dict[str, str], onboarded: dict[str, str], kvtier_count: int) -> ByteCheck:
    """Of the blocks that came out of kvtier, those whose bytes are the ones that went in."""
    names = list(onboarded)[: kvtier_count // BLOCK_TOKENS]
    equal_count = sum(onboarded[name] == offloaded.get(name) for name in names)
    return ByteCheck(onboarded_count=len(names), equal_count=equal_count)
