"""Slot table: the pool's own record of what each slot holds; recovery reads nothing else.

    offset  size  field
         0     4  magic, b"KVT1"
         4     2  format version, little-endian like every number here
         6     1  block hash length
         7     1  state
         8     8  generation of the pool that wrote the entry
        16    16  namespace fingerprint
        32    32  block hash, zero-padded; while RESERVED the engine's id (zero: the daemon's own)
        64    32  parent block hash, zero for the first block of a prefix
        96     8  sequence number
       104     8  payload length in bytes, all shards
       112     8  xxh3-64 of the payload, 0 while not computed (memory tiers only)
       120     4  epoch of the namespace
       124     4  CRC-32 of bytes 0..123

A slot holds a block if and only if
  (0) the state is READY, and
  (1) the CRC at 124 matches (magic and version are under it), and
  (2) generation and epoch are the pool's and the namespace's current ones, and
  (3) the payload's checksum matches the one at 112.

Recovery (`recovery.py`) checks (0) to (2), each read from a lower tier checks (3). The writer may
die between any two stores: an entry is voided first (its head becomes zero), then filled, and gets
its head last; the CRC finds every mixture that an unordered medium could make of it all the same.
An entry of zeros holds nothing, so a table that was just grown or punched needs no writing.

One thread writes; slot numbers are never reused, so the table only grows (a limit: 2^32 slots) and
the pages of withdrawn ranges are punched out.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.io.memory import create_memfd, punch_hole
from kvtier.memory import Bytes, Mapping
from kvtier.types import BlockHash, EngineId

ENTRY_BYTES = 128
HASH_BYTES_MAX = 32
MAGIC = int.from_bytes(b"KVT1", "little")
FORMAT_VERSION = 1
# Growing maps the table anew, which costs a page fault for each page touched later: every 32,768
# slots (64 GiB of 2 MiB blocks) that is nothing, and a table of 4 MiB is not much either.
GROW_SLOTS = 32_768
SLOT_COUNT_MAX = 1 << 32
_WRITTEN_RUN_SLOTS = 32  # Shorter runs, on average, are not worth a call each.

ENTRY = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("hash_bytes", "u1"),
        ("state", "u1"),
        ("generation", "<u8"),
        ("fingerprint", "u1", (16,)),
        ("hash", "u1", (HASH_BYTES_MAX,)),
        ("parent", "u1", (HASH_BYTES_MAX,)),
        ("sequence", "<u8"),
        ("payload_bytes", "<u8"),
        ("checksum", "<u8"),
        ("epoch", "<u4"),
        ("crc", "<u4"),
    ]
)
assert ENTRY.itemsize == ENTRY_BYTES
# Their places in an entry read as 8-byte words.
FINGERPRINT_WORD, SEQUENCE_WORD, PAYLOAD_WORD, CHECKSUM_WORD = 2, 12, 13, 14

Entries = npt.NDArray[np.void]
Slots = npt.NDArray[np.uint32]


class SlotState(IntEnum):
    """What an entry says of its slot; other values are void."""

    GONE = 0
    RESERVED = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What all blocks of one write have in common."""

    fingerprint: bytes
    epoch: int
    payload_bytes: int  # All shards.


