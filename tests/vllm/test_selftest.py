"""`kvtier selftest vllm` on real engines: what it sees, and that it sees wrong KV."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.distributed import cleanup_dist_env_and_memory

from kvtier.cli.selftest import transfer_of
from kvtier.cli.selftest_engine import EngineStarter
from kvtier.cli.selftest_judge import Limits, judge
from kvtier.cli.selftest_play import Play, PlayOptions
from kvtier.connector.vllm.trial import TrialEngine
from tests.support.daemon import RunningDaemon
from tests.support.fake_trial import EngineHere
from tests.vllm.versions import needs_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

# On cores that others use as well only what is right counts, not what is fast.
LIMITS = Limits(warm_ratio_max=100.0, overhead_max=100.0)
OPTIONS = PlayOptions(
    tokens=256, prompt_count=4, output_tokens=16, rounds=1, request_count=4, seed=11
)


def arguments_of(model: Path) -> list[str]:
    return (
        f"--model {model} --enforce-eager --block-size 32 --max-model-len 512 --dtype bfloat16"
        f" --max-num-seqs 4 --kv-cache-memory-bytes {32 << 20}"
    ).split()


class Engines:
    """Real ones, without kvtier or with it."""

    def __init__(self, model: Path, daemon: RunningDaemon) -> None:
        self._arguments = arguments_of(model)
        # A machine that is busy with other tests must not turn hits into misses.
        self._transfer = transfer_of(daemon.socket, {"kvtier.onboard_wait_seconds": 2.0})

    @contextmanager
    def __call__(self, with_kvtier: bool) -> Iterator[EngineHere]:
        transfer: dict[str, Any] | None = self._transfer if with_kvtier else None
        engine = TrialEngine({"arguments": self._arguments, "transfer": transfer})
        try:
            yield EngineHere(engine)
        finally:
            engine.close()
            cleanup_dist_env_and_memory()


def scribble_over_all_slabs(pid: int) -> int:
    """Other KV in every block the daemon holds in memory; how many slabs were found."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        name = os.readlink(link)
        if "memfd:" not in name or "slab" not in name:
            continue
        found += 1
        values = np.memmap(link, dtype=np.uint16, mode="r+")
        values[:] = np.roll(values, 1111)
    return found


@needs_engine
def test_all_checks_hold_and_wrong_kv_in_the_daemons_memory_is_seen(
    tiny_llama: Path, daemon: RunningDaemon
) -> None:
    play = Play(OPTIONS, Engines(tiny_llama, daemon), daemon)
    play.round(0)
    play.last_engine(may_kill=False)
    assert {
        v.name: v.detail
        for v in judge(play.seen, LIMITS)
        if v.holds is False and v.name != "restart"
    } == {}
    assert scribble_over_all_slabs(daemon.process.pid) > 0
    play.last_engine()
    verdicts = {verdict.name: verdict for verdict in judge(play.seen, LIMITS)}
    holding = {name for name, verdict in verdicts.items() if verdict.holds}
    assert holding == {"hits", "warm", "overhead", "restart"}, verdicts
    assert "prompts differ" in verdicts["tokens"].detail


@needs_engine
def test_engine_in_a_process_of_its_own_answers_as_asked(
    tiny_llama: Path,
) -> None:
    starter = EngineStarter(sys.executable, arguments_of(tiny_llama), 120.0, os.environ)
    starter.check()
    with starter(None) as engine:
        first, _ = engine.generate([[5] * 40], 4)
        engine.begin([5] * 40, 4)
        again, seconds = engine.finish()
        assert again[0].tokens == first[0].tokens
        assert (first[0].hit_tokens, again[0].hit_tokens) == (0, 32)
        assert 0 < again[0].first_seconds < seconds
