"""What paging saves: waste by allocator, sharing, batching and preemption, block sizes.

Everything but SmolLM2's answers is in virtual time, by the engine's own pool and scheduler on
seeded lengths: the figures say what the design does, not how fast a machine is. Progress goes to
standard error, one JSON object to standard output.

    python -m benchmarks.paging --json [--questions N]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kvtier.engine  # noqa: F401 - before torch, because it says how OpenMP threads wait
from benchmarks import paging_plot
from kvtier.engine.compared.allocators import (
    ContiguousAllocator,
    KvAllocator,
    Need,
    PagedAllocator,
    VirtualAllocator,
    exact,
    max_length,
    power_of_two,
)
from kvtier.engine.config import Batching, EngineConfig
from kvtier.policy.preemption import Preemption
from tests.support.virtual_engine import Costs, Run, VirtualEngine, VirtualTier, Work

CONTEXT_MAX = 2048
# Tokens of KV: what is left for OPT-13B beside its weights on 40 GB (12 GB at 800 KiB a token).
CAPACITY = 16_384
BLOCK_TOKENS = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEED = 9
# A step of 10 ms and 50 us a token, after the shape of a 13 B model on one GPU; a tier of 12 GB/s.
COSTS = Costs(step_seconds=10e-3, token_seconds=50e-6)
TOKEN_BYTES = 800 * 1024
TIER_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal, cut to a context of 2,048; the means are those of the paper's figure 11, the
    spreads are ours: its histograms are not published as numbers."""

    prompt_mean: float
    output_mean: float
    sigma: float

    def draw(self, rng: random.Random) -> Need:
        prompt = self._one(rng, self.prompt_mean, CONTEXT_MAX // 2)
        output = self._one(rng, self.output_mean, CONTEXT_MAX - prompt)
        return Need(prompt, prompt + output)

    def _one(self, rng: random.Random, mean: float, most: int) -> int:
        drawn = rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
        return min(most, max(1, round(drawn)))


LENGTHS = {
    "ShareGPT-like": Lengths(161.31, 337.99, 1.0),
    "Alpaca-like": Lengths(19.31, 58.45, 0.7),
}
ALLOCATORS: dict[str, Callable[[], KvAllocator]] = {
    "contiguous max-length": lambda: ContiguousAllocator(CAPACITY, max_length(CONTEXT_MAX)),
    "contiguous buddy": lambda: ContiguousAllocator(CAPACITY, power_of_two, is_buddy=True),
    "contiguous oracle": lambda: ContiguousAllocator(CAPACITY, exact),
    "virtual, 64 KiB pages": lambda: VirtualAllocator(CAPACITY, CONTEXT_MAX, token_bytes=512),
    "virtual, 2 MiB pages": lambda: VirtualAllocator(CAPACITY, CONTEXT_MAX, token_bytes=16),
    "paged, B = 16": lambda: PagedAllocator(CAPACITY, BLOCK_TOKENS),
}
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="print the figures; always so")
    parser.add_argument("--questions", type=int, default=4, help="to SmolLM2, up to 6; 0: none")
    args = parser.parse_args()
    began_at = time.monotonic()
    result: Result = {
        "capacity_tokens": CAPACITY,
        "context_max": CONTEXT_MAX,
        "lengths": {name: vars_of(lengths) for name, lengths in LENGTHS.items()},
        "waste": {name: study_waste(name) for name in LENGTHS},
        "sharing": study_sharing(),
        "throughput": study_throughput(),
        "block_sizes": study_block_sizes(),
    }
    if args.questions:
        result["sharing_model"] = study_model(args.questions)
    sharegpt = result["waste"]["ShareGPT-like"]
    result["targets"] = {
        "max_length_waste": target(
            sharegpt["contiguous max-length"]["wasted_share"], at_least=0.60
        ),
        "paged_waste": target(sharegpt["paged, B = 16"]["wasted_share"], at_most=0.04),
    }
    result["seconds"] = round(time.monotonic() - began_at, 1)
    result["cpu_seconds"] = round(time.process_time(), 1)
    print(json.dumps(result, indent=1))
    paging_plot.write(result)


def vars_of(lengths: Lengths) -> Result:
    return {name: getattr(lengths, name) for name in lengths.__slots__}


def target(value: float, **bound: float) -> Result:
    is_met = all(
        value >= limit if name == "at_least" else value <= limit for name, limit in bound.items()
    )
    return {"value": value, **bound, "met": is_met}


def study_waste(lengths_name: str, request_count: int = 600) -> Result:
    """Requests without end for a memory that is always wanted; every step counts alike."""
    figures: Result = {}
    for name, make in ALLOCATORS.items():
        say(f"waste: {lengths_name}, {name}")
        rng = random.Random(SEED)
        needs = [LENGTHS[lengths_name].draw(rng) for _ in range(request_count)]
        steps = list(play(make(), needs))
        figures[name] = {
            part: round(statistics.mean(step[part] for step in steps), 4)
            for part in ("wasted_share", "used", "reserved", "internal", "external", "running")
        }
    return figures


