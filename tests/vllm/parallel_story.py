"""Two tensor-parallel ranks through restarts and kills; a program, run by `test_parallel.py`.

python -m tests.vllm.parallel_story MODEL FOLDER KILLS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.nvme_daemon import make_pool, running_nvme_daemon, wait_metric
from tests.vllm.engines import Generated, prompt_of
from tests.vllm.identity import differing
from tests.vllm.parallel_engine import parallel_engine

STORED = [prompt_of(100), prompt_of(100, seed=1, shared=64), prompt_of(170, seed=2)]
STORED_BLOCKS = 3 + 1 + 5  # Two are shared.
STARTED_AT = time.monotonic()


def cut_short(number: int) -> list[list[int]]:
    """Prompts of one engine that is killed; the first ones are computed by others as well."""
    return [prompt_of(200, seed=100 * number + seed) for seed in range(3)]


def say(text: str) -> None:
    sys.stdout.write(f"{time.monotonic() - STARTED_AT:6.1f} s {text}\n")
    sys.stdout.flush()


def check_same(wanted: Sequence[Generated], said: Sequence[Generated], what: str) -> None:
    found = differing(wanted, said)
    assert found == [], f"{what}: requests {found} said something else"
    say(f"{what}: {len(said)} answers as without kvtier")


def main(model: Path, folder: Path, kills: int) -> None:
    killed = [cut_short(number) for number in range(1, kills + 1)]
    everything = [*STORED, *(prompt for prompts in killed for prompt in prompts)]
    with parallel_engine(model, None, ranks=1) as engine:
        alone = engine.generate(everything)
    say("one rank without kvtier")
    make_pool(folder / "pool")
    with running_nvme_daemon(folder / "pool") as daemon:
        with parallel_engine(model, daemon.socket) as engine:
            check_same(alone[:3], engine.generate(STORED), "two ranks, nothing there")
            engine.settle()
            wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', STORED_BLOCKS)
            engine.kill_rank_in_mid_store(1, killed[0])
        say("rank 1 was killed in mid-store")
        with parallel_engine(model, daemon.socket) as engine:
            said = engine.generate(everything[:6])
            check_same(alone[:6], said, "engine started again")
            assert [one.cached_count for one in said[:3]] == [96, 96, 160]
            assert engine.onboarded().get("dram", 0) >= STORED_BLOCKS, engine.onboarded()
            engine.settle()
            assert engine.left_behind() == []
            wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', STORED_BLOCKS + 18)
            time.sleep(0.5)  # The slot table is written every 0.05 s.
            daemon.restart()
            engine.forget_own_cache()
            before = engine.onboarded().get("nvme", 0)
            deadline = time.monotonic() + 30.0
            while engine.onboarded().get("nvme", 0) < before + STORED_BLOCKS:
                assert time.monotonic() < deadline, engine.onboarded()
                engine.forget_own_cache()
                said = engine.generate(STORED)
            check_same(alone[:3], said, "daemon started again")
            for number in range(1, kills):
                engine.settle()
                engine.kill_rank_in_mid_store(0, killed[number])
                say("rank 0 was killed in mid-store")
        if kills > 1:
            with parallel_engine(model, daemon.socket) as engine:
                check_same(alone, engine.generate(everything), "engine started once more")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
