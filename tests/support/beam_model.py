"""Beam search and its blocks, too simple to be wrong: every beam is computed from its first token.

Each beam is a list of tokens of its own, copied whole when it branches. What blocks a perfect
sharer would hold is counted from these lists: one for each distinct (tokens before, tokens in it).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from kvtier.engine.attention import plan_attention
from kvtier.engine.config import EngineConfig
from kvtier.engine.kv_cache import make_kv_cache
from kvtier.engine.model import LlamaModel


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...]
    score: float


class CopyingBeams:
    """`advance` is one step of the search."""

    def __init__(self, model: LlamaModel, prompt: list[int], width: int, block_tokens: int) -> None:
        self._model = model
        self._width = width
        self._block_tokens = block_tokens
        self.beams = [Beam(tuple(prompt), 0.0)]
        self.copied_count = 0

    def advance(self) -> None:
        candidates = [
            (beam.score + score, beam, token)
            for beam in self.beams
            for token, score in enumerate(self._log_probabilities(beam.tokens))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        chosen = candidates[: self._width]
        children = Counter(beam for _, beam, _ in chosen)
        for beam, count in children.items():
            # The block that the children go on in is shared by them, if it has begun.
            if len(beam.tokens) % self._block_tokens:
                self.copied_count += count - 1
        self.beams = [Beam((*beam.tokens, token), score) for score, beam, token in chosen]

    def block_count(self) -> int:
        """Distinct blocks of all beams; the KV of a beam's last token is not computed yet."""
        blocks = set()
        for beam in self.beams:
            known = len(beam.tokens) - 1
            for start in range(0, known, self._block_tokens):
                blocks.add(beam.tokens[: min(start + self._block_tokens, known)])
        return len(blocks)

    def _log_probabilities(self, tokens: tuple[int, ...]) -> list[float]:
        config = EngineConfig(device_block_count=1, block_tokens=len(tokens))
        kv_cache = make_kv_cache(self._model, config)
        plan = plan_attention([[0]], [(0, len(tokens))], len(tokens))
        last = torch.tensor([len(tokens) - 1])
        logits = self._model.forward(torch.tensor(tokens), kv_cache, plan, last)[0]
        scores: list[float] = torch.log_softmax(logits, dim=-1).tolist()
        return scores
