"""Who holds each device block, and which prefixes are on the device.

Invariants:
  (0) a device block is in the free queue if and only if nobody holds it;
  (1) a free block that is in the prefix index can still be found, until `take` gives it to a new
      owner;
  (2) `take` prefers blocks that are not in it, then the one released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvtier.engine.prefix_index import ChainedHashes, Prefix, PrefixIndex


class OutOfBlocks(Exception):
    """Too few free device blocks; nothing was changed. Preempt, or wait."""


class DeviceBlockPool:
    """Device blocks 0 .. block_count-1 with hold counts and a prefix cache of the free ones."""

    def __init__(
        self, block_count: int, make_index: Callable[[], PrefixIndex] = ChainedHashes
    ) -> None:
        self.block_count = block_count
        self._hold_counts = [0] * block_count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))
        self._make_index = make_index
        self.index = make_index()

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that can be found, held or free."""
        return len(self.index)

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, all or none; what they had cached is forgotten."""
        if count > len(self._free):
            raise OutOfBlocks(f"want {count} device blocks, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for device_block in taken:
            assert self._hold_counts[device_block] == 0, "a held block was on the free queue"
            self._hold_counts[device_block] = 1
            self.index.remove(device_block)
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
                if device_block not in self.index:
                    self._free.move_to_end(device_block, last=False)

    def publish(self, device_block: int, prefix: Prefix, index: int) -> None:
        """Make block `index` of a prefix findable; the first device block with it stays its home.
        A request that found the block publishes it again, which changes nothing."""
        assert self._hold_counts[device_block] > 0, "only a holder knows what a block contains"
        if device_block not in self.index:
            self.index.add(prefix, index, device_block)

    def is_published(self, device_block: int) -> bool:
        """Whether others may share this block; such a block is never written again."""
        return device_block in self.index

    def forget_all(self) -> None:
        """Forget all prefixes (the weights changed, or a cold run is wanted); holders keep
        theirs."""
        self.index = self._make_index()

    def check_invariants(self) -> list[str]:
        """Each string is one violation."""
        wrong: list[str] = []
        for device_block, count in enumerate(self._hold_counts):
            if (count == 0) != (device_block in self._free):
                wrong.append(f"device block {device_block} has {count} holders but is misplaced")
        return wrong
