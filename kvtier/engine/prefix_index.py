"""Which device blocks hold a prompt's prefix.

`ChainedHashes` is vLLM's way: a block's hash names all tokens up to its end, so one table finds it.
To compare there is a `RadixTree` (`radix_tree.py`) behind the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.types import BlockHash


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens from the first on, and the hashes of their full blocks. Prefixes with different
    salts have different hashes, and no tokens in common."""

    token_ids: Sequence[int]
    hashes: Sequence[BlockHash]
    salt: str | None = None


class PrefixIndex(Protocol):
    """Invariant: each device block is at most one block of one prefix, and each such block has at
    most one device block."""

    def match(self, prefix: Prefix) -> list[int]:
        """The device blocks of the longest run of full blocks; changes nothing."""
        ...

    def extra_count(self, prefix: Prefix) -> int:
        """Tokens after the match that some cached block begins with; 0 where nobody knows."""
        ...

    def add(self, prefix: Prefix, index: int, device_block: int) -> bool:
        """Block `index` of the prefix is here; False where it is elsewhere already."""
        ...

    def remove(self, device_block: int) -> None:
        """It is given to another owner; nothing where it is in no prefix."""
        ...

    def __contains__(self, device_block: int) -> bool: ...

    def __len__(self) -> int: ...


class ChainedHashes:
    """A table each way."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}

    def match(self, prefix: Prefix) -> list[int]:
        found: list[int] = []
        for block_hash in prefix.hashes:
            if (device_block := self._blocks.get(block_hash)) is None:
                break
            found.append(device_block)
        return found

    def extra_count(self, prefix: Prefix) -> int:
        return 0

    def add(self, prefix: Prefix, index: int, device_block: int) -> bool:
        if prefix.hashes[index] in self._blocks:
            return False
        self._blocks[prefix.hashes[index]] = device_block
        self._hashes[device_block] = prefix.hashes[index]
        return True

    def remove(self, device_block: int) -> None:
        if (block_hash := self._hashes.pop(device_block, None)) is not None:
            del self._blocks[block_hash]

    def __contains__(self, device_block: int) -> bool:
        return device_block in self._hashes

    def __len__(self) -> int:
        return len(self._blocks)
