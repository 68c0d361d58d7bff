"""Conversations that begin, go on some seconds later and end, as engines see them: chains of block
hashes, all from a seed.

Drawn after the chat trace (docs/policies.md): a request has some 12,000 tokens, most of them new; a
few system prompts are shared; two of three turns are followed by another, after seconds to minutes.
"""

from __future__ import annotations

import heapq
import random
from itertools import count

from kvtier.cli.bench_tree import HASH_BYTES

_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 4, 1_024
_GOES_ON = 0.67
# Logarithms of medians, and standard deviations of logarithms.
_NEW_TOKENS, _GAP_SECONDS = (8.2, 1.1), (2.3, 1.2)
_NEW_TOKENS_MAX, _TOKENS_MAX = 32_768, 65_536
_OPEN_MAX = 20_000  # Conversations at a time, in some 500 MB at worst.


class Talks:
    """Requests of one engine, in the order of their coming."""

    def __init__(self, *, block_tokens: int, seed: int) -> None:
        self._block_tokens = block_tokens
        self._chance = random.Random(seed)
        # The same for all engines.
        shared, blocks = random.Random(0), max(1, _SYSTEM_TOKENS // block_tokens)
        self._system = [shared.randbytes(blocks * HASH_BYTES) for _ in range(_SYSTEM_PROMPTS)]
        self._numbers = count()
        self._waiting: list[tuple[float, int, bytes]] = []  # When it goes on, and its chain so far.

    def next_chain(self, now: float) -> bytes:
        """Packed hashes of the next request: of a conversation that is due, else of a new one."""
        if self._waiting and self._waiting[0][0] <= now:
            chain = heapq.heappop(self._waiting)[2]
        else:
            chain = self._chance.choice(self._system)
        chain += self._chance.randbytes(self._new_blocks() * HASH_BYTES)
        tokens = len(chain) // HASH_BYTES * self._block_tokens
        is_short = tokens < _TOKENS_MAX and len(self._waiting) < _OPEN_MAX
        if is_short and self._chance.random() < _GOES_ON:
            due = now + self._chance.lognormvariate(*_GAP_SECONDS)
            heapq.heappush(self._waiting, (due, next(self._numbers), chain))
        return chain

    def _new_blocks(self) -> int:
        tokens = min(self._chance.lognormvariate(*_NEW_TOKENS), _NEW_TOKENS_MAX)
        return max(1, round(tokens / self._block_tokens))
