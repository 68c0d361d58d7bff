"""DRAM pool: slots in memfd slabs that engines map, and their table in a memfd of its own.

Slabs come from the stock unbound (`add_slab`), are bound in sets of one a shard, and leave as a set
(`drop`), when nobody maps or pins them any more. Invariants: a slab is unbound or in one set; the
slot ranges of the sets are disjoint and never come back.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.layout import SlotLayout
from kvtier.memory import Bytes
from kvtier.pools.pool import SlabBinding
from kvtier.pools.slabs import Slab
from kvtier.pools.slot_table import BlockFacts, Slots, SlotTable
from kvtier.pools.source import placement_finding
from kvtier.types import BlockHash, EngineId, SlabId, SlabSetId


class DramPool:
    """Implements `Pool`. All methods belong to one thread; views may be used in any."""

    def __init__(self, generation: int, *, table_fd: int | None = None) -> None:
        """`table_fd`: the slot table of a former life of this pool; it is ours then."""
        self._table = SlotTable(generation, fd=table_fd)
        self._slabs: dict[SlabId, Slab] = {}
        self._unbound: set[SlabId] = set()
        # Ascending by slot_first; sets are bound in ascending order, so appending keeps it.
        self._bindings: list[SlabBinding] = []
        self._slot_next = 0

    @property
    def generation(self) -> int:
        return self._table.generation

    @property
    def table(self) -> SlotTable:
        return self._table

    def add_slab(self, slab: Slab) -> None:
        """The pool owns this slab from now on, and binds it when told to."""
        assert slab.id not in self._slabs, f"slab {slab.id} was added before"
        self._slabs[slab.id] = slab
        self._unbound.add(slab.id)

    def bind(self, binding: SlabBinding) -> None:
        """These slabs hold slots slot_first .. slot_first + slot_count - 1 from now on."""
        assert set(binding.slabs) <= self._unbound, "a slab is bound twice, or unknown"
        assert len(set(binding.slabs)) == len(binding.slabs), "one slab for two shards"
        assert binding.slot_first >= self._slot_next, "slot numbers are given once, ascending"
        assert 0 < binding.shard_bytes <= binding.slot_bytes, "the payload exceeds the slot"
        for slab_id in binding.slabs:
            room_bytes = self._slabs[slab_id].length_bytes
            assert binding.slot_count * binding.slot_bytes <= room_bytes, "slots exceed the slab"
        self._slot_next = binding.slot_first + binding.slot_count
        self._table.extend(self._slot_next)
        self._unbound.difference_update(binding.slabs)
        self._bindings.append(binding)

    def drop(self, slab_set: SlabSetId) -> list[Slab]:
        """Forget a set that nobody maps, pins or copies; its slabs are the caller's to punch."""
        (binding,) = [bound for bound in self._bindings if bound.slab_set == slab_set]
        self._bindings.remove(binding)
        self._table.withdraw(binding.slot_first, binding.slot_count)
        return [self._slabs.pop(slab_id) for slab_id in binding.slabs]

    def slab(self, slab_id: SlabId) -> Slab:
        return self._slabs[slab_id]

    def slab_fd(self, slab_id: SlabId) -> int:
        """The file to pass to a worker; it stays ours."""
        return self._slabs[slab_id].fd

    def binding(self, slot: int) -> SlabBinding:
        """The set that holds this slot; AssertionError when there is none."""
        place = bisect_right(self._bindings, slot, key=lambda bound: bound.slot_first)
        assert place > 0, f"slot {slot} is in no slab"
        binding = self._bindings[place - 1]
        assert slot < binding.slot_first + binding.slot_count, f"slot {slot} is in no slab"
        return binding

    def views(self, slot: int) -> list[Bytes]:
        binding = self.binding(slot)
        return self._views(binding, slot, binding.shard_bytes)

    def padded_views(self, slot: int) -> list[Bytes]:
        """The views with the padding behind the payload, as a lower tier writes and fills them."""
        binding = self.binding(slot)
        length_bytes = SlotLayout(binding.shard_bytes, len(binding.slabs)).padded_shard_bytes
        assert length_bytes <= binding.slot_bytes, "the padding would reach into the next slot"
        return self._views(binding, slot, length_bytes)

    def whole_views(self, slots: Slots) -> list[Bytes]:
        """All bytes of these slots, which ascend; neighbours in one view."""
        found = []
        firsts = np.flatnonzero(np.diff(slots.astype(np.int64), prepend=-2) != 1).tolist()
        for start, end in zip(firsts, [*firsts[1:], len(slots)], strict=True):
            slot, count = int(slots[start]), end - start
            binding = self.binding(slot)
            inside = min(count, binding.slot_first + binding.slot_count - slot)
            found.extend(self._views(binding, slot, inside * binding.slot_bytes))
            if inside < count:  # The next set's numbers follow.
                found.extend(self.whole_views(slots[start + inside : end]))
        return found

    def write_reserved(self, slots: Slots, engine: EngineId | None) -> None:
        self._table.write_reserved(slots, engine)

    def write_ready(
        self,
        slots: Slots,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        *,
        epoch: int,
        sequence: int,
    ) -> None:
        if len(slots) == 0:
            return
        binding = self.binding(int(slots[0]))
        facts = BlockFacts(binding.fingerprint, epoch, binding.payload_bytes)
        self._table.write_ready(slots, hashes, parents, facts, sequence=sequence)

    def write_checksums(self, slots: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        self._table.write_checksums(slots, checksums)

    def checksums(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """The payloads' checksums as the table has them; 0 where none is computed."""
        return self._table.checksums(slots)

    def stored_checksum(self, slot: int) -> int:
        return int(self.checksums(np.array([slot], dtype=np.uint32))[0])

    def write_gone(self, slots: Slots) -> None:
        self._table.write_gone(slots)

    def table_bytes(self) -> Bytes:
        return self._table.read_bytes()

    def table_ranges(self, ranges: Sequence[range]) -> Bytes:
        """A copy of the entries of these slots, one range after another."""
        return self._table.read_ranges(ranges)

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.mapping.close()
            os.close(slab.fd)
        self._slabs.clear()
        self._unbound.clear()
        self._bindings.clear()
        self._table.close()

    def check_invariants(self) -> list[str]:
        """Violations, one text each; none when all is well."""
        bound = [slab_id for binding in self._bindings for slab_id in binding.slabs]
        found: list[str] = []
        if len(bound) != len(set(bound)) or set(bound) & self._unbound:
            found.append("a slab is bound twice, or bound and unbound")
        if set(bound) | self._unbound != set(self._slabs):
            found.append("a slab was lost")
        for before, after in zip(self._bindings, self._bindings[1:], strict=False):
            if before.slot_first + before.slot_count > after.slot_first:
                found.append(f"slab sets {before.slab_set} and {after.slab_set} overlap")
        return found

    def check_placement(self) -> list[str]:
        """Slabs that no longer lie on the node that they are bound to, by a sample of each."""
        return [text for slab in self._slabs.values() if (text := placement_finding(slab))]

    def _views(self, binding: SlabBinding, slot: int, length_bytes: int) -> list[Bytes]:
        first = (int(slot) - binding.slot_first) * binding.slot_bytes
        end = first + length_bytes
        return [self._slabs[slab_id].mapping.array[first:end] for slab_id in binding.slabs]
