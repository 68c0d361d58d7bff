"""Recovered blocks put in order: of each namespace those that lead back to a first block.

A table says of each block which one it follows, and nothing promises that that one is still there:
its segment may have been reused, or its entry torn. Such blocks can never be matched, so they are
dropped here, but only once every table has been read. Hashes are opaque and chosen by engines;
equal beginnings cost time and cycles end as unreachable, but neither can make a wrong chain.

All is done in arrays, for a million blocks in some tenths of a second, mostly without the GIL.
A *run* are blocks in neighbouring slots that follow one another: written as they were, most chains
are few of these, and only their first blocks' parents must be looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.layout import SegmentHeader
from kvtier.memory import Bytes
from kvtier.pools.nvme_recovery import RecoveredBlocks
from kvtier.pools.slot_table import HASH_BYTES_MAX, Slots

ROOT = -1  # In place of a parent: the first block of a chain.
_ABSENT = -2
_WORDS = HASH_BYTES_MAX // 8
# 1 MiB: what is copied under the GIL in one go.
_PACK_BYTES = 1 << 20

Positions = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]  # One row of `_WORDS` words a hash.
_Rows = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RecoveredChains:
    """The blocks of one namespace, parents before children."""

    fingerprint: bytes
    epoch: int
    hash_bytes: int
    packed: bytes  # The hashes, one after the other.
    parents: Positions  # Position of the parent in these lists, or ROOT.
    lower_slots: Slots
    sequences: npt.NDArray[np.uint64]  # Number of the life of each one's segment.
    # Ascends with the last use, all below 0; None unless the pool was closed cleanly.
    used_at: npt.NDArray[np.float64] | None
    dropped: Slots  # Blocks that no chain reaches; not in the lists.


@dataclass(frozen=True, slots=True)
class _Runs:
    """Run i are the rows starts[i] .. ends[i] - 1, each the parent of the next one."""

    starts: _Rows
    ends: _Rows
    parents: _Rows  # Row that the first one follows; ROOT or _ABSENT.
    above: Positions  # The run that this row is in; itself where there is none.


def chains_of(found: RecoveredBlocks) -> list[RecoveredChains]:
    """One for each namespace that the pool has blocks of, in the order of their first segments.

    Takes the newest entry of each block, as recovery gives them.
    """
    lives: dict[bytes, list[tuple[SegmentHeader, int, int]]] = {}
    first = 0
    for header, rows in found.lives:
        lives.setdefault(header.fingerprint, []).append((header, first, first + len(rows)))
        first += len(rows)
    assert first == len(found.slots), "every block is in one life of a segment"
    return [_chains(found, fingerprint, own) for fingerprint, own in lives.items()]


def _chains(
    found: RecoveredBlocks, fingerprint: bytes, lives: Sequence[tuple[SegmentHeader, int, int]]
) -> RecoveredChains:
    counts = np.array([end - first for _, first, end in lives])
    life_sequences = np.array([header.sequence for header, _, _ in lives], np.uint64)
    sequences = np.repeat(life_sequences, counts)
    mine = _rows_of_lives(lives)
    slots, epochs, lengths = found.slots[mine], found.epochs[mine], found.hash_bytes[mine]
    hashes, parents = _take(found.hashes, mine), _take(found.parents, mine)
    # All blocks of a namespace agree in these two, or its newest segment is believed.
    newest = int(np.argmax(sequences))
    epoch, hash_bytes = int(epochs[newest]), int(lengths[newest])
    fits = (epochs == epoch) & (lengths == hash_bytes)
    if hash_bytes < HASH_BYTES_MAX:
        fits &= ~hashes[:, hash_bytes:].any(axis=1)
    misfits = slots[~fits]
    if len(misfits):
        hashes, parents = hashes[fits], parents[fits]
        slots, sequences = slots[fits], sequences[fits]
    runs = _runs(hashes.view(np.uint64), parents.view(np.uint64))
    order, positions, unreached = _in_order(runs, len(slots))
    return RecoveredChains(
        fingerprint=fingerprint,
        epoch=epoch,
        hash_bytes=hash_bytes,
        packed=_packed(hashes, order, hash_bytes),
        parents=positions,
        lower_slots=slots[order],
        sequences=sequences[order],
        used_at=_used_at(found.recency, slots[order]),
        dropped=np.sort(np.concatenate((misfits, slots[unreached]))),
    )


def _rows_of_lives(lives: Sequence[tuple[SegmentHeader, int, int]]) -> slice | _Rows:
    """A slice where that will do, which saves copies: mostly a pool has one namespace."""
    ends = [end for _, _, end in lives]
    if [first for _, first, _ in lives[1:]] == ends[:-1]:
        return slice(lives[0][1], ends[-1])
    return np.concatenate([np.arange(first, end) for _, first, end in lives])


def _take(table: Bytes, rows: slice | _Rows) -> Bytes:
    """`table[rows]`; of rows by number this is six times as fast."""
    return table[rows] if isinstance(rows, slice) else np.take(table, rows, axis=0)


# -------------------------------------------------------------------------------------- parents


def _runs(hashes: Hashes, parents: Hashes) -> _Runs:
    count = len(hashes)
    is_root = _equal(parents, np.zeros((1, _WORDS), np.uint64))
    is_first = np.ones(count, np.bool_)
    is_first[1:] = is_root[1:] | ~_equal(parents[1:], hashes[:-1])
    starts = np.flatnonzero(is_first)
    found = np.full(len(starts), ROOT, np.int64)
    sought = np.flatnonzero(~is_root[starts])
    found[sought] = _rows_of(np.take(parents, starts[sought], axis=0), hashes)
    above = np.arange(len(starts), dtype=np.int32)
    run_of = np.cumsum(is_first, dtype=np.int32) - 1
    above[found >= 0] = run_of[found[found >= 0]]
    return _Runs(starts, np.append(starts, count)[1:], found, above)


def _rows_of(wanted: Hashes, hashes: Hashes) -> _Rows:
    """Which row of `hashes`, which are all different, each one wanted is; or _ABSENT."""
    found = np.full(len(wanted), _ABSENT, np.int64)
    if not len(wanted) or not len(hashes):
        return found
    order = np.argsort(hashes[:, 0])
    beginnings = hashes[:, 0][order]
    # In ascending order the search goes through the memory once, which is ten times as fast.
    ascending = np.argsort(wanted[:, 0])
    wanted = np.take(wanted, ascending, axis=0)
    places = np.searchsorted(beginnings, wanted[:, 0])
    rows = order[np.minimum(places, len(order) - 1)]
    agrees = _equal(np.take(hashes, rows, axis=0), wanted)
    found[ascending[agrees]] = rows[agrees]
    shared = np.flatnonzero(beginnings[1:] == beginnings[:-1])
    if len(shared):
        among = np.zeros(len(order), np.bool_)
        among[shared] = among[shared + 1] = True
        rows = order[among]
        left = np.flatnonzero(~agrees & np.isin(wanted[:, 0], beginnings[shared]))
        found[ascending[left]] = _rows_by_all_words(wanted[left], hashes[rows], rows)
    return found


def _rows_by_all_words(wanted: Hashes, hashes: Hashes, rows: _Rows) -> _Rows:
    """As `_rows_of`, where many hashes begin alike: by sorting both together, all words of them."""
    both = np.concatenate((hashes, wanted))
    numbers = np.concatenate((rows, np.full(len(wanted), _ABSENT, np.int64)))
    order = np.lexsort(both.T)  # Stable: a hash comes before whoever wants it.
    both, numbers = both[order], numbers[order]
    begins = np.ones(len(both), np.bool_)
    begins[1:] = ~_equal(both[1:], both[:-1])
    found = np.empty(len(both), np.int64)
    found[order] = numbers[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return found[len(hashes) :]


def _equal(left: Hashes, right: Hashes) -> _Mask:
    equal: _Mask = left[:, 0] == right[:, 0]
    for word in range(1, _WORDS):
        equal &= left[:, word] == right[:, word]
    return equal


# ---------------------------------------------------------------------------------------- order


def _in_order(runs: _Runs, count: int) -> tuple[_Rows, Positions, _Rows]:
    """(rows that chains reach, parents first; their parents' positions among them; the others)."""
    depths, reached = _depths(runs)
    kept = np.flatnonzero(reached)
    # A run's parent lies in a run that is less deep.
    depths = depths[kept]
    if depths.max(initial=0) < 1 << 16:
        depths = depths.astype(np.uint16)  # Sorted by digits, ten times as fast.
    kept = kept[np.argsort(depths, kind="stable")]
    lengths = runs.ends[kept] - runs.starts[kept]
    firsts = np.cumsum(lengths) - lengths
    order = np.arange(int(lengths.sum())) + np.repeat(runs.starts[kept] - firsts, lengths)
    position_of = np.full(count, _ABSENT, np.int32)
    position_of[order] = np.arange(len(order), dtype=np.int32)
    positions = np.arange(-1, len(order) - 1, dtype=np.int32)
    parents = runs.parents[kept]
    positions[firsts] = np.where(parents == ROOT, ROOT, position_of[np.maximum(parents, 0)])
    return order, positions, np.flatnonzero(position_of == _ABSENT)


def _depths(runs: _Runs) -> tuple[Positions, _Mask]:
    """How many runs lie above each, and whether it is reached from a first block.

    Everyone jumps to where its target jumps, so that jumps double with every round. A chain of n
    runs is through after log2(n) rounds; who is not by then goes in circles.
    """
    count = len(runs.starts)
    ends_here = runs.parents < 0
    jumps = runs.above.copy()
    depths = np.where(ends_here, 0, 1).astype(np.int32)
    under_way = np.flatnonzero(~ends_here)
    for _ in range(count.bit_length()):
        under_way = under_way[~ends_here[jumps[under_way]]]
        if not len(under_way):
            break
        targets = jumps[under_way]
        depths[under_way] += depths[targets]
        jumps[under_way] = jumps[targets]
    reached = ends_here[jumps] & (runs.parents[jumps] == ROOT)
    return depths, reached


# --------------------------------------------------------------------------------------- output


def _packed(hashes: Bytes, order: _Rows, hash_bytes: int) -> bytes:
    """Piece by piece; `join` lets go of the GIL where there is much to copy."""
    step = _PACK_BYTES // hash_bytes
    pieces = []
    for first in range(0, len(order), step):
        piece = np.take(hashes, order[first : first + step], axis=0)[:, :hash_bytes]
        pieces.append(piece.tobytes())  # gil-ok: 1 MiB.
    return b"".join(pieces)


def _used_at(recency: Slots | None, slots: Slots) -> npt.NDArray[np.float64] | None:
    if recency is None:
        return None
    count = len(recency)
    used_at = np.full(len(slots), -count - 1.0)
    if count:
        order = np.argsort(recency)
        places = np.minimum(np.searchsorted(recency[order], slots), count - 1)
        known = recency[order][places] == slots
        used_at[known] = order[places[known]] - float(count)
    return used_at
