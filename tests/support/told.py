"""What instructions tell, checked by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core import instructions as ins
from kvtier.types import BlockHash


def check_granted(granted: ins.LeaseGranted) -> None:
    """Counts by tier add up to what was leased, and no slot is named twice."""
    assert sum(count for _, count in granted.tiers) == granted.leased_count
    assert (granted.lease is None) == (granted.leased_count == 0)
    is_direct = granted.is_direct
    below = [False] * len(granted.slots) if is_direct is None else is_direct.tolist()
    named = set(zip(below, granted.slots.tolist(), strict=True))
    assert len(named) == len(granted.slots) <= granted.leased_count


def taken_in_by(done: Sequence[ins.Instruction]) -> set[BlockHash]:
    """The blocks that the instructions say were taken in; each is told once."""
    told = [
        block
        for one in done
        if isinstance(one, ins.BlocksTakenIn)
        for block, is_kept in zip(one.hashes, one.kept.tolist(), strict=True)
        if is_kept
    ]
    assert len(set(told)) == len(told), "a recovered block is told twice"
    return set(told)
