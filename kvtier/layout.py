"""How blocks lie in a segment of the NVMe pool: what the core and the pools must agree on."""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_BYTES = 256 << 20
# What shards and slots are padded to: every disk's alignment, so that a file can move to another.
PAD_BYTES = 4096
# Of each shard of a sealed block, behind its shards: a nonce of 12 bytes and a tag of 16 (AES-GCM).
SEAL_BYTES = 28


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How one block lies in its slot: its shards side by side, each padded; then, where it is
    sealed (encrypted and authenticated), the seals of its shards, padded too."""

    shard_bytes: int
    shard_count: int
    is_sealed: bool = False

    @property
    def padded_shard_bytes(self) -> int:
        return -(-self.shard_bytes // PAD_BYTES) * PAD_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.padded_shard_bytes * self.shard_count + self.seals_bytes

    @property
    def seals_bytes(self) -> int:
        """What the slot has behind its shards."""
        if not self.is_sealed:
            return 0
        return -(-SEAL_BYTES * self.shard_count // PAD_BYTES) * PAD_BYTES

    @property
    def payload_bytes(self) -> int:
        return self.shard_bytes * self.shard_count


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Whose a segment is, since when, and how its slots lie."""

    segment: int
    fingerprint: bytes
    layout: SlotLayout
    slot_count: int
    sequence: int
    key_id: int = 0  # Of the key that its blocks are sealed with; 0: they are not.
