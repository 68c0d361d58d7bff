"""Twenty prompts to SmolLM2, greedily, in every way the engine has: transformers' tokens each time.

Where two tokens' logits are within rounding of each other either may come, and what follows answers
different texts: the token-identity rule of `assert_same_but_near_ties`. `make test` asks two of the
prompts, in the ways that imply the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.connect import connected_engine as engine_on_kvtier
from kvtier.engine.engine import Engine
from kvtier.engine.files.tokenizer import ChatMessage, Tokenizer
from kvtier.engine.model import LlamaModel
from kvtier.policy.preemption import Preemption
from tests.support.daemon import running_daemon
from tests.support.engines import PATIENT, patient_client
from tests.support.forms import rounds
from tests.support.memory_connector import MemoryBlocks, connected_engine
from tests.support.transformers_twin import assert_same_but_near_ties

pytestmark = pytest.mark.slow

Prompts = list[list[int]]
Tokens = list[tuple[int, ...]]
TOKENS_MAX = rounds(short=10, full=24)
GREEDY = SamplingParams(tokens_max=TOKENS_MAX)
QUESTIONS = [
    "What is the capital of France?", "Name three rivers of Europe.", "How do bees find flowers?",
    "Why is the sky blue?", "Count from five to twelve.", "Translate 'good morning' to Spanish.",
    "What does a compiler do?", "Write a line about the sea.", "Who wrote Hamlet?",
    "What is 17 times 3?", "List the planets.", "Explain gravity to a child.",
    "What is a prime number?", "Give a recipe for tea.", "How tall is a giraffe?",
    "What do plants need to grow?", "Define entropy in one sentence.", "What is a haiku?",
    "Say hello in four languages.", "Why do cats purr?",
]  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """The model, the prompts and what transformers says to each."""

    model: LlamaModel
    twin: LlamaForCausalLM
    prompts: Prompts
    expected: Tokens


@pytest.fixture(scope="module")
def judged(smollm2: tuple[LlamaModel, Tokenizer], smollm2_twin: LlamaForCausalLM) -> Judged:
    model, tokenizer = smollm2
    questions = QUESTIONS[: rounds(short=2, full=20)]
    prompts = [tokenizer.chat([ChatMessage("user", question)]) for question in questions]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = smollm2_twin.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=TOKENS_MAX, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        expected.append(tuple(found[0, len(prompt) :].tolist()))
    return Judged(model, smollm2_twin, prompts, expected)


def paged(model: LlamaModel, prompts: Prompts) -> Tokens:
    return tokens_of(Engine(model, EngineConfig(device_block_count=256)), prompts)


def without_paging(model: LlamaModel, prompts: Prompts) -> Tokens:
    """One block as long as any request: contiguous KV."""
    config = EngineConfig(block_tokens=128, device_block_count=len(prompts))
    return tokens_of(Engine(model, config), prompts)


def shared(model: LlamaModel, prompts: Prompts) -> Tokens:
    """Two samples of each, whose prompts are cached: both must be right."""
    engine = Engine(model, EngineConfig(device_block_count=512))
    engine.generate(prompts, SamplingParams(tokens_max=1))
    params = SamplingParams(tokens_max=TOKENS_MAX, sample_count=2)
    results = engine.generate(prompts, params)
    assert all(result.engine_cache_count > 0 for result in results)
    assert engine.scheduler.tables.copied_count > 0
    assert all(one.samples[0].token_ids == one.samples[1].token_ids for one in results)
    return [result.token_ids for result in results]


def preempted(mode: Preemption) -> Callable[[LlamaModel, Prompts], Tokens]:
    def run(model: LlamaModel, prompts: Prompts) -> Tokens:
        # Of 8 tokens a block: each request needs one more than its prompt, and one cannot have it.
        ends = sum(-(-(len(prompt) + TOKENS_MAX) // 8) for prompt in prompts)
        config = EngineConfig(
            block_tokens=8, preemption=mode, prefix_caching=False,
            device_block_count=rounds(short=ends - 1, full=ends // 2),
        )  # fmt: skip
        blocks = MemoryBlocks()
        engine = connected_engine(model, config, blocks)
        results = engine.generate(prompts, GREEDY)
        assert set(engine.scheduler.preemption.counts) == {mode}
        # All prompts begin alike: in either mode the first start of one may bring that from kvtier.
        at_first = sum(result.kvtier_count for result in results)
        assert (blocks.onboarded_count * config.block_tokens > at_first) == (
            mode is Preemption.SWAP
        )
        return [result.token_ids for result in results]

    return run


def through_kvtier(model: LlamaModel, prompts: Prompts) -> Tokens:
    """What a second engine onboards from a daemon that the first has filled."""
    config = EngineConfig(device_block_count=256)
    tokens: Tokens = []
    with running_daemon(dram_bytes="128MiB", slab_bytes="64MiB") as daemon:
        for round_number in range(2):
            with (
                patient_client(daemon.socket) as client,
                engine_on_kvtier(model, config, client, settings=PATIENT) as connected,
            ):
                assert connected.wait_ready(10.0)
                results = connected.engine.generate(prompts, GREEDY)
                assert connected.engine.wait_offloads(15.0)
                tokens = [result.token_ids for result in results]
                hits = sum(result.kvtier_count for result in results)
                assert (hits > 0) == (round_number == 1)
    return tokens


IN_SHORT = {
    "shared": shared,
    "swapped": preempted(Preemption.SWAP),
    "through kvtier": through_kvtier,
}
IN_FULL = {
    "paged": paged,
    "without paging": without_paging,
    "recomputed": preempted(Preemption.RECOMPUTE),
}
WAYS = [
    *(pytest.param(way, id=name, marks=pytest.mark.full_form) for name, way in IN_SHORT.items()),
    *(pytest.param(way, id=name, marks=pytest.mark.torture) for name, way in IN_FULL.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(
    judged: Judged, way: Callable[[LlamaModel, Prompts], Tokens]
) -> None:
    found = way(judged.model, judged.prompts)
    for prompt, ours, theirs in zip(judged.prompts, found, judged.expected, strict=True):
        assert_same_but_near_ties(judged.twin, prompt, theirs, ours)


def tokens_of(engine: Engine, prompts: Sequence[list[int]]) -> Tokens:
    return [result.token_ids for result in engine.generate(prompts, GREEDY)]
