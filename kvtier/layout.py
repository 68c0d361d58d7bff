"""How blocks lie in a segment of the NVMe pool: what the core and the pools must agree on."""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_BYTES = 256 << 20
# What shards and slots are padded to: every disk's alignment, so that a file can move to another.
PAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How one block lies in its slot: its shards side by side, each padded."""

    shard_bytes: int
    shard_count: int

    @property
    def padded_shard_bytes(self) -> int:
        return -(-self.shard_bytes // PAD_BYTES) * PAD_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.padded_shard_bytes * self.shard_count

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
    key_id: int = 0
