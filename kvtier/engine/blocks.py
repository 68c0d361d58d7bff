"""Who holds each device block, and which block hashes are on the device.

Invariants:
  (0) a device block is in the free queue if and only if nobody holds it;
  (1) hash -> device block and device block -> hash are inverse to each other;
  (2) a free block that has a hash can still be found, until `take` gives it to a new owner;
  (3) `take` prefers blocks without a hash, then the one released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier.types import BlockHash


class OutOfBlocks(Exception):
    """Too few free device blocks; nothing was changed. Preempt, or wait."""


class DeviceBlockPool:
    """Device blocks 0 .. block_count-1 with hold counts and a prefix cache of the free ones."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._hold_counts = [0] * block_count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))
        self._hashes: dict[int, BlockHash] = {}
        self._blocks: dict[BlockHash, int] = {}

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that have a hash, held or free."""
        return len(self._blocks)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The device blocks of the longest cached prefix of `hashes`; changes nothing."""
        matched: list[int] = []
        for block_hash in hashes:
            device_block = self._blocks.get(block_hash)
            if device_block is None:
                break
            matched.append(device_block)
        return matched

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, all or none; what they had cached is forgotten."""
        if count > len(self._free):
            raise OutOfBlocks(f"want {count} device blocks, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for device_block in taken:
            assert self._hold_counts[device_block] == 0, "a held block was on the free queue"
            self._hold_counts[device_block] = 1
            self._forget(device_block)
        return taken

    def hold_count(self, device_block: int) -> int:
        """How many block tables, or copies, it is in. Who writes to one must be its only holder."""
        return self._hold_counts[device_block]

    def hold(self, device_blocks: Iterable[int]) -> None:
        """One more holder for each block; a free cached block leaves the free queue."""
        for device_block in device_blocks:
            if self._hold_counts[device_block] == 0:
                del self._free[device_block]
            self._hold_counts[device_block] += 1

    def release(self, device_blocks: Sequence[int]) -> None:
        """One holder fewer for each block of a prefix, its tail free (and so taken) first."""
        for device_block in reversed(device_blocks):
            assert self._hold_counts[device_block] > 0, f"device block {device_block} is not held"
            self._hold_counts[device_block] -= 1
            if self._hold_counts[device_block] == 0:
                self._free[device_block] = None
                if device_block not in self._hashes:
                    self._free.move_to_end(device_block, last=False)

    def publish(self, device_block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. The first device block of a hash stays its home."""
        assert self._hold_counts[device_block] > 0, "only a holder knows what a block contains"
        if block_hash in self._blocks:
            return
        assert device_block not in self._hashes, "a published block is immutable"
        self._blocks[block_hash] = device_block
        self._hashes[device_block] = block_hash

    def is_published(self, device_block: int) -> bool:
        """Whether others may share this block; such a block is never written again."""
        return device_block in self._hashes

    def forget_all(self) -> None:
        """Forget every hash (the weights changed, or a cold run is wanted); holders keep theirs."""
        self._blocks.clear()
        self._hashes.clear()

    def check_invariants(self) -> list[str]:
        """Each string is one violation."""
        wrong: list[str] = []
        for device_block, count in enumerate(self._hold_counts):
            if (count == 0) != (device_block in self._free):
                wrong.append(f"device block {device_block} has {count} holders but is misplaced")
        if len(self._hashes) != len(self._blocks):
            wrong.append(
                f"{len(self._hashes)} blocks have hashes, {len(self._blocks)} hashes blocks"
            )
        for block_hash, device_block in self._blocks.items():
            if self._hashes.get(device_block) != block_hash:
                wrong.append(f"hash {block_hash.hex()[:8]} leads to a block of another hash")
        return wrong

    def _forget(self, device_block: int) -> None:
        block_hash = self._hashes.pop(device_block, None)
        if block_hash is not None:
            del self._blocks[block_hash]
