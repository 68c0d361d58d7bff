"""What a model, an engine and a request are set to; validated once, then frozen."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from kvtier.policy.preemption import Preemption

# The default of vLLM 0.30 and later: with equal seeds both engines give equal block hashes, so a
# router that follows one can follow the other. (The namespace still keeps their KV apart.)
HASH_SEED_DEFAULT = "vllm-none-hash"
# Below this logits divided by the temperature leave float32's range; only the likeliest is drawn
# long before.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-architecture model."""

    layer_count: int
    hidden_size: int
    ffn_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    vocab_size: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    context_tokens_max: int = 8192

    def __post_init__(self) -> None:
        if self.head_count % self.kv_head_count:
            raise ValueError(
                f"head_count {self.head_count} is no multiple of kv_head_count {self.kv_head_count}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd: rotary embedding needs pairs")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.head_count // self.kv_head_count


class IndexKind(StrEnum):
    """How the engine finds the prefixes it has cached; both find the same blocks."""

    HASHES = "hashes"
    RADIX = "radix"  # For comparison: counts what is found of a block besides.


class Batching(StrEnum):
    """When requests may join the running batch."""

    ITERATION = "iteration"  # At every step (Orca: Yu et al., OSDI 2022).
    STATIC = "static"  # When all of the last batch have ended; for comparison.


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much an engine holds and does at once."""

    device_block_count: int = 512
    block_tokens: int = 16
    # Bounds the activations of one step, and how long a prefill may hold up the decodes beside it.
    step_tokens_max: int = 2048
    # Bounds the decode batch: every running request gets at least one token a step.
    running_count_max: int = 64
    batching: Batching = Batching.ITERATION
    # How requests come back whose device blocks were taken. Without kvtier they are recomputed.
    preemption: Preemption = Preemption.AUTO
    hash_seed: str = HASH_SEED_DEFAULT
    prefix_caching: bool = True
    prefix_index: IndexKind = IndexKind.HASHES
    # Bounds what a flood of requests costs in hashes and hook calls a step.
    waiting_count_max: int = 1024
    # Where it computes and has its KV: "cpu", "cuda" (torch's current one) or "cuda:1".
    device: str = "cpu"
    # On a GPU: a request whose prefix is being loaded is computed at once, each layer after its own
    # part of the load. Whoever is in the same step waits for the load, too.
    layerwise_loading: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}: it must be cpu, cuda or cuda:N")
        if self.layerwise_loading and self.device == "cpu":
            raise ValueError(
                "layerwise_loading needs a GPU: on a CPU nothing computes beside a copy"
            )
        for name in (
            "device_block_count",
            "block_tokens",
            "running_count_max",
            "waiting_count_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.step_tokens_max < self.running_count_max:
            raise ValueError(
                f"step_tokens_max {self.step_tokens_max} is below running_count_max "
                f"{self.running_count_max}: each running request needs one token a step"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens, and when it stops. Temperature 0 is greedy."""

    tokens_max: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    # Independent draws for one prompt; draw i is seeded with seed + i.
    sample_count: int = 1
    # Above 1: beam search. Its samples are the likeliest runs of tokens found, best first.
    beam_width: int = 1

    def __post_init__(self) -> None:
        if self.sample_count < 1 or self.beam_width < 1:
            raise ValueError(
                f"sample_count {self.sample_count} and beam_width {self.beam_width} must be "
                "at least 1"
            )
        if self.beam_width > 1 and (self.temperature > 0.0 or self.sample_count > 1):
            raise ValueError("beam search draws nothing: leave temperature 0 and sample_count 1")
        if self.tokens_max < 1:
            raise ValueError(f"tokens_max is {self.tokens_max}: it must be at least 1")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 or more, and finite")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}: it must fit into 64 bits, with its sign")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def branch_count(self) -> int:
        """How many runs of tokens it computes side by side at most."""
        return max(self.sample_count, self.beam_width)
