"""Pool: the owner of one tier's bytes. It knows where a slot lies and what its table says of it;
it decides nothing.

The shell calls these methods as the core's instructions say; `slots` in one call belong to one
namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.memory import Bytes
from kvtier.pools.slot_table import Slots
from kvtier.types import BlockHash, EngineId, SlabId, SlabSetId


@dataclass(frozen=True, slots=True)
class SlabBinding:
    """A slab set and the namespace it belongs to from now on."""

    slab_set: SlabSetId
    slabs: tuple[SlabId, ...]  # One a shard, shard 0 first.
    fingerprint: bytes
    slot_first: int
    slot_count: int
    slot_bytes: int  # Distance of two slots in one shard's slab.
    shard_bytes: int  # Payload of one shard; the rest of the slot is padding.

    @property
    def payload_bytes(self) -> int:
        """Payload of one block, all shards."""
        return self.shard_bytes * len(self.slabs)


class Pool(Protocol):
    """What the mover and the server need of a tier whose slots can be addressed as memory."""

    @property
    def generation(self) -> int:
        """Number of this life of the pool; slots and entries of another life are void."""
        ...

    def views(self, slot: int) -> list[Bytes]:
        """The slot's payload, one view a shard. Held only while the slot is pinned or reserved."""
        ...

    def padded_views(self, slot: int) -> list[Bytes]:
        """As `views`, with the padding up to PAD_BYTES behind each shard, which a lower tier writes
        and fills along; AssertionError when the slot has no room for it."""
        ...

    def write_reserved(self, slots: Slots, engine: EngineId | None) -> None:
        """Table: these slots are being filled by `engine` (None: by the daemon itself)."""
        ...

    def write_ready(
        self,
        slots: Slots,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        *,
        epoch: int,
        sequence: int,
    ) -> None:
        """Table: these slots hold these blocks; sequence numbers ascend from `sequence`."""
        ...

    def write_checksums(self, slots: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        """Table: add the payload checksums to READY entries."""
        ...

    def checksums(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """The payloads' checksums as the table has them; 0 where none is computed."""
        ...

    def stored_checksum(self, slot: int) -> int:
        """The same of one slot."""
        ...

    def write_gone(self, slots: Slots) -> None:
        """Table: these slots hold nothing."""
        ...

    def table_bytes(self) -> Bytes:
        """A copy of the slot table, entry 0 first, as recovery reads it."""
        ...

    def close(self) -> None:
        """Give everything back that the pool still owns."""
        ...