def play(allocator: KvAllocator, needs: Sequence[Need]) -> Iterator[dict[str, float]]:
    """First come, first served; where memory ends the latest gives way, and comes again. Ends when
    nobody waits: what follows is not a full memory any more."""
    waiting = dict(enumerate(needs))
    running: dict[int, int] = {}  # Tokens by request, in order of arrival.
    while waiting:
        for number, need in list(waiting.items()):
            if not allocator.admit(str(number), need):
                break
            del waiting[number]
            running[number] = need.prompt_count
        for number in list(running):
            if number not in running:
                continue
            while not allocator.append(str(number)):
                latest = list(running)[-1]
                allocator.release(str(latest))
                del running[latest]
                waiting = {latest: needs[latest], **waiting}
                if latest == number:
                    break
            else:
                running[number] += 1
        waste = allocator.waste(next(iter(waiting.values()), None))
        yield {
            "wasted_share": waste.wasted_share,
            "used": waste.used_count / CAPACITY,
            "reserved": waste.reserved_count / CAPACITY,
            "internal": waste.internal_count / CAPACITY,
            "external": waste.external_count / CAPACITY,
            "running": len(running),
        }
        for number in [n for n, count in running.items() if count >= needs[n].total_count]:
            allocator.release(str(number))
            del running[number]


def study_sharing() -> Result:
    """Blocks saved: 1 - held / what they would be if nothing were shared, over all steps."""
    figures: Result = {}
    for name, lengths in LENGTHS.items():
        say(f"sharing: samples, {name}")
        samples = {
            f"n = {count}": round(play_engine(works_of(lengths, 30, count)).shared_share, 4)
            for count in (2, 4, 6)
        }
        figures[name] = {"parallel sampling": samples}
    say("sharing: chats")
    figures["ShareGPT-like"]["chats of 4 turns, cached"] = study_chats()
    return figures


def study_model(question_count: int) -> Result:
    """The same where SmolLM2 answers, which decides how long beams stay together."""
    from benchmarks.paging_model import study

    return study(LENGTHS["Alpaca-like"], question_count, SEED, say)


def study_chats(chat_count: int = 40, turn_count: int = 4) -> Result:
    """Each turn's prompt is all that was said before: the share of prompt tokens found cached."""
    rng = random.Random(SEED)
    lengths = LENGTHS["ShareGPT-like"]
    works = []
    for chat in range(chat_count):
        said: list[int] = []
        for turn in range(turn_count):
            need = lengths.draw(rng)
            said += random_tokens(rng, min(need.prompt_count, 250))
            works.append(Work(10.0 * turn + 0.1 * chat, tuple(said), 1))
            said += random_tokens(rng, min(need.total_count - need.prompt_count, 250))
    config = EngineConfig(device_block_count=40_000 // BLOCK_TOKENS, step_tokens_max=4096)
    run = VirtualEngine(config, COSTS).run(works)
    prompt_count = sum(len(work.prompt) for work in works)
    return {"prompt tokens cached": round(1 - run.computed_count / prompt_count, 4)}


def study_throughput() -> Result:
    """Tokens a second of one memory: contiguous is paging with blocks of the longest context."""
    figures: Result = {}
    works = works_of(LENGTHS["ShareGPT-like"], 100, 1)
    for batching in Batching:
        for name, block_tokens, tier in (
            ("contiguous", CONTEXT_MAX, False),
            ("paged", BLOCK_TOKENS, False),
            ("paged + kvtier", BLOCK_TOKENS, True),
        ):
            say(f"throughput: {batching.value}, {name}")
            run = play_engine(works, block_tokens=block_tokens, has_tier=tier, batching=batching)
            figures[f"{batching.value}, {name}"] = figures_of(run)
    return figures


def study_block_sizes() -> Result:
    """The same for blocks of 1 to 256 tokens, preempted requests coming back either way."""
    figures: Result = {}
    works = works_of(LENGTHS["ShareGPT-like"], 60, 1)
    for block_tokens in BLOCK_SIZES:
        say(f"block size: {block_tokens}")
        figures[str(block_tokens)] = {
            mode.value: figures_of(
                play_engine(
                    works, CAPACITY // 2, block_tokens=block_tokens, has_tier=True, preemption=mode
                )
            )
            for mode in (Preemption.SWAP, Preemption.RECOMPUTE)
        }
    return figures


def play_engine(
    works: Sequence[Work],
    capacity: int = CAPACITY,
    *,
    block_tokens: int = BLOCK_TOKENS,
    has_tier: bool = False,
    batching: Batching = Batching.ITERATION,
    preemption: Preemption = Preemption.AUTO,
) -> Run:
    config = EngineConfig(
        device_block_count=capacity // block_tokens,
        block_tokens=block_tokens,
        step_tokens_max=2048,
        running_count_max=256,
        batching=batching,
        preemption=preemption,
    )
    tier = VirtualTier(TIER_BYTES_PER_SECOND / (TOKEN_BYTES * block_tokens)) if has_tier else None
    return VirtualEngine(config, COSTS, tier).run(works)


def works_of(lengths: Lengths, count: int, sample_count: int) -> list[Work]:
    """All there from the start."""
    rng = random.Random(SEED)
    needs = [lengths.draw(rng) for _ in range(count)]
    return [
        Work(
            0.0,
            tuple(random_tokens(rng, need.prompt_count)),
            min(need.total_count - need.prompt_count, CONTEXT_MAX // sample_count),
            sample_count,
        )
        for need in needs
    ]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(50_000), k=count)


def figures_of(run: Run) -> Result:
    return {
        "tokens_per_second": round(run.token_count / run.seconds, 1),
        "running": round(run.batch_sum / run.step_count, 1),
        "preempted": run.preempted_count,
        "computed_per_token": round(run.computed_count / run.token_count, 2),
        "tail_share": round(run.tail_share, 4),
        "token_latency_s": round(statistics.mean(run.latencies), 4),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
