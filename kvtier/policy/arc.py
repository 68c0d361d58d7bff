"""ARC: two LRU lists, of blocks used once and of those used again, in a balance that adapts.

N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache", 2003. Here of leaves
only. It is offered to compare with engines that use it; on chains that long sessions come back to
it loses to LRU (docs/policies.md).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from kvtier.policy.eviction import Blocks, ChainOf, Evictable, Keys, MayEvict, Rows, Victims, alone
from kvtier.policy.lru import LruPolicy


class ArcPolicy:
    """Invariant: a block is in exactly one of the two lists, and a ghost in one of the other two,
    which hold no more than the blocks that there can be."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._once, self._often = LruPolicy(), LruPolicy()
        self._once_count = self._often_count = 0
        self._once_aim = 0.0  # How many blocks used once are aimed at.
        self._once_ghosts: dict[int, None] = {}  # By key; the one gone longest ago first.
        self._often_ghosts: dict[int, None] = {}
        self._keys = np.zeros(0, dtype=np.uint64)
        self._here = np.zeros(0, dtype=np.bool_)
        self._is_often = np.zeros(0, dtype=np.bool_)
        self._is_leaf = np.zeros(0, dtype=np.bool_)

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        self.on_touch(rows, now)

    def on_insert(self, rows: Rows, now: float) -> None:
        if not len(rows):
            return
        self._make_room(int(rows.max()) + 1)
        keys = self._blocks.keys_of(rows)
        self._keys[rows] = keys
        again = np.array([self._was_ghost(key) for key in keys.tolist()], dtype=np.bool_)
        self._here[rows], self._is_leaf[rows] = True, False
        self._is_often[rows] = again
        for policy, mine in ((self._often, rows[again]), (self._once, rows[~again])):
            policy.on_insert(mine, now)
        self._often_count += int(again.sum())
        self._once_count += len(rows) - int(again.sum())

    def on_touch(self, rows: Rows, now: float) -> None:
        moved = rows[~self._is_often[rows]]
        self._is_often[moved] = True
        self._once_count -= len(moved)
        self._often_count += len(moved)
        self._once.on_remove(moved.tolist())
        self._often.on_insert(moved, now)
        self._often.on_touch(rows, now)
        for row in moved[self._is_leaf[moved]].tolist():
            self._often.on_leaf(row)

    def on_leaf(self, row: int) -> None:
        self._is_leaf[row] = True
        self._list_of(row).on_leaf(row)

    def on_remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._list_of(row).on_remove([row])
            self._here[row] = False
            is_often = bool(self._is_often[row])
            self._often_count -= is_often
            self._once_count -= not is_often
            ghosts = self._often_ghosts if is_often else self._once_ghosts
            ghosts[int(self._keys[row])] = None
            if len(ghosts) > self._blocks.count_max:
                del ghosts[next(iter(ghosts))]

    def on_session_end(self, rows: Rows) -> bool:
        """Of no use: which list goes first is not a matter of time."""
        return False

    def nominate(self, count: int, may_evict: MayEvict, chain_of: ChainOf = alone) -> Victims:
        """One by one: each may change which list goes first."""
        seen: set[int] = set()

        def verdict(row: int) -> Evictable:
            found = Evictable.HELD if row in seen else may_evict(row)
            if found is Evictable.INNER:
                self._is_leaf[row] = False
            return found

        running = {one: one.nominate(count, verdict) for one in (self._once, self._often)}
        try:
            while count > 0:
                row = self._next(running, count, verdict)
                if row is None:
                    return
                count -= 1
                seen.add(row)
                yield (row,)
        finally:
            for one in running.values():
                one.close()

    def _next(
        self,
        running: dict[LruPolicy, Generator[Sequence[int], None, None]],
        count: int,
        verdict: MayEvict,
    ) -> int | None:
        """The next victim, of the list that is too long if it has one."""
        turns = [self._once, self._often]
        if self._once_count <= self._once_aim:
            turns.reverse()
        for one in turns:
            victim = next(running[one], None)
            if victim is None:  # It had no more; but the last victim's parent may be a leaf now.
                running[one] = one.nominate(count, verdict)
                victim = next(running[one], None)
            if victim is not None:
                return victim[0]
        return None

    def _was_ghost(self, key: int) -> bool:
        """Whether it was evicted not long ago; moves the balance to the list that it was in."""
        once, often = len(self._once_ghosts), len(self._often_ghosts)
        if key in self._once_ghosts:
            del self._once_ghosts[key]
            aim = self._once_aim + max(1.0, often / once)
            self._once_aim = min(aim, float(self._blocks.count_max))
        elif key in self._often_ghosts:
            del self._often_ghosts[key]
            self._once_aim = max(0.0, self._once_aim - max(1.0, once / often))
        else:
            return False
        return True

    def _list_of(self, row: int) -> LruPolicy:
        return self._often if self._is_often[row] else self._once

    def _make_room(self, count: int) -> None:
        old = len(self._here)
        if count > old:
            new = max(count, old + old // 8, 1024)
            for column in (self._keys, self._here, self._is_often, self._is_leaf):
                column.resize(new, refcheck=False)
