"""Recovery: from the bytes of a slot table to the blocks that its pool still holds.

One function for all pools. Whatever is in doubt is not a block: a wrong magic, version or CRC,
another generation, an unknown namespace, another epoch. Of two entries for the same block the one
with the higher sequence number counts. Payloads are not read here (see slot_table.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.memory import Bytes
from kvtier.pools.slot_table import (
    ENTRY,
    ENTRY_BYTES,
    FORMAT_VERSION,
    HASH_BYTES_MAX,
    MAGIC,
    Entries,
    Slots,
    SlotState,
    right_crcs,
)

Sequences = npt.NDArray[np.uint64]
_HEAD = np.uint64(MAGIC | FORMAT_VERSION << 32)
_HEAD_MASK = np.uint64((1 << 48) - 1)
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RecoveredEntries:
    """What a table says; each `slots[i]` belongs to `entries[i]`, in slot order."""

    ready_slots: Slots
    ready: Entries
    reserved_slots: Slots
    reserved: Entries  # The engine's id stands in `hash`.
    # Not zero, yet no entry of this pool: torn, foreign or old. A memory pool holds these slots
    # back until no lease of its former life can be running.
    void_slots: Slots


def recover(table: Bytes, generation: int, epochs: Mapping[bytes, int]) -> RecoveredEntries:
    """Read a table; `epochs` gives the current epoch of each namespace, by fingerprint."""
    entries = table[: len(table) // ENTRY_BYTES * ENTRY_BYTES].view(ENTRY)
    words = table.view(np.uint64).reshape(-1, ENTRY_BYTES // 8)
    is_used: _Mask = np.asarray(words.any(axis=1))
    found = _chosen(entries, is_used)
    sound = sound_entries(found, generation)
    reserved = sound & (found["state"] == SlotState.RESERVED)
    ready = sound & (found["state"] == SlotState.READY) & _current(found, epochs)
    ready[ready] = newest_entries(_chosen(found, ready))
    slots = np.flatnonzero(is_used).astype(np.uint32)
    return RecoveredEntries(
        ready_slots=slots[ready],
        ready=_chosen(found, ready),
        reserved_slots=slots[reserved],
        reserved=_chosen(found, reserved),
        void_slots=slots[~(ready | reserved)],
    )


def _chosen(entries: Entries, mask: _Mask) -> Entries:
    """`entries[mask]`; that alone was half of the time to read a million."""
    if mask.all():
        return entries
    rows = np.take(entries.view(np.uint8).reshape(-1, ENTRY_BYTES), np.flatnonzero(mask), axis=0)
    return rows.reshape(-1).view(ENTRY)


def sound_entries(entries: Entries, generation: int) -> _Mask:
    """Which are right by themselves; the CRC, the dearest, only where the rest is right."""
    words = entries.view("<u8").reshape(-1, ENTRY_BYTES // 8)  # As words, in half the time.
    sound: _Mask = (words[:, 0] & _HEAD_MASK) == _HEAD
    sound &= words[:, 1] == generation
    sound &= entries["hash_bytes"] <= HASH_BYTES_MAX
    sound[sound] = right_crcs(entries if sound.all() else entries[sound])
    return sound


def _current(entries: Entries, epochs: Mapping[bytes, int]) -> _Mask:
    current = np.zeros(len(entries), np.bool_)
    for fingerprint, epoch in epochs.items():
        same = (entries["fingerprint"] == np.frombuffer(fingerprint, np.uint8)).all(axis=1)
        current |= same & (entries["epoch"] == epoch)
    return current


def newest_entries(entries: Entries) -> _Mask:
    """Which have the highest sequence number of their block."""
    hashes = entries["hash"].view(np.uint64)
    namespaces = entries["fingerprint"].view(np.uint64)
    return newest_of([*hashes.T, *namespaces.T], entries["sequence"])


def newest_of(keys: Sequence[npt.NDArray[np.uint64]], sequences: Sequences) -> _Mask:
    """Which have the highest sequence number of those that agree in all keys.

    The first key is to be the one that differs most: few blocks occur twice, so the others are
    looked at only where it agrees.
    """
    newest = np.ones(len(sequences), np.bool_)
    ascending = np.sort(keys[0])
    shared = ascending[1:][ascending[1:] == ascending[:-1]]
    if not len(shared):
        return newest
    doubtful = np.flatnonzero(np.isin(keys[0], shared))
    order = np.lexsort((sequences[doubtful], *(key[doubtful] for key in keys)))
    rows = doubtful[order]
    has_newer = np.ones(len(rows) - 1, np.bool_)
    for key in keys:
        has_newer &= key[rows[1:]] == key[rows[:-1]]
    newest[rows[:-1][has_newer]] = False
    return newest
