"""What the core knows of a namespace from its opening on."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.layout import SlotLayout
from kvtier.types import NamespaceId


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    namespace: NamespaceId
    hash_bytes: int
    slot_bytes: int
    shard_count: int
    shard_bytes: int = 0
    fingerprint: bytes = b""
    chained: bool = True  # False: every block is there or not by itself.
    block_tokens: int = 16
    block_count_max: int = 0  # As many as memory may ever hold.
    tenant: str = ""
    key_salt: bytes = b""  # Of what policies know blocks by.

    @property
    def layout(self) -> SlotLayout:
        """How a block of it lies in the pool of a tier below memory."""
        return SlotLayout(self.shard_bytes, self.shard_count)

    @property
    def block_bytes(self) -> int:
        """What one block takes of the pool, padding included."""
        return self.slot_bytes * self.shard_count
