"""Block hash -> row, in many small dicts instead of a large one.

A dict that grows moves all of its entries at once: at a million blocks that held the event loop
for 50 ms. Split up, each move is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.types import BlockHash

_PART_COUNT = 256  # A power of two. At a million blocks a part has 4,000, moved in 0.1 ms.
_MASK = _PART_COUNT - 1


class RowMap:
    """Every block is in the part that its hash() names; Python keeps that number in the object."""

    __slots__ = ("_count", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[BlockHash, int]] = [{} for _ in range(_PART_COUNT)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parts[hash(block) & _MASK]

    def get(self, block: BlockHash) -> int | None:
        return self._parts[hash(block) & _MASK].get(block)

    def get_all(self, hashes: Sequence[BlockHash]) -> list[int | None]:
        parts = self._parts
        return [parts[hash(block) & _MASK].get(block) for block in hashes]

    def add(self, hashes: Sequence[BlockHash], rows: Sequence[int]) -> None:
        """Add blocks none of which is here."""
        parts = self._parts
        for block, row in zip(hashes, rows, strict=True):
            part = parts[hash(block) & _MASK]
            assert block not in part, "a resident block was inserted again"
            part[block] = row
        self._count += len(rows)

    def add_many(self, hashes: Sequence[BlockHash], rows: Sequence[int]) -> None:
        """As `add`, for thousands at once: whether one is here is seen afterwards, by counting."""
        parts = self._parts
        for block, row, code in zip(hashes, rows, map(hash, hashes), strict=True):
            parts[code & _MASK][block] = row
        self._count += len(rows)
        assert sum(map(len, parts)) == self._count, "a resident block was inserted again"

    def remove(self, block: BlockHash) -> None:
        del self._parts[hash(block) & _MASK][block]
        self._count -= 1

    def pop_some(self, count: int) -> list[int]:
        """Remove up to `count` blocks, whichever; returns their rows."""
        rows: list[int] = []
        for part in self._parts:
            while part and len(rows) < count:
                rows.append(part.popitem()[1])
        self._count -= len(rows)
        return rows

    def entries(self) -> Iterator[tuple[BlockHash, int]]:
        for part in self._parts:
            yield from part.items()

    def rows(self) -> Iterator[int]:
        for part in self._parts:
            yield from part.values()
