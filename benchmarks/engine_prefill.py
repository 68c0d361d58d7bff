"""How fast the reference engine prefills, beside transformers on the same weights.

Prints one JSON object. Rounds of both are interleaved, so that a machine shared with others treats
them alike; a round's ratio is transformers' seconds over the engine's, and the median is reported.
Also the time to first token of a prompt that is all but `--fresh` tokens cached, against cold.

    python -m benchmarks.engine_prefill [--tokens 1000] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import kvtier.engine  # noqa: F401 - before torch, because it says how OpenMP threads wait

# isort: split
import torch
from transformers import LlamaForCausalLM

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.smollm2 import load_smollm2
from kvtier.engine.model import LlamaModel
from tests.support.transformers_twin import to_transformers

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--ttft-tokens", type=int, default=1500)
    parser.add_argument("--fresh", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    load_seconds, (model, _) = timed(load_smollm2)
    engine = Engine(model, EngineConfig(device_block_count=256))
    prompt = random_prompt(model, args.tokens, seed=1)
    prefills = compare_prefills(engine, to_transformers(model), prompt, args.rounds)
    cold, cached = compare_ttfts(engine, args.ttft_tokens, args.fresh, args.rounds)
    report = {
        "model": model.name,
        "dtype": str(model.weights.embedding.dtype),
        "threads": args.threads,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "load_s": round(load_seconds, 2),
        "prefill_tokens": args.tokens,
        "engine_s": round(statistics.median(ours for ours, _ in prefills), 3),
        "transformers_s": round(statistics.median(theirs for _, theirs in prefills), 3),
        "prefill_ratio": round(statistics.median(theirs / ours for ours, theirs in prefills), 3),
        "ttft_tokens": args.ttft_tokens,
        "ttft_fresh_tokens": args.fresh,
        "ttft_cold_s": round(cold, 3),
        "ttft_cached_s": round(cached, 3),
        "ttft_ratio": round(cached / cold, 3),
    }
    print(json.dumps(report))


def compare_prefills(
    engine: Engine, reference: LlamaForCausalLM, prompt: list[int], rounds: int
) -> list[tuple[float, float]]:
    """(engine, transformers) seconds to the first token, each round; the first one warms up."""
    prompt_tensor = torch.tensor([prompt])
    pairs = []
    for _ in range(rounds + 1):
        engine.forget_cached()
        ours, _ = timed(lambda: engine.generate([prompt], SamplingParams(tokens_max=1)))
        theirs, _ = timed(lambda: first_token(reference, prompt_tensor))
        pairs.append((ours, theirs))
    return pairs[1:]


def compare_ttfts(
    engine: Engine, token_count: int, fresh_count: int, rounds: int
) -> tuple[float, float]:
    """Median time to first token of a cold prompt, and of one that ends differently."""
    params = SamplingParams(tokens_max=1)
    cold, cached = [], []
    for index in range(rounds):
        engine.forget_cached()
        prompt = random_prompt(engine.model, token_count, seed=10 + index)
        cold.append(engine.generate([prompt], params)[0].ttft_seconds)
        prompt[-fresh_count:] = random_prompt(engine.model, fresh_count, seed=1000 + index)
        result = engine.generate([prompt], params)[0]
        assert result.engine_cache_count >= token_count - fresh_count - engine.config.block_tokens
        cached.append(result.ttft_seconds)
    return statistics.median(cold), statistics.median(cached)


@torch.inference_mode()
def first_token(reference: LlamaForCausalLM, prompt: torch.Tensor) -> int:
    """What the engine does for a prompt of one request: KV kept, logits of the last token only."""
    logits = reference(prompt, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def random_prompt(model: LlamaModel, count: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()


def timed(call: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    value = call()
    return time.perf_counter() - begun, value


if __name__ == "__main__":
    main()
