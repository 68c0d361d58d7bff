"""Blocks on their way out: copied in any order, committed in chain order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvtier.checksum import combine_checksums
from kvtier.connector.desk import Desk
from kvtier.connector.requests import BlockPhase, MovingBlock, OffloadFlight, Request
from kvtier.connector.residency import KnownResident
from kvtier.connector.stock import Footing
from kvtier.connector.supply import SlotSupply
from kvtier.errors import KVTierError
from kvtier.types import CommitOutcome


class MovingBlocks:
    """All blocks being offloaded, by hash: each is on its way once, whichever requests share it.

    A copied block waits until the commit of its parent is queued, whoever copies that one. When
    the parent fails, the children are committed all the same: the daemon refuses them (NO_PARENT),
    and `on_surprise` makes their requests look again.
    """

    def __init__(
        self,
        desk: Desk,
        known: KnownResident,
        supply: SlotSupply,
        on_surprise: Callable[[Request], None],
    ) -> None:
        self._desk = desk
        self._known = known
        self._supply = supply
        self._on_surprise = on_surprise
        self._blocks: dict[bytes, MovingBlock] = {}
        self._waiting: dict[bytes, list[MovingBlock]] = {}  # Copied, by the parent they wait for.

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def add(self, block: MovingBlock) -> None:
        assert block.block_hash not in self._blocks, "a block is offloaded twice at once"
        self._blocks[block.block_hash] = block
        self._known.discard(block.block_hash)

    def copied(self, flight: OffloadFlight) -> None:
        """Every worker has copied the flight's blocks."""
        self._note_checksums(flight)
        self._commit_ready(flight.blocks)

    def drop(self, flight: OffloadFlight, reason: str) -> None:
        """The slots go back unfilled: into the stock when no worker was told of them."""
        self._desk.stats.dropped_blocks[reason] += len(flight.blocks)
        footing, slots = flight.footing, [block.slot for block in flight.blocks]
        if not flight.is_planned and footing is self._supply.stock.footing:
            self._supply.stock.give_back(footing, slots)
        else:
            self._supply.stock.end(footing, slots)
            self._desk.abort(footing.namespace, footing.session, slots)
        self._end_blocks(flight.blocks)

    def reset(self) -> None:
        """Forget all blocks; those copied and not committed are aborted."""
        for children in self._waiting.values():
            for block in children:
                footing = block.flight.footing
                self._desk.abort(footing.namespace, footing.session, [block.slot])
                block.flight.request.open_block_count -= 1
                self._desk.stats.dropped_blocks["reset"] += 1
        self._waiting.clear()
        self._blocks.clear()

    def check_invariants(self, job_ids: Iterable[int]) -> list[str]:
        flying, found = set(job_ids), []
        for block_hash, block in self._blocks.items():
            if block.block_hash != block_hash:
                found.append("a moving block stands under another hash")
            if block.phase is BlockPhase.COPYING and block.flight.job_id not in flying:
                found.append("a block is copied by no flight")
            waiting = self._waiting.get(block.parent or b"", [])
            if (block.phase is BlockPhase.COPIED) != (block in waiting):
                found.append("a copied block waits for nobody, or another one waits")
        if not self._waiting.keys() <= self._blocks.keys():
            found.append("a block waits for a parent that is not on its way")
        return found

    def _note_checksums(self, flight: OffloadFlight) -> None:
        # Each shard's from the one of its workers that has stored it.
        found = {r.shard: r.checksums for r in flight.results.values() if r.checksums}
        if len(found) < len({r.shard for r in flight.results.values()}):
            return
        shards = [found[shard] for shard in sorted(found)]
        for index, block in enumerate(flight.blocks):
            if all(index < len(checksums) for checksums in shards):
                block.checksum = combine_checksums([checksums[index] for checksums in shards])

    def _commit_ready(self, blocks: Iterable[MovingBlock]) -> None:
        """Queue the commits of blocks whose parents' are queued; the rest waits for its parent."""
        queue, batch = deque(blocks), list[MovingBlock]()
        chained = self._desk.spec.chained
        while queue:
            block = queue.popleft()
            parent = self._blocks.get(block.parent) if block.parent is not None else None
            if parent is not None and parent.phase is not BlockPhase.COMMITTING:
                block.phase = BlockPhase.COPIED
                self._waiting.setdefault(parent.block_hash, []).append(block)
                continue
            block.phase = BlockPhase.COMMITTING
            if batch and (
                (chained and batch[-1].block_hash != block.parent)
                or batch[-1].flight.footing is not block.flight.footing
            ):
                self._ask_commit(batch)
                batch = []
            batch.append(block)
            queue.extend(self._waiting.pop(block.block_hash, ()))
        if batch:
            self._ask_commit(batch)

    def _ask_commit(self, batch: Sequence[MovingBlock]) -> None:
        desk, footing = self._desk, batch[0].flight.footing
        hashes, slots = [b.block_hash for b in batch], [b.slot for b in batch]
        sums = [b.checksum for b in batch if b.checksum is not None]
        parent = batch[0].parent
        state = footing.namespace.state
        describes = state is not None and state.wants_token_ids

        def call() -> list[CommitOutcome]:
            return desk.client.commit(
                footing.namespace,
                hashes,
                slots,
                parent=parent,
                session=footing.session,
                epoch=footing.epoch,
                checksums=sums if len(sums) == len(batch) else None,
                token_ids=tokens_of(batch) if describes else (),
            )

        def on_answer(answer: list[CommitOutcome] | KVTierError) -> None:
            self._on_committed(batch, footing, answer)

        if not desk.ask(call, on_answer):
            self._end(batch)

    def _on_committed(
        self,
        batch: Sequence[MovingBlock],
        footing: Footing,
        answer: list[CommitOutcome] | KVTierError,
    ) -> None:
        stats = self._desk.stats
        if isinstance(answer, KVTierError):
            self._desk.note_error(answer)
            stats.dropped_blocks["commit_failed"] += len(batch)
            self._end(batch)
            for block in batch:
                self._on_surprise(block.flight.request)
            return
        is_current = footing is self._supply.stock.footing
        self._end(batch)
        for block, outcome in zip(batch, answer, strict=False):
            if outcome is CommitOutcome.READY:
                stats.committed_blocks += 1
            elif outcome is CommitOutcome.PRESENT:
                stats.present_blocks += 1
            else:
                stats.dropped_blocks[outcome.name.lower()] += 1
                self._known.discard(block.block_hash)
                if block.parent is not None and outcome is CommitOutcome.NO_PARENT:
                    self._known.discard(block.parent)
                self._on_surprise(block.flight.request)
                continue
            if is_current:
                self._known.add(block.block_hash)
        if is_current and CommitOutcome.VOID in answer:  # Cleared: all that we know is void.
            self._supply.throw_away()
            self._known.clear()

    def _end(self, batch: Sequence[MovingBlock]) -> None:
        """Committed or refused: the slots are not ours any more."""
        self._supply.stock.end(batch[0].flight.footing, [block.slot for block in batch])
        self._end_blocks(batch)

    def _end_blocks(self, blocks: Sequence[MovingBlock]) -> None:
        """They are on their way no longer; who waited for them waits no longer."""
        orphans: list[MovingBlock] = []
        for block in blocks:
            block.flight.request.open_block_count -= 1
            if self._blocks.get(block.block_hash) is block:
                del self._blocks[block.block_hash]
                orphans.extend(self._waiting.pop(block.block_hash, ()))
        if orphans:
            self._commit_ready(orphans)


def tokens_of(batch: Sequence[MovingBlock]) -> list[int]:
    """Of all these blocks, or of none."""
    found: list[int] = []
    for block in batch:
        ask = block.flight.request.tokens_of
        if ask is None:
            return []
        found.extend(ask(block.index))
    return found
