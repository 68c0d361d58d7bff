"""Blocks that a pool held before this life come in slice by slice, parents before children.

Asking the index for each block, and for each one's parent, would cost half as much as all the rest.
So the event remembers the rows of the blocks done, and how many of them are resident: as long as
nothing else has changed, every resident block is one of those, and none of those to come is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvtier.core import events as ev
from kvtier.core.index import IN_CALL, NOBODY, PrefixIndex, Rows
from kvtier.core.residency import Residency
from kvtier.core.segments import Mask
from kvtier.types import BlockHash, PackedHashes

TakenIn = TypeVar("TakenIn", ev.BlocksAdopted, ev.BlocksRecovered)


def begin_slice(event: TakenIn, residency: Residency) -> tuple[TakenIn, Rows]:
    """The event without what is not true of it any more, and the rows of its blocks, NOBODY where
    there is none so far; what is written to them is remembered by `after_slice`."""
    changed = event.done_count > 0 and event.change_count != residency.change_count
    if changed or residency.index.sweep_pending:
        event = replace(event, own_count=None)
    if event.rows is not None:
        return event, event.rows
    return event, np.full(len(event.parents), NOBODY, dtype=np.int32)


def after_slice(event: TakenIn, residency: Residency, rows: Rows, stop: int) -> TakenIn:
    """What goes on with the blocks from `stop` on."""
    own_count = event.own_count
    if own_count is not None:
        own_count += int(np.count_nonzero(rows[event.done_count : stop] != NOBODY))
    return replace(
        event,
        done_count=stop,
        rows=rows,
        change_count=residency.change_count,
        own_count=own_count,
    )


def find_resident(
    event: TakenIn, index: PrefixIndex, hashes: Sequence[BlockHash], rows: Rows
) -> None:
    """Write into `rows`, those of this slice, which of its blocks are resident."""
    if len(index.row_of) != event.own_count:
        there = index.row_of.get_all(hashes)
        rows[:] = [NOBODY if row is None else row for row in there]


def parent_codes(
    event: TakenIn, residency: Residency, rows: Rows, start: int, fresh: Mask
) -> tuple[Rows, Mask]:
    """Each one's parent as `PrefixIndex.adopt` wants it; and who of `fresh` has one."""
    parents = event.parents[start : start + len(fresh)]
    codes = np.full(len(fresh), NOBODY, dtype=np.int32)
    earlier = fresh & (parents != NOBODY) & (parents < start)
    if event.own_count is None:
        # The rows of blocks that have gone may be those of others by now.
        hashes = PackedHashes(event.packed, residency.facts.hash_bytes)
        for parent in np.unique(parents[earlier]).tolist():
            row = residency.index.row_of.get(hashes[parent])
            rows[parent] = NOBODY if row is None else row
    codes[earlier] = rows[parents[earlier]]
    fresh = fresh & ~(earlier & (codes == NOBODY))
    inside = np.flatnonzero(fresh & (parents >= start))
    beside = parents[inside] - start
    known = rows[start : start + len(fresh)][beside]
    while True:  # Ends: each round takes one out, or is the last.
        orphans = inside[fresh[inside] & (known == NOBODY) & ~fresh[beside]]
        if not len(orphans):
            break
        fresh[orphans] = False
    ordinals = np.cumsum(fresh) - 1
    codes[inside] = np.where(known != NOBODY, known, IN_CALL - ordinals[beside])
    return codes, fresh
