"""What sharing saves where the real model answers: it decides when beams part."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.smollm2 import load_smollm2
from kvtier.engine.files.tokenizer import ChatMessage
from kvtier.engine.model import LlamaModel

if TYPE_CHECKING:
    from benchmarks.paging import Lengths

QUESTIONS = (
    "Give three tips for staying healthy.",
    "How can we reduce air pollution?",
    "Describe a time when you had to make a difficult decision.",
    "Name the primary colours and say what they mix to.",
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fox and a well.",
)
WIDTHS = (2, 4, 6)
ANSWER_MAX = 64
Say = Callable[[str], None]


def study(lengths: Lengths, question_count: int, seed: int, say: Say) -> dict[str, Any]:
    """Questions as they are with answers of drawn lengths, as the paper has it; and as chats that
    the model ends itself, for one width. Answers are cut to 64 tokens."""
    model, tokenizer = load_smollm2()
    questions = QUESTIONS[:question_count]
    rng = random.Random(seed)
    needs = [lengths.draw(rng) for _ in questions]
    counts = [min(ANSWER_MAX, need.total_count - need.prompt_count) for need in needs]
    plain = [tokenizer.encode(question) for question in questions]
    chats = [tokenizer.chat([ChatMessage("user", question)]) for question in questions]
    ends = frozenset([tokenizer.end_id])
    figures: dict[str, Any] = {
        "prompts": {
            "plain_mean": round(statistics.mean(map(len, plain)), 1),
            "chat_mean": round(statistics.mean(map(len, chats)), 1),
            "answer_mean": round(statistics.mean(counts), 1),
            "count": len(questions),
        }
    }
    for way, prompts, answers, widths, stops in (
        ("drawn lengths", plain, counts, WIDTHS, frozenset[int]()),
        ("chats", chats, [ANSWER_MAX] * len(chats), WIDTHS[1:2], ends),
    ):
        shares: dict[str, dict[str, float]] = {"parallel sampling": {}, "beam search": {}}
        for width in widths:
            for kind, sign, params in (
                ("parallel sampling", "n", {"sample_count": width, "temperature": 1.0}),
                ("beam search", "k", {"beam_width": width}),
            ):
                say(f"sharing: SmolLM2, {way}, {kind}, {width}")
                asked = [
                    SamplingParams(count, seed=seed, stop_token_ids=stops, **params)  # type: ignore[arg-type]
                    for count in answers
                ]
                shares[kind][f"{sign} = {width}"] = shared_share(model, prompts, asked)
        figures[way] = shares
    return figures


def shared_share(
    model: LlamaModel, prompts: Sequence[list[int]], asked: Sequence[SamplingParams]
) -> float:
    """1 - blocks held / blocks in all tables, over all steps. Prompts share nothing."""
    engine = Engine(model, EngineConfig(device_block_count=512, prefix_caching=False))
    for number, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        engine.add_request(f"q{number}", prompt, params)
    held_sum = table_sum = 0
    while engine.unfinished_count:
        engine.step()
        tables = [request.device_blocks for request in engine.scheduler.active]
        held_sum += len({block for table in tables for block in table})
        table_sum += sum(len(table) for table in tables)
    return round(1 - held_sum / table_sum, 4)
