"""What is resident, block by block: a page of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.core.index import NOBODY
from kvtier.core.residency import Residency
from kvtier.types import TierName

PAGE_ROWS = 4096  # To look at each takes 1.5 ms.
TIER_BITS = {tier: 1 << number for number, tier in enumerate(TierName)}


@dataclass(frozen=True, slots=True)
class Listing:
    packed: bytes  # Hashes, one after the other.
    tiers: bytes  # One byte a block: TIER_BITS of where it is.
    row_next: int  # 0: there are no more rows.


def list_rows(residency: Residency, row_first: int) -> Listing:
    """A block that moves to another row between two pages may be told twice or not at all."""
    index, tier = residency.index, residency.tier
    row_end = min(row_first + PAGE_ROWS, len(index.hash_of))
    rows = np.array([row for row in range(row_first, row_end) if index.has_row(row)], np.int32)
    bits = np.zeros(len(rows), dtype=np.uint8)
    bits[tier.is_ready(index.place[rows])] |= TIER_BITS[TierName.DRAM]
    for name, columns in index.lower.items():
        bits[columns.slot[rows] != NOBODY] |= TIER_BITS[name]
    packed = b"".join(residency.hashes_of(rows))
    return Listing(packed, bits.tobytes(), row_end if row_end < len(index.hash_of) else 0)
