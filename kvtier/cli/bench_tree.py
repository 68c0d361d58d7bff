"""Many chains out of few blocks: trunks that branch near their end.

A tree of `trunk_count` trunks with `BRANCH_COUNT` branches each has `trunk_count * BRANCH_COUNT`
full chains of `chain_count` blocks, and shares prefixes as conversations do. Everything follows
from the seed, so that two processes of a benchmark know the same hashes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvtier.errors import BadRequest

HASH_BYTES = 32
BRANCH_COUNT = 8
_BRANCH_SHARE = 8  # A branch is this part of a chain.


class ChainTree:
    """`resident_count` block hashes; hashes stay packed until a chain is asked for."""

    def __init__(self, *, resident_count: int, chain_length: int, seed: int) -> None:
        branch_length = max(1, chain_length // _BRANCH_SHARE)
        trunk_length = chain_length - branch_length
        tree_count = trunk_length + BRANCH_COUNT * branch_length
        trunk_count = resident_count // tree_count
        if trunk_length < 1 or trunk_count < 1:
            raise BadRequest(
                f"--resident {resident_count} is too few: at least {tree_count} blocks make "
                f"{BRANCH_COUNT} chains of {chain_length}"
            )
        chance = random.Random(seed)
        self.resident_count = resident_count
        self.chain_length = chain_length
        self.full_chain_count = trunk_count * BRANCH_COUNT
        self._chance = chance
        self._trunks = [_hashes(chance, trunk_length) for _ in range(trunk_count)]
        self._branches = [_hashes(chance, branch_length) for _ in range(self.full_chain_count)]
        # What is left over is one more chain that no question asks for.
        self._rest = _hashes(chance, resident_count - trunk_count * tree_count)

    def runs(self) -> Iterator[tuple[bytes | None, bytes]]:
        """(parent, packed hashes) of every run of blocks, parents before children."""
        for number, trunk in enumerate(self._trunks):
            yield None, trunk
            first = number * BRANCH_COUNT
            for branch in self._branches[first : first + BRANCH_COUNT]:
                yield trunk[-HASH_BYTES:], branch
        if self._rest:
            yield None, self._rest

    def full_chain(self, number: int) -> list[bytes]:
        """All of its blocks are resident."""
        return unpack(self._trunks[number // BRANCH_COUNT] + self._branches[number])

    def part_chain(self, number: int, depth: int) -> list[bytes]:
        """Its first `depth` blocks are resident and no more."""
        known = self.full_chain(number)[:depth]
        return known + self.absent_chain(self.chain_length - depth)

    def absent_chain(self, count: int) -> list[bytes]:
        """Nobody has these; other ones each time."""
        return unpack(_hashes(self._chance, count))


def unpack(packed: bytes) -> list[bytes]:
    return [packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES)]


def _hashes(chance: random.Random, count: int) -> bytes:
    return chance.randbytes(count * HASH_BYTES)
