"""Runs: blocks that follow one another, worked off together."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.types import BlockHash


def runs_of(
    hashes: Sequence[BlockHash], parents: Sequence[BlockHash | None]
) -> list[tuple[list[BlockHash], BlockHash | None]]:
    """Blocks in runs that follow one another: (hashes, parent of the first)."""
    found: list[tuple[list[BlockHash], BlockHash | None]] = []
    for block, parent in zip(hashes, parents, strict=True):
        if found and found[-1][0][-1] == parent:
            found[-1][0].append(block)
        else:
            found.append(([block], parent))
    return found


class Run:
    """New blocks of a Commit that follow one another, not yet in the index."""

    __slots__ = ("hashes", "parent_row")

    def __init__(self, parent_row: int | None) -> None:
        self.hashes: dict[BlockHash, int] = {}  # Position in the slice.
        self.parent_row = parent_row
