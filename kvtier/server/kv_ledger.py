"""Which blocks were announced in which place; pure.

Many small dicts, as core/row_map.py has and for the same reason: each is copied or freed within a
fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.core.listing import TIER_BITS
from kvtier.server.kv_wire import PLACE_OF, WirePlace
from kvtier.types import TierName

PART_COUNT = 256  # A power of two.
_BITS_OF: dict[WirePlace, int] = {}
for _tier, _place in PLACE_OF.items():
    _BITS_OF[_place] = _BITS_OF.get(_place, 0) | TIER_BITS[_tier]

Part = dict[bytes, int]  # Block -> bits of the tiers it is in.


class Ledger:
    """One namespace's."""

    def __init__(self) -> None:
        self._parts: list[Part] = [{} for _ in range(PART_COUNT)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def note_stored(self, hashes: Iterable[bytes], tier: TierName) -> None:
        bit, parts = TIER_BITS[tier], self._parts
        for block in hashes:
            part = parts[hash(block) & (PART_COUNT - 1)]
            part[block] = part.get(block, 0) | bit

    def note_removed(self, hashes: Iterable[bytes], tier: TierName) -> list[bytes]:
        """The blocks that are in no tier of that medium any more."""
        bit, bits = TIER_BITS[tier], _BITS_OF[PLACE_OF[tier]]
        gone = []
        for block in hashes:
            part = self._parts[hash(block) & (PART_COUNT - 1)]
            before = part.get(block, 0)
            after = before & ~bit
            if after:
                part[block] = after
            else:
                part.pop(block, None)
            if before & bits and not after & bits:
                gone.append(block)
        return gone

    def take_parts(self) -> list[Part]:
        """Forget everything. Who gets the parts frees them one by one."""
        taken, self._parts = self._parts, [{} for _ in range(PART_COUNT)]
        return taken

    def blocks(self, number: int) -> list[tuple[WirePlace, Sequence[bytes]]]:
        """Part `number`, by medium."""
        found: list[tuple[WirePlace, Sequence[bytes]]] = []
        for place, bits in _BITS_OF.items():
            hashes = [block for block, tiers in self._parts[number].items() if tiers & bits]
            if hashes:
                found.append((place, hashes))
        return found
