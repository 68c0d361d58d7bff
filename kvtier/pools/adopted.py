"""What a slot table of a former life says of the slots that are adopted, in chains.

As `recovery.py` and `chains.py` say; here the pool is one in memory, whose tables are whole: all
that is in doubt is held by the core until no lease of that life can be running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.chains import RecoveredChains, chains_of
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.recovery import recover
from kvtier.pools.slot_table import ENTRY_BYTES, Entries, Slots

_DAEMON = bytes(16)


@dataclass(frozen=True, slots=True)
class AdoptedChains:
    """The blocks of one namespace."""

    chains: RecoveredChains
    are_summed: npt.NDArray[np.bool_]  # In the order of the chains' slots.


@dataclass(frozen=True, slots=True)
class AdoptedSlots:
    """Of all slots in these ranges; those that are in none of the lists are in doubt."""

    namespaces: tuple[AdoptedChains, ...]
    reserved: Mapping[bytes, Slots]  # By the engine's id.
    free: Slots  # Hold nothing, or the daemon itself was filling them.
    sequence_next: int


def adopted_slots(
    table: Bytes, generation: int, epochs: Mapping[bytes, int], ranges: Sequence[range]
) -> AdoptedSlots:
    """Read what the table says of the slots that are adopted.

    `table`: the entries of `ranges`, which ascend, one after another. `epochs`: the current ones.
    """
    numbers = np.concatenate([np.arange(one.start, one.stop, dtype=np.uint32) for one in ranges])
    assert len(table) == len(numbers) * ENTRY_BYTES, "the entries are not those of the ranges"
    found = recover(table, generation, epochs)
    slots, entries = numbers[found.ready_slots], found.ready
    reserved = _by_engine(numbers[found.reserved_slots], found.reserved)
    is_used = np.zeros(len(numbers), np.bool_)
    for some in (found.ready_slots, found.reserved_slots, found.void_slots):
        is_used[some] = True
    free = numbers[~is_used]
    own = reserved.pop(_DAEMON, np.empty(0, np.uint32))
    chains = [_summed(one, slots, entries) for one in chains_of(_blocks(slots, entries))]
    return AdoptedSlots(
        namespaces=tuple(chains),
        reserved=reserved,
        free=np.sort(np.concatenate((free, own))),
        sequence_next=int(found.ready["sequence"].max(initial=0)) + 1,
    )


def _by_engine(slots: Slots, entries: Entries) -> dict[bytes, Slots]:
    engines = entries["hash"][:, : len(_DAEMON)]
    different = np.unique(engines, axis=0) if len(engines) else engines
    return {
        one.tobytes(): slots[(engines == one).all(axis=1)]  # gil-ok: 16 bytes.
        for one in different
    }


def _blocks(slots: Slots, entries: Entries) -> RecoveredBlocks:
    """As a lower pool gives them, where each namespace has had one segment."""
    starts = np.flatnonzero(_differs(entries["fingerprint"]))
    if len(starts) > 1:
        prints = np.ascontiguousarray(entries["fingerprint"]).view(np.uint64)
        order = np.lexsort(prints.T)
        slots, entries = slots[order], entries[order]
        starts = np.flatnonzero(_differs(entries["fingerprint"]))
    ends = [*starts[1:].tolist(), len(slots)]
    lives = [
        (_life(entries[start]), np.arange(start, end))
        for start, end in zip(starts.tolist(), ends, strict=False)
    ]
    return RecoveredBlocks(
        slots=slots,
        hashes=entries["hash"].copy(),
        parents=entries["parent"].copy(),
        hash_bytes=entries["hash_bytes"].copy(),
        epochs=entries["epoch"].copy(),
        lives=tuple(lives),
        void_slots=np.empty(0, np.uint32),
        recency=None,
    )


def _differs(prints: Bytes) -> npt.NDArray[np.bool_]:
    """Which rows are not like the one before."""
    differs = np.ones(len(prints), np.bool_)
    differs[1:] = (prints[1:] != prints[:-1]).any(axis=1)
    return differs


def _life(entry: np.void) -> SegmentHeader:
    fingerprint = entry["fingerprint"].tobytes()  # gil-ok: 16 bytes.
    return SegmentHeader(0, fingerprint, SlotLayout(0, 0), slot_count=0, sequence=0)


def _summed(chains: RecoveredChains, slots: Slots, entries: Entries) -> AdoptedChains:
    rows = np.searchsorted(slots, chains.lower_slots)  # Ascending, as recovery gives them.
    return AdoptedChains(chains, entries["checksum"][rows] != 0)
