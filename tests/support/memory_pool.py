"""A pool too simple to be wrong: arrays, and table entries packed by hand one at a time."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.memory import Bytes
from kvtier.types import BlockHash, EngineId

_ENTRY = struct.Struct("<4sHBBQ16s32s32sQQQI")


def pack_entry(
    *,
    state: int,
    generation: int,
    hash_bytes: int = 0,
    fingerprint: bytes = b"",
    block: bytes = b"",
    parent: bytes = b"",
    sequence: int = 0,
    payload_bytes: int = 0,
    checksum: int = 0,
    epoch: int = 0,
) -> bytes:
    """One entry of a slot table, from the format's description alone."""
    body = _ENTRY.pack(
        b"KVT1",
        1,
        hash_bytes,
        state,
        generation,
        fingerprint,
        block,
        parent,
        sequence,
        payload_bytes,
        checksum,
        epoch,
    )
    return body + struct.pack("<I", zlib.crc32(body))


class MemoryPool:
    """Implements kvtier.pools.pool.Pool for one namespace, in this process only."""

    def __init__(
        self,
        *,
        slot_count: int,
        shard_count: int,
        shard_bytes: int,
        fingerprint: bytes,
        generation: int,
    ) -> None:
        self.generation = generation
        self._fingerprint = fingerprint
        self._payload_bytes = shard_bytes * shard_count
        self._shard_bytes = shard_bytes
        padded_bytes = -(-shard_bytes // 4096) * 4096
        self._slots = [
            [np.zeros(padded_bytes, np.uint8) for _ in range(shard_count)]
            for _ in range(slot_count)
        ]
        self._ready: dict[int, dict[str, int | bytes]] = {}
        self._entries: list[bytes] = [bytes(128)] * slot_count

    def views(self, slot: int) -> list[Bytes]:
        return [shard[: self._shard_bytes] for shard in self._slots[slot]]

    def padded_views(self, slot: int) -> list[Bytes]:
        return list(self._slots[slot])

    def write_reserved(self, slots: npt.NDArray[np.uint32], engine: EngineId | None) -> None:
        for slot in slots.tolist():
            self._ready.pop(slot, None)
            self._entries[slot] = pack_entry(
                state=1, generation=self.generation, block=engine or b""
            )

    def write_ready(
        self,
        slots: npt.NDArray[np.uint32],
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        *,
        epoch: int,
        sequence: int,
    ) -> None:
        for offset, slot in enumerate(slots.tolist()):
            self._ready[slot] = {
                "hash_bytes": len(hashes[offset]),
                "block": hashes[offset],
                "parent": parents[offset] or b"",
                "epoch": epoch,
                "sequence": sequence + offset,
            }
            self._pack_ready(slot)

    def checksums(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        return np.array([self.stored_checksum(slot) for slot in slots.tolist()], np.uint64)

    def stored_checksum(self, slot: int) -> int:
        return int(self._ready[slot].get("checksum", 0)) if slot in self._ready else 0

    def write_checksums(
        self, slots: npt.NDArray[np.uint32], checksums: npt.NDArray[np.uint64]
    ) -> None:
        for slot, checksum in zip(slots.tolist(), checksums.tolist(), strict=True):
            if slot in self._ready:
                self._ready[slot]["checksum"] = checksum
                self._pack_ready(slot)

    def write_gone(self, slots: npt.NDArray[np.uint32]) -> None:
        for slot in slots.tolist():
            self._ready.pop(slot, None)
            self._entries[slot] = bytes(128)

    def table_bytes(self) -> Bytes:
        return np.frombuffer(b"".join(self._entries), np.uint8)

    def close(self) -> None:
        self._slots.clear()

    def _pack_ready(self, slot: int) -> None:
        self._entries[slot] = pack_entry(
            state=2,
            generation=self.generation,
            fingerprint=self._fingerprint,
            payload_bytes=self._payload_bytes,
            **self._ready[slot],  # type: ignore[arg-type]
        )