class SlotTable:
    """The table in its own memfd, which an adopter of the pool could read after our death."""

    def __init__(
        self, generation: int, *, grow_slots: int = GROW_SLOTS, fd: int | None = None
    ) -> None:
        """`fd`: the table of a former life, which is gone on with; it is ours then."""
        step_bytes = grow_slots * ENTRY_BYTES
        assert step_bytes % mmap.PAGESIZE == 0, "the table grows by whole pages"
        self.generation = generation
        self._grow_slots = grow_slots
        self.fd = create_memfd("kvtier-slot-table", step_bytes) if fd is None else fd
        self._mapping = Mapping(self.fd, os.fstat(self.fd).st_size)
        self._words = _as_words(self._mapping.array)

    @property
    def slot_count(self) -> int:
        """Slots that the table has room for now."""
        return len(self._words)

    def entries(self, first: int, count: int) -> Entries:
        """A copy of `count` entries from slot `first` on."""
        return self._words[first : first + count].copy().view(ENTRY).reshape(-1)

    def used_rows(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Which of `count` entries from slot `first` on hold something, counted from `first`."""
        return np.flatnonzero(self._words[first : first + count, 0])

    def read_bytes(self) -> Bytes:
        """A copy of the whole table."""
        return self.read_ranges([range(self.slot_count)])

    def read_ranges(self, ranges: Sequence[range]) -> Bytes:
        """A copy of the entries of these slots, one range after another."""
        return np.concatenate([read_entries(self.fd, one) for one in ranges])

    def extend(self, slot_count: int) -> None:
        """Have room for slots 0 .. slot_count - 1; new entries hold nothing."""
        if slot_count <= self.slot_count:
            return
        assert slot_count <= SLOT_COUNT_MAX, "slot numbers have 32 bits"
        length_bytes = -(-slot_count // self._grow_slots) * self._grow_slots * ENTRY_BYTES
        os.ftruncate(self.fd, length_bytes)
        grown = Mapping(self.fd, length_bytes)
        self._words = _as_words(grown.array)
        self._mapping.close()
        self._mapping = grown

    def write_reserved(self, slots: Slots, engine: EngineId | None) -> None:
        """These slots are being filled by `engine` (None: by the daemon itself)."""
        entries = self._blank(len(slots), SlotState.RESERVED)
        if engine is not None:
            entries["hash"] = np.frombuffer(engine.ljust(HASH_BYTES_MAX, b"\0"), np.uint8)
        self._write(slots, entries)

    def write_ready(
        self,
        slots: Slots,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        facts: BlockFacts,
        *,
        sequence: int,
        checksums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """These slots hold these blocks; sequence numbers ascend from `sequence`."""
        assert len(slots) == len(hashes) == len(parents), "one hash and one parent a slot"
        count = len(slots)
        if count == 0:
            return
        hash_bytes = len(hashes[0])
        no_parent = BlockHash(bytes(hash_bytes))
        entries = self._blank(count, SlotState.READY)
        entries["hash_bytes"] = hash_bytes
        entries["fingerprint"] = np.frombuffer(facts.fingerprint, np.uint8)
        entries["hash"][:, :hash_bytes] = _packed(hashes, hash_bytes)
        entries["parent"][:, :hash_bytes] = _packed(
            [parent or no_parent for parent in parents], hash_bytes
        )
        entries["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint64)
        entries["payload_bytes"] = facts.payload_bytes
        entries["epoch"] = facts.epoch
        if checksums is not None:
            entries["checksum"] = checksums
        self._write(slots, entries)

    def write_checksums(self, slots: Slots, checksums: npt.NDArray[np.uint64]) -> int:
        """Add the payloads' checksums to READY entries; the others are left as they are.

        Returns how many were READY.
        """
        entries = self._words[slots].view(ENTRY).reshape(-1)
        ready = entries["state"] == SlotState.READY
        entries["checksum"] = checksums
        self._write(slots[ready], entries[ready])
        return int(ready.sum())

    def adopt(self, slots: Slots, entries: Entries) -> None:
        """Entries that recovery found sound; they are taken as they are. Slots ascend.

        Runs of slots go through the file: there the first use of a page costs half of what it does
        in the mapping, which was a fifth of the time to recover a large pool.
        """
        is_first = np.ones(len(slots), np.bool_)
        is_first[1:] = slots[1:] != slots[:-1] + np.uint32(1)
        firsts = np.flatnonzero(is_first)
        if len(firsts) * _WRITTEN_RUN_SLOTS >= len(slots):
            self._words[slots] = entries.view(np.uint64).reshape(len(entries), ENTRY_BYTES // 8)
            return
        raw = entries.view(np.uint8).reshape(len(entries), ENTRY_BYTES)
        starts, ends = firsts.tolist(), [*firsts[1:].tolist(), len(slots)]
        for start, end, slot in zip(starts, ends, slots[firsts].tolist(), strict=True):
            written = os.pwrite(self.fd, raw[start:end], slot * ENTRY_BYTES)
            assert written == (end - start) * ENTRY_BYTES, "memory has no room for the slot table"

    def checksums(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """The payload checksums in the entries of these slots; 0 where there is none."""
        checksums: npt.NDArray[np.uint64] = self._words[slots, CHECKSUM_WORD]
        return checksums

    def write_gone(self, slots: Slots) -> None:
        """These slots hold nothing."""
        self._words[slots, 0] = 0
        self._words[slots, 1:] = 0

    def withdraw(self, first: int, count: int) -> None:
        """Slots first .. first + count - 1 are no more; the pages that only they used go back."""
        self._words[first : first + count] = 0
        page_first = -(-first * ENTRY_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        page_end = (first + count) * ENTRY_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
        if page_end > page_first:
            punch_hole(self.fd, page_first, page_end - page_first)

    def close(self) -> None:
        self._words = np.empty((0, ENTRY_BYTES // 8), np.uint64)
        self._mapping.close()
        os.close(self.fd)

    def _blank(self, count: int, state: SlotState) -> Entries:
        entries: Entries = np.zeros(count, ENTRY)
        entries["magic"] = MAGIC
        entries["version"] = FORMAT_VERSION
        entries["state"] = state
        entries["generation"] = self.generation
        return entries

    def _write(self, slots: Slots, entries: Entries) -> None:
        entries["crc"] = entry_crcs(entries)
        store_entries(self._words, slots, entries)


def read_entries(fd: int, slots: range) -> Bytes:
    """A copy of the entries of these slots. From the file: reading a hole in a mapping fills it."""
    first, length = slots.start * ENTRY_BYTES, len(slots) * ENTRY_BYTES
    parts = []
    while length:  # One call gives 2 GiB at most.
        part = os.pread(fd, length, first)
        assert part, "the slot table ends before its slots"
        parts.append(part)
        first, length = first + len(part), length - len(part)
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)


def store_entries(words: npt.NDArray[np.uint64], slots: Slots, entries: Entries) -> None:
    """Put entries into the table in the order that makes a torn one void: head zero, rest, head.

    The head is the 8 bytes from magic to state.
    """
    new = entries.view(np.uint64).reshape(len(entries), ENTRY_BYTES // 8)
    words[slots, 0] = 0
    words[slots, 1:] = new[:, 1:]
    words[slots, 0] = new[:, 0]


def right_crcs(entries: Entries) -> npt.NDArray[np.bool_]:
    """Which of these entries have the CRC that their bytes ask for; 0.04 µs each where all do.

    Bytes with their right CRC behind them bring the CRC's register into a state that does not
    depend on them. So as many right entries as stand in a group have one CRC as a whole, whichever
    they are. One wrong entry always changes it, several with the chance of a CRC: all but 1 in
    2^32. Of a group that is not right as a whole each entry is looked at by itself.
    """
    right = np.zeros(len(entries), np.bool_)
    raw = np.ascontiguousarray(entries).view(np.uint8)
    whole = len(entries) - len(entries) % _GROUP_ENTRIES
    for first in range(0, whole, _GROUP_ENTRIES):
        group = raw[first * ENTRY_BYTES : (first + _GROUP_ENTRIES) * ENTRY_BYTES]
        right[first : first + _GROUP_ENTRIES] = zlib.crc32(group) == _GROUP_CRC
    doubtful = np.flatnonzero(~right)
    for first in range(0, len(doubtful), _GROUP_ENTRIES):  # Their bytes become Python objects.
        some = doubtful[first : first + _GROUP_ENTRIES]
        checked = entries[some]
        right[some] = entry_crcs(checked) == checked["crc"]
    return right


def entry_crcs(entries: Entries) -> npt.NDArray[np.uint32]:
    """CRC-32 of bytes 0..123 of each entry; 0.25 µs each, the fastest of six ways measured."""
    covered = entries.view(np.uint8).reshape(len(entries), ENTRY_BYTES)[:, : ENTRY_BYTES - 4]
    rows: list[Any] = np.ascontiguousarray(covered).view(f"V{ENTRY_BYTES - 4}").ravel().tolist()
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))


def _group_crc() -> int:
    entry = bytes(ENTRY_BYTES - 4)
    return zlib.crc32((entry + zlib.crc32(entry).to_bytes(4, "little")) * _GROUP_ENTRIES)


_GROUP_ENTRIES = 1024  # 128 KiB, for which zlib lets go of the GIL.
_GROUP_CRC = _group_crc()


def _as_words(table: Bytes) -> npt.NDArray[np.uint64]:
    return table.view(np.uint64).reshape(-1, ENTRY_BYTES // 8)


def _packed(hashes: Sequence[BlockHash], hash_bytes: int) -> Bytes:
    packed = b"".join(hashes)
    assert len(packed) == len(hashes) * hash_bytes, "block hashes of unequal length"
    return np.frombuffer(packed, np.uint8).reshape(len(hashes), hash_bytes)
