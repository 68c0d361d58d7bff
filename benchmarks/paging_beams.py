"""Beam search by the real model, and how many blocks its beams have in common at every step."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.engine import Engine
from kvtier.engine.files.smollm2 import load_smollm2
from kvtier.engine.files.tokenizer import ChatMessage, Tokenizer
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


@lru_cache(maxsize=1)
def _loaded() -> tuple[LlamaModel, Tokenizer]:
    return load_smollm2()


def shared_share(lengths: Lengths, width: int, prompt_count: int, seed: int) -> float:
    """1 - blocks held / blocks in all tables, over all steps of all searches."""
    model, tokenizer = _loaded()
    rng = random.Random(seed)
    held_sum = table_sum = 0
    for question in QUESTIONS[:prompt_count]:
        need = lengths.draw(rng)
        prompt = tokenizer.chat([ChatMessage("user", question)])
        engine = Engine(model, EngineConfig(device_block_count=128, prefix_caching=False))
        output_count = min(100, need.total_count - need.prompt_count)
        engine.add_request("beams", prompt, SamplingParams(output_count, beam_width=width))
        while engine.unfinished_count:
            engine.step()
            tables = [request.device_blocks for request in engine.scheduler.active]
            held_sum += len({block for table in tables for block in table})
            table_sum += sum(len(table) for table in tables)
    return round(1 - held_sum / table_sum, 4)
