"""Block tables: which device blocks a request's tokens are in, and who may write to them.

Who holds device blocks:
  (0) requests that run, or wait for their onboard: those of their block table;
  (1) the connector, for requests that ended or were preempted while a copy touches them or is to
      be planned: `kept`. Before anybody goes without, the latter are taken back.
Nothing is written to a published block: the last block of a prompt is always computed into a block
of the request's own, so a prompt that is cached as a whole still has a token to compute. Branches
of one prompt share even the block they go on in; who writes first takes a copy, the last one what
is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from kvtier.engine.blocks import DeviceBlockPool
from kvtier.engine.config import EngineConfig, IndexKind
from kvtier.engine.prefix_index import ChainedHashes, PrefixIndex
from kvtier.engine.request import Request


class BlockTables:
    """Of all requests; they carry their own."""

    def __init__(self, config: EngineConfig, reclaim: Callable[[int], object]) -> None:
        """`reclaim` takes back so many kept blocks, of those that no copy touches yet."""
        self.pool = DeviceBlockPool(config.device_block_count, partial(_make_index, config))
        self.copied_count = 0  # Since the start, on write.
        self.kept: dict[str, list[int]] = {}
        self._config = config
        self._reclaim = reclaim
        self._copies: list[tuple[int, int]] = []

    @property
    def kept_count(self) -> int:
        """Device blocks held for copies, planned or to come, alone."""
        return sum(len(device_blocks) for device_blocks in self.kept.values())

    def match(self, request: Request) -> list[int]:
        """The device blocks that have the beginning of its tokens."""
        if not self._config.prefix_caching:
            return []
        return self.pool.index.match(request.prefix(request.reusable_count))

    def open(self, request: Request, local: list[int]) -> None:
        """Its table begins with the blocks that were found for it."""
        self.pool.hold(local)
        request.device_blocks = list(local)
        request.computed_count = len(local) * self._config.block_tokens
        request.published_count = request.local_block_count = len(local)
        request.onboard_block_count = 0

    def grow(self, request: Request, token_count: int) -> bool:
        """Make the block table long enough for `token_count` tokens, and the request the only
        holder of the blocks it will write to, if the pool has the blocks."""
        missing = -(-token_count // self._config.block_tokens) - len(request.device_blocks)
        copied = self._shared_tail(request)
        if not self._make_room(missing + len(copied)):
            return False
        for index in copied:
            [own] = self.pool.take(1)
            self._copies.append((request.device_blocks[index], own))
            self.copied_count += 1
            self.pool.release([request.device_blocks[index]])
            request.device_blocks[index] = own
        if missing > 0:
            request.device_blocks += self.pool.take(missing)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs of device blocks: the second becomes a copy of the first before the step's tokens
        are computed, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def check_writable(self, request: Request, count: int) -> None:
        """Before its next `count` tokens are computed."""
        end = -(-(request.computed_count + count) // self._config.block_tokens)
        written = request.device_blocks[request.full_count : end]
        assert not any(self.pool.is_published(block) for block in written), "cached block written"

    def publish(self, request: Request, full_count: int) -> None:
        """So many of its blocks are full and right."""
        if self._config.prefix_caching and full_count > request.published_count:
            prefix = request.prefix(full_count)
            for index in range(request.published_count, full_count):
                self.pool.publish(request.device_blocks[index], prefix, index)
        request.published_count = full_count

    def let_go(self, request: Request, *, keep: bool = False) -> None:
        """All of its table; `keep`: copies touch the blocks, or will."""
        if keep:
            self.kept.setdefault(request.request_id, []).extend(request.device_blocks)
        else:
            self.pool.release(request.device_blocks)
        request.device_blocks = []
        request.computed_count = request.published_count = 0

    def release_kept(self, request_id: str) -> None:
        """Its copies are over."""
        self.pool.release(self.kept.pop(request_id))

    def check_invariants(self, active: Iterable[Request]) -> list[str]:
        """Each string is one violation."""
        held = Counter(block for blocks in self.kept.values() for block in blocks)
        for request in active:
            held.update(request.device_blocks)
        return self.pool.check_invariants() + [
            f"device block {block} is held {self.pool.hold_count(block)} times, "
            f"{held[block]} times by us"
            for block in range(self.pool.block_count)
            if self.pool.hold_count(block) != held[block]
        ]

    def _shared_tail(self, request: Request) -> range:
        """Indexes of the blocks that it would write to, and others hold: none, or the last."""
        first = request.full_count
        blocks = request.device_blocks[first:]
        is_shared = bool(blocks) and self.pool.hold_count(blocks[0]) > 1
        assert all(self.pool.hold_count(block) == 1 for block in blocks[1:]), "fresh block shared"
        return range(first, first + 1) if is_shared else range(0)

    def _make_room(self, block_count: int) -> bool:
        """Whether so many blocks are free, if need be after some are taken back."""
        missing = block_count - self.pool.free_count
        if missing > 0 and self.kept:
            self._reclaim(missing)
        return block_count <= self.pool.free_count


def _make_index(config: EngineConfig) -> PrefixIndex:
    if config.prefix_index is IndexKind.RADIX:
        from kvtier.engine.compared.radix_tree import RadixTree

        return RadixTree(config.block_tokens)
    return ChainedHashes()
