"""Blocks and their entries, sealed: encrypted and authenticated with AES-256-GCM (NIST SP 800-38D).

Of a block each shard is sealed by itself, under a nonce of chance, which stands with the tag behind
the block's shards. Of an entry of the slot table the block's hash, its parent's and the payload's
checksum are encrypted; the tag takes the place of the namespace's fingerprint, which the segment's
header has too. Everything else that an entry says is authenticated, its slot included, and a
payload only opens in the slot, the life of the segment and the namespace that it was sealed for. So
whoever can write to the disk can make blocks miss, and cannot make one block pass for another.

Keys of their own for payloads and entries are derived for each pool (HKDF, RFC 5869), salted with
its generation. The nonce of an entry is its sequence number, which no two entries of a pool share,
with its slot; an entry written twice says the same twice.

Batches run in drivers' threads; the cipher lets go of the GIL for a payload.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.io.alignment import aligned_buffer
from kvtier.io.driver import Access
from kvtier.layout import SEAL_BYTES, SegmentHeader, SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.key_file import SECRET_BYTES, Key
from kvtier.pools.slot_table import ENTRY, ENTRY_BYTES, Entries, Slots, SlotState, entry_crcs

NONCE_BYTES, TAG_BYTES = 12, 16
assert NONCE_BYTES + TAG_BYTES == SEAL_BYTES
_FREE_BUFFERS_MAX = 32

# An entry's bytes: what is encrypted, what is authenticated as it is, where the tag goes.
_FINGERPRINT = slice(16, 32)
_HASHES = slice(32, 96)
_SEQUENCE = slice(96, 104)
_CHECKSUM = slice(112, 120)
_HASHES_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Ciphers:
    """Of one key in one pool."""

    payloads: AESGCM
    entries: AESGCM


class Sealer:
    """The keys of one pool. Any thread may seal and open."""

    def __init__(self, keys: Sequence[Key], generation: int) -> None:
        """The first key seals."""
        self.key_id = keys[0].id
        self._ciphers: Mapping[int, _Ciphers] = {
            key.id: _Ciphers(
                AESGCM(_derived(key, generation, b"payloads")),
                AESGCM(_derived(key, generation, b"entries")),
            )
            for key in keys
        }
        self.buffers = SealedBuffers()

    def knows(self, key_id: int) -> bool:
        return key_id in self._ciphers

    def stage(self, places: Iterable[tuple[SegmentHeader, int]]) -> SealedBlocks:
        """For the payloads of one batch: of each member its segment and slot."""
        return SealedBlocks(self, [SealedPlace(header, slot) for header, slot in places])

    def stage_pages(self, places: Mapping[int, tuple[int, int]]) -> SealedPages:
        """For pages of the slot table: of those members that are sealed (key id, first slot)."""
        return SealedPages(self, places)

    # --------------------------------------------------------------------------------- payloads

    def seal_block(self, place: SealedPlace, shards: Sequence[Bytes], out: Bytes) -> None:
        """Into `out`, as long as a slot. The padding of shards is left as it is there."""
        cipher = self._ciphers[place.header.key_id].payloads
        layout = place.header.layout
        seals = bytearray()
        # From the first shard on: a tag falls where the next one, or the seals, come to lie.
        for number, shard in enumerate(shards):
            start = number * layout.padded_shard_bytes
            end = start + layout.shard_bytes
            nonce = secrets.token_bytes(NONCE_BYTES)
            sealed = out[start : end + TAG_BYTES]
            cipher.encrypt_into(
                nonce, shard[: layout.shard_bytes].data, place.facts(number), sealed.data
            )
            seals += nonce + _raw(sealed[layout.shard_bytes :])
        first = layout.slot_bytes - layout.seals_bytes
        np.copyto(out[first : first + len(seals)], np.frombuffer(seals, np.uint8))

    def open_block(self, place: SealedPlace, sealed: Bytes, shards: Sequence[Bytes]) -> bool:
        """Out of `sealed`, which is used up; False: not what was sealed for this place."""
        cipher = self._ciphers[place.header.key_id].payloads
        layout = place.header.layout
        first = layout.slot_bytes - layout.seals_bytes
        seals = _raw(sealed[first : first + SEAL_BYTES * layout.shard_count])
        # From the last shard on: its tag goes where the next one, opened by now, has been.
        for number in reversed(range(layout.shard_count)):
            seal = seals[number * SEAL_BYTES :][:SEAL_BYTES]
            start = number * layout.padded_shard_bytes
            end = start + layout.shard_bytes
            np.copyto(sealed[end : end + TAG_BYTES], np.frombuffer(seal[NONCE_BYTES:], np.uint8))
            try:
                cipher.decrypt_into(
                    seal[:NONCE_BYTES],
                    sealed[start : end + TAG_BYTES].data,
                    place.facts(number),
                    shards[number][: layout.shard_bytes].data,
                )
            except InvalidTag:
                return False
        return True

    # ---------------------------------------------------------------------------------- entries

    def seal_entries(self, key_id: int, first_slot: int, entries: Entries) -> None:
        """In place, those that are READY; they are the ones of slots from `first_slot` on."""
        cipher = self._ciphers[key_id].entries
        raw = entries.view(np.uint8).reshape(len(entries), ENTRY_BYTES)
        ready = np.flatnonzero(entries["state"] == SlotState.READY)
        for row in ready.tolist():
            entry = raw[row]
            slot = first_slot + row
            secret = _raw(entry[_HASHES]) + _raw(entry[_CHECKSUM])
            sealed = cipher.encrypt(_nonce_of(entry, slot), secret, _entry_facts(entry, slot))
            _put_secret(entry, sealed)
            entry[_FINGERPRINT] = np.frombuffer(sealed[len(secret) :], np.uint8)
        if len(ready):
            sealed_entries = entries[ready]
            entries["crc"][ready] = entry_crcs(sealed_entries)

    def open_entries(
        self, slots: Slots, entries: Entries, headers: Iterable[SegmentHeader]
    ) -> npt.NDArray[np.bool_]:
        """In place, those that are whole by their CRC and READY, each of its segment's key; which
        of them are what was sealed."""
        raw = entries.view(np.uint8).reshape(len(entries), ENTRY_BYTES)
        opened = np.zeros(len(entries), np.bool_)
        for row, (slot, header) in enumerate(zip(slots.tolist(), headers, strict=True)):
            entry = raw[row]
            tag = _raw(entry[_FINGERPRINT])
            entry[_FINGERPRINT] = np.frombuffer(header.fingerprint, np.uint8)
            sealed = _raw(entry[_HASHES]) + _raw(entry[_CHECKSUM]) + tag
            try:
                secret = self._ciphers[header.key_id].entries.decrypt(
                    _nonce_of(entry, slot), sealed, _entry_facts(entry, slot)
                )
            except InvalidTag:
                continue
            _put_secret(entry, secret)
            opened[row] = True
        entries["crc"] = entry_crcs(entries)
        return opened


@dataclass(frozen=True, slots=True)
class SealedPlace:
    """Where a payload lies: it opens there only."""

    header: SegmentHeader
    slot: int

    def facts(self, shard: int) -> bytes:
        header = self.header
        return header.fingerprint + struct.pack(
            "<QQIII",
            header.sequence,
            header.layout.shard_bytes,
            header.layout.shard_count,
            self.slot,
            shard,
        )


class SealedBuffers:
    """Memory for sealed payloads on their way, used again: touching new memory costs as much as the
    cipher does. Any thread may take and give back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards the rest.
        self._free: list[Bytes] = []

    def take(self, count_bytes: int) -> Bytes:
        with self._lock:
            for number, one in enumerate(self._free):
                if len(one) == count_bytes:
                    return self._free.pop(number)
        return aligned_buffer(count_bytes)

    def give_back(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.append(buffer)
            del self._free[:-_FREE_BUFFERS_MAX]  # The oldest: of a layout that is used no more.


class SealedBlocks:
    """Implements kvtier.io.driver.Stage for the payloads of one batch."""

    def __init__(self, sealer: Sealer, places: Sequence[SealedPlace]) -> None:
        self._sealer = sealer
        self._places = places
        self._taken: dict[int, Bytes] = {}  # By member.

    def before_write(self, access: Access) -> Access:
        place = self._places[access.member]
        out = self._take(access.member, place.header.layout)
        self._sealer.seal_block(place, access.views[: place.header.layout.shard_count], out)
        return Access(access.member, access.offset, (out,))

    def before_read(self, access: Access) -> Access:
        out = self._take(access.member, self._places[access.member].header.layout)
        return Access(access.member, access.offset, (out,))

    def open(self, member: int, shards: Sequence[Bytes]) -> bool:
        """After a read: whether the shards hold now what was sealed."""
        return self._sealer.open_block(self._places[member], self._taken[member], shards)

    def release(self, member: int) -> None:
        taken = self._taken.pop(member, None)
        if taken is not None:
            self._sealer.buffers.give_back(taken)

    def _take(self, member: int, layout: SlotLayout) -> Bytes:
        """A call that is done again in pieces asks twice."""
        if member not in self._taken:
            self._taken[member] = self._sealer.buffers.take(layout.slot_bytes)
        return self._taken[member]


class SealedPages:
    """Implements kvtier.io.driver.Stage for pages of the slot table, which are copies already."""

    def __init__(self, sealer: Sealer, places: Mapping[int, tuple[int, int]]) -> None:
        """`places`: of members with entries to be sealed, (key id, first slot)."""
        self._sealer = sealer
        self._places = places

    def before_write(self, access: Access) -> Access:
        place = self._places.get(access.member)
        if place is not None:
            [view] = access.views
            self._sealer.seal_entries(*place, view.view(ENTRY))
        return access

    def before_read(self, access: Access) -> Access:
        return access

    def release(self, member: int) -> None:
        pass


def _derived(key: Key, generation: int, what: bytes) -> bytes:
    salt = generation.to_bytes(8, "little")
    return HKDF(SHA256(), SECRET_BYTES, salt, b"kvtier nvme 1 " + what).derive(key.secret)


def _raw(few: Bytes) -> bytes:
    """Of an entry, a tag, the seals of one block: at most some hundred bytes."""
    return few.tobytes()  # gil-ok: see there.


def _nonce_of(entry: Bytes, slot: int) -> bytes:
    return _raw(entry[_SEQUENCE]) + slot.to_bytes(4, "little")


def _entry_facts(entry: Bytes, slot: int) -> bytes:
    """What is authenticated as it is: all but what is encrypted and the CRC."""
    raw = _raw(entry)
    plain = raw[: _HASHES.start] + raw[_HASHES.stop : _CHECKSUM.start] + raw[_CHECKSUM.stop : -4]
    return plain + slot.to_bytes(4, "little")


def _put_secret(entry: Bytes, secret: bytes) -> None:
    entry[_HASHES] = np.frombuffer(secret[:_HASHES_BYTES], np.uint8)
    entry[_CHECKSUM] = np.frombuffer(secret[_HASHES_BYTES : _HASHES_BYTES + 8], np.uint8)
