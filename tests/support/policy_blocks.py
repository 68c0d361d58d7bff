"""What eviction policies ask of blocks: every row stands for one block for ever."""

from __future__ import annotations

import numpy as np

from kvtier.policy.eviction import Keys, Rows


class FakeBlocks:
    def __init__(self, count_max: int = 64, block_tokens: int = 16) -> None:
        self.count_max, self.block_tokens = count_max, block_tokens
        self.parent: dict[int, int] = {}

    def keys_of(self, rows: Rows) -> Keys:
        return rows.astype(np.uint64)

    def parents_of(self, rows: Rows) -> Rows:
        return np.array([self.parent.get(row, -1) for row in rows.tolist()], dtype=np.int32)
