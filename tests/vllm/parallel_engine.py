"""A real engine of two tensor-parallel ranks, in processes of its own: for `parallel_story.py`.

Forked from a process that has imported vLLM and made nothing with it, so that whatever an engine
leaves behind ends with it. Its scheduler is in the forked process, each rank in a process below it.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.engines import Generated, VllmEngine, transfer_config, vllm_engine
from tests.vllm.half_copies import arm, is_stuck

CONTEXT = get_context("fork")
READY_SECONDS = 60.0
ANSWER_SECONDS = 240.0
DYING_SECONDS = 10.0


class ParallelEngine:
    """What a test asks of it; every method but `kill` waits."""

    def __init__(self, model: Path, socket: Path | None, ranks: int) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, model, socket, ranks))
        self._process.start()
        theirs.close()
        self.rank_pids: list[int] = self._answer()

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Generated]:
        return list(self._ask("generate", prompts))

    def settle(self) -> None:
        self._ask("settle")

    def forget_own_cache(self) -> None:
        self._ask("forget")

    def onboarded(self) -> dict[str, int]:
        return dict(self._ask("onboarded"))

    def left_behind(self) -> list[str]:
        return list(self._ask("left_behind"))

    def kill_rank_in_mid_store(self, rank: int, prompts: Sequence[Sequence[int]]) -> None:
        """SIGKILL, when half of a block of this rank's shard is written; that ends the engine."""
        arm(rank)
        self._pipe.send(("generate", prompts))
        deadline = time.monotonic() + ANSWER_SECONDS
        while not is_stuck(rank):
            assert time.monotonic() < deadline, "nothing was stored"
            time.sleep(0.005)
        time.sleep(0.3)  # The other rank copies on, and the scheduler hears of it.
        os.kill(self.rank_pids[rank], signal.SIGKILL)
        self._process.join(DYING_SECONDS)  # Then whoever started the engine ends it.
        self._end()

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("end", None))
            self._process.join(ANSWER_SECONDS)
        self._end()

    def _end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        for pid in self.rank_pids:
            _kill(pid)
        self._process.join(DYING_SECONDS)

    def _ask(self, verb: str, what: Any = None) -> Any:
        self._pipe.send((verb, what))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_SECONDS), "the engine does not answer"
        is_good, answer = self._pipe.recv()
        assert is_good, answer
        return answer


@contextmanager
def parallel_engine(model: Path, socket: Path | None, ranks: int = 2) -> Iterator[ParallelEngine]:
    engine = ParallelEngine(model, socket, ranks)
    try:
        yield engine
    finally:
        engine.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _serve(
    pipe: Connection,
    model: Path,
    socket: Path | None,
    ranks: int,
) -> None:
    """The engine's process. A dead rank ends it without further words, as it does a server."""
    transfer = None
    if socket is not None:
        waits = {"onboard_wait_seconds": 5.0, "nvme_wait_seconds_min": 5.0}
        transfer = transfer_config(socket, nvme_wait_seconds_max=20.0, **waits)
        transfer.kv_connector_module_path = "tests.vllm.half_copies"
    try:
        with vllm_engine(model, transfer, tensor_parallel_size=ranks) as engine:
            if socket is not None:
                _wait_ready(engine)
            executor = engine.core.model_executor
            pids = [one.proc.pid for one in getattr(executor, "workers", ())]
            pipe.send((True, pids))
            _answer_all(pipe, engine)
    except Exception:  # noqa: BLE001  Whatever it is, the test is told.
        pipe.send((False, traceback.format_exc()))
        os._exit(3)
    os._exit(0)


def _answer_all(pipe: Connection, engine: VllmEngine) -> None:
    verbs: dict[str, Callable[[Any], Any]] = {
        "generate": engine.generate,
        "settle": lambda _: engine.settle(),
        "forget": lambda _: engine.forget_own_cache(),
        "onboarded": lambda _: dict(engine.stats.onboarded_tier_blocks),
        "left_behind": lambda _: engine.left_behind(),
    }
    while True:
        verb, what = pipe.recv()
        if verb == "end":
            return
        pipe.send((True, verbs[verb](what)))


def _wait_ready(engine: VllmEngine) -> None:
    """Until there are slots for it: the daemon gives none before all ranks have mapped theirs."""
    deadline = time.monotonic() + READY_SECONDS
    assert engine.connector is not None
    while not engine.connector._scheduler._core.stock_count:
        assert time.monotonic() < deadline, "kvtier did not get ready"
        engine.generate([[5, 6, 7]], tokens=1)
        time.sleep(0.02)
