"""Reuse curves: evict the block that is worth least by what its class has taught.

State: columns by row (time of last use, class), ghosts of blocks that were asked for and are not
here, and per class the ages at which its blocks were used again. Every touch is a few operations on
columns; candidates are two leaves of each class, the oldest and the youngest. The youngest matters:
so the cache can refuse what was just offered, and keep some sessions whole when all cannot stay.

With one class the order is LRU. How curves become worth: kvtier/policy/reuse_curves.py.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.policy.class_leaves import ClassLeaves
from kvtier.policy.eviction import Blocks, Evictable, Keys, Rows
from kvtier.policy.ghosts import GhostTable, Past
from kvtier.policy.reuse_classes import ENDED, UNKNOWN, ClassTable, Request
from kvtier.policy.reuse_curves import BIN_COUNT, EDGES, Curve, Observations, bins_of, hazards

REFIT_SECONDS, REFIT_LATER_SECONDS = 30.0, 120.0
# For so long after the start it is fitted at the shorter interval.
REFIT_EARLY_SECONDS = 600.0
GHOSTS_PER_BLOCK, GHOSTS_MIN = 16, 1 << 20
# A refit looks at so many waiting blocks, evenly chosen; each then stands for several.
SAMPLE_MAX = 1 << 17

_EDGES: list[float] = EDGES.tolist()
_USES_MAX = 60_000


@dataclass(frozen=True, slots=True)
class Sample:
    """All that a fit needs, so that it can be done elsewhere."""

    reused: npt.NDArray[np.float64]  # By class and bin of age.
    waited: npt.NDArray[np.float64]
    waiting: tuple[tuple[Past, float], ...]  # Blocks, and how many each of them stands for.
    group_of: tuple[int, ...]
    group_count: int
    at: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """By class: what keeping a block is worth, by bin of its age."""

    curves: tuple[Curve, ...]


def fit(sample: Sample) -> Fitted:
    count = len(sample.group_of)
    waited = sample.waited.copy()
    for past, weight in sample.waiting:
        bins = bins_of(sample.at - past.used_at)
        waited += weight * _counted(past.kind, bins, count)
    everything = Observations()
    groups = [Observations() for _ in range(sample.group_count)]
    mine = []
    for kind in range(count):
        seen = Observations()
        seen.reused, seen.waited = sample.reused[kind], waited[kind]
        mine.append(seen)
        if kind != ENDED:
            everything += seen
        if sample.group_of[kind] >= 0:
            groups[sample.group_of[kind]] += seen
    pool = hazards(everything)
    of_group = [hazards(seen, pool) for seen in groups]
    of_group.append(pool)
    return Fitted(
        tuple(
            Curve(hazards(seen, of_group[group]))
            for seen, group in zip(mine, sample.group_of, strict=True)
        )
    )


def _counted(
    kinds: npt.NDArray[np.int16], bins: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    flat = np.bincount(kinds.astype(np.int64) * BIN_COUNT + bins, minlength=count * BIN_COUNT)
    return flat.reshape(count, BIN_COUNT).astype(np.float64)


class CurvesPolicy:
    """Invariant: every leaf that was announced and not removed has an entry in both heaps of its
    class, with its time."""

    def __init__(self, blocks: Blocks, *, features: bool = True) -> None:
        self._blocks = blocks
        self._classes = ClassTable(features=features)
        self._ghosts = GhostTable(max(GHOSTS_PER_BLOCK * blocks.count_max, GHOSTS_MIN))
        self._past = Past.of_none(0)
        self._keys = np.zeros(0, dtype=np.uint64)
        self._here = np.zeros(0, dtype=np.bool_)
        self._is_leaf = np.zeros(0, dtype=np.bool_)
        self._gone: list[int] = []  # Removed, not yet among the ghosts.
        self._leaves: dict[int, ClassLeaves] = {}
        self._changed: set[int] = set()  # Classes that got a leaf.
        self._fresh: list[int] | None = None  # While nominating: new leaves without an entry.
        self._reused = np.zeros((1, BIN_COUNT))
        self._waited = np.zeros((1, BIN_COUNT))
        self._worth: list[list[float]] = []
        # Nothing tells blocks apart but their age: then it is LRU.
        self._is_plain = not features
        self._now = 0.0
        self._began_at: float | None = None  # Of the first news.
        self._fitted_at = 0.0

    # ------------------------------------------------------------------------------- what comes

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        self._note_time(now)
        self._remember_gone()
        places = self._ghosts.find(absent)
        here, ghosts = self._past.at(rows), self._ghosts.get(places[places >= 0])
        self._observe(here, now)
        self._observe(ghosts, now)
        unknown = np.flatnonzero(places < 0)
        known_count = len(rows) + (int(unknown[0]) if len(unknown) else len(absent))
        total = len(rows) + len(absent)
        turn, gap = 1, None
        if known_count:
            last = known_count - 1 - len(rows)
            deepest = (
                self._past.at(rows[-1:]) if last < 0 else self._ghosts.get(places[last : last + 1])
            )
            turn = min(int(deepest.end_turn[0]) + 1, 255)
            gap = now - float(deepest.used_at[0])
        new_tokens = (total - known_count) * self._blocks.block_tokens
        request = Request(tenant, turn, new_tokens, gap)
        kind = self._classes.of_request(request)
        uses = np.ones(total, dtype=np.uint16)
        uses[: len(rows)] += here.uses
        uses[len(rows) :][places >= 0] += ghosts.uses
        np.minimum(uses, _USES_MAX, out=uses)
        end_turn = np.zeros(total, dtype=np.uint8)
        end_turn[: len(rows)] = here.end_turn
        end_turn[len(rows) :][places >= 0] = ghosts.end_turn
        end_turn[-2:] = turn
        past = Past(np.full(total, now), self._kinds(kind, tenant, uses, turn), end_turn, uses)
        self._set(rows, past.at(slice(len(rows))))
        rest = past.at(slice(len(rows), None))
        if (places >= 0).any():
            self._ghosts.set(places[places >= 0], rest.at(places >= 0))
        if len(unknown):
            self._forget(self._ghosts.add(absent[unknown], rest.at(unknown)), now)

    def on_insert(self, rows: Rows, now: float) -> None:
        if not len(rows):
            return
        self._note_time(now)
        self._remember_gone()
        self._make_room(int(rows.max()) + 1)
        keys = self._blocks.keys_of(rows)
        self._keys[rows] = keys
        places = self._ghosts.find(keys)
        asked = places >= 0
        self._here[rows] = True
        self._is_leaf[rows] = False
        if asked.any():
            self._set(rows[asked], self._ghosts.get(places[asked]))
            self._ghosts.take(places[asked])
        if not asked.all():
            self._inherit(rows[~asked], now)

    def on_touch(self, rows: Rows, now: float) -> None:
        if len(rows):
            self._note_time(now)
            self._past.used_at[rows] = now
            revived = rows[self._past.kind[rows] == ENDED]
            if len(revived):
                self._past.kind[revived] = self._classes.of_request(UNKNOWN)
            self._push_leaves(rows)

    def on_leaf(self, row: int) -> None:
        if not self._is_leaf[row]:
            self._is_leaf[row] = True
            if self._fresh is None:
                self._push(row)
            else:
                self._fresh.append(row)

    def on_remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._here[row] = False
        self._gone.extend(rows)

    def on_session_end(self, rows: Rows) -> bool:
        """Make the prefix the next victim, tail first, but for what another session uses."""
        self._past.kind[rows] = ENDED
        self._past.used_at[rows] = -np.inf
        self._push_leaves(rows)
        return True

    # --------------------------------------------------------------------------------- nominating

    def nominate(self, count: int, may_evict: Callable[[int], Evictable]) -> Iterator[int]:
        kept: set[int] = set()  # Their entries were taken out.
        seen: set[int] = set()
        self._fresh = []
        self._changed.update(self._leaves)
        heap: list[tuple[float, float, int, int]] = []
        while count > 0:
            self._push_fresh()
            self._refresh(heap, seen, kept)
            if not heap:
                break
            worth, used_at, row, kind = heapq.heappop(heap)
            if row in seen or not self._counts(used_at, row, kind):
                continue
            self._changed.add(kind)
            while True:  # Ends: a chain does.
                verdict = may_evict(row)
                if verdict is Evictable.INNER:
                    self._is_leaf[row] = False
                    break
                seen.add(row)
                kept.add(row)
                if verdict is Evictable.HELD:
                    break
                count -= 1
                yield row
                parent = self._next_of_run(used_at, kind)
                if parent is None or count == 0:
                    break
                self._refresh(heap, seen, kept)
                if heap and heap[0] < (worth, used_at, parent):
                    break
                self._fresh.clear()
                row = parent
        self._push_fresh()
        self._fresh = None
        for row in kept:
            if self._here[row] and self._is_leaf[row]:
                self._push(row)

    def _next_of_run(self, used_at: float, kind: int) -> int | None:
        """The block that is the only new leaf, if it has the time and class of the last victim: as
        a rule its parent, and worth as little."""
        fresh = self._fresh
        if fresh is None or len(fresh) != 1:
            return None
        row = fresh[0]
        same = self._past.used_at[row] == used_at and self._past.kind[row] == kind
        return row if same else None

    def _refresh(
        self, heap: list[tuple[float, float, int, int]], seen: set[int], kept: set[int]
    ) -> None:
        """Offer the candidates of all classes that changed."""
        if not self._changed:
            return
        for kind in self._changed:
            for row in self._candidates(kind, seen, kept):
                used_at = float(self._past.used_at[row])
                heapq.heappush(heap, (self._worth_of(kind, used_at), used_at, row, kind))
        self._changed.clear()

    def _push_fresh(self) -> None:
        if self._fresh:
            for row in self._fresh:
                self._push(row)
            self._fresh.clear()

    def _candidates(self, kind: int, seen: set[int], kept: set[int]) -> list[int]:
        """The oldest and the youngest leaf of the class; forgets entries that count no more."""
        leaves = self._leaves[kind]
        found = []
        for heap, sign in ((leaves.old, 1), (leaves.young, -1)):
            while heap:
                used_at, row = sign * heap[0][0], sign * heap[0][1]
                if row in seen:
                    kept.add(row)
                elif self._counts(used_at, row, kind):
                    found.append(row)
                    break
                heapq.heappop(heap)
            if self._is_plain:
                break
        return found

    def _counts(self, used_at: float, row: int, kind: int) -> bool:
        past = self._past
        return bool(
            self._here[row]
            and self._is_leaf[row]
            and past.used_at[row] == used_at
            and past.kind[row] == kind
        )

    def _worth_of(self, kind: int, used_at: float) -> float:
        if kind == ENDED:
            return -1.0
        if self._is_plain or kind >= len(self._worth):
            return 0.0
        age = self._now - used_at
        place = min(max(bisect_right(_EDGES, age) - 1, 0), BIN_COUNT - 1)
        worth = self._worth[kind]
        if place == BIN_COUNT - 1:
            return worth[place]
        part = (age - _EDGES[place]) / (_EDGES[place + 1] - _EDGES[place])
        return worth[place] + part * (worth[place + 1] - worth[place])

    # ------------------------------------------------------------------------------------ fitting

    def _is_refit_due(self) -> bool:
        if self._began_at is None:
            return False
        early = self._now - self._began_at < REFIT_EARLY_SECONDS
        return self._now - self._fitted_at >= (REFIT_SECONDS if early else REFIT_LATER_SECONDS)

    def begin_refit(self) -> Callable[[], Fitted] | None:
        if not self._is_refit_due():
            return None
        return partial(fit, self._sample())

    def end_refit(self, fitted: object) -> None:
        assert isinstance(fitted, Fitted), "the result of another policy's refit"
        self._worth = [curve.index.tolist() for curve in fitted.curves]

    def _sample(self) -> Sample:
        """What `fit` needs; a copy."""
        self._remember_gone()
        self._fitted_at = self._now
        step = max(1, -(-len(self._here) // SAMPLE_MAX))
        here = self._past.at(slice(None, None, step)).at(self._here[::step])
        self._make_classes()
        return Sample(
            self._reused.copy(),
            self._waited.copy(),
            ((here, float(step)), self._ghosts.sample(SAMPLE_MAX)),
            tuple(self._classes.group_of),
            self._classes.group_count,
            self._now,
        )

    # ------------------------------------------------------------------------------------ helpers

    def _note_time(self, now: float) -> None:
        self._now = max(self._now, now)
        if self._began_at is None:
            self._began_at = self._fitted_at = now

    def _observe(self, past: Past, now: float) -> None:
        if len(past.used_at):
            self._make_classes()
            flat = past.kind.astype(np.int64) * BIN_COUNT + bins_of(now - past.used_at)
            np.add.at(self._reused.reshape(-1), flat, 1.0)

    def _forget(self, past: Past, now: float) -> None:
        """Ghosts that were not used up to now, and will not be seen if they are."""
        if len(past.used_at):
            self._make_classes()
            flat = past.kind.astype(np.int64) * BIN_COUNT + bins_of(now - past.used_at)
            np.add.at(self._waited.reshape(-1), flat, 1.0)

    def _make_classes(self) -> None:
        missing = self._classes.count - len(self._reused)
        if missing > 0:
            more = np.zeros((missing, BIN_COUNT))
            self._reused = np.concatenate([self._reused, more])
            self._waited = np.concatenate([self._waited, more])

    def _kinds(
        self, kind: int, tenant: int, uses: npt.NDArray[np.uint16], turn: int
    ) -> npt.NDArray[np.int16]:
        kinds = np.full(len(uses), kind, dtype=np.int16)
        shared = np.flatnonzero(uses > turn + 1)
        if len(shared):
            logs = np.log2(uses[shared]).astype(np.int64)
            for log in np.unique(logs).tolist():
                kinds[shared[logs == log]] = self._classes.of_shared(tenant, log)
        return kinds

    def _set(self, rows: Rows, past: Past) -> None:
        self._past.set(rows, past)
        self._push_leaves(rows)

    def _inherit(self, rows: Rows, now: float) -> None:
        """Blocks nobody has asked for: the engine's answer, which goes on with the request."""
        parents = self._blocks.parents_of(rows)
        parent = int(parents[0])
        known = parent >= 0 and parent < len(self._here) and bool(self._here[parent])
        kind = int(self._past.kind[parent]) if known else ENDED
        if kind == ENDED:
            kind = self._classes.of_request(UNKNOWN)
        turn = int(self._past.end_turn[parent]) if known else 1
        count = len(rows)
        self._set(
            rows,
            Past(
                np.full(count, now),
                np.full(count, kind, np.int16),
                np.full(count, turn, np.uint8),
                np.ones(count, np.uint16),
            ),
        )

    def _remember_gone(self) -> None:
        """Remove what is gone from the columns; it is remembered as ghosts."""
        if self._gone:
            rows = np.array(self._gone, dtype=np.int32)
            self._gone.clear()
            self._is_leaf[rows] = False
            forgotten = self._ghosts.add(self._keys[rows], self._past.at(rows))
            self._forget(forgotten, self._now)

    def _push_leaves(self, rows: Rows) -> None:
        for row in rows[self._is_leaf[rows] & self._here[rows]].tolist():
            self._push(row)

    def _push(self, row: int) -> None:
        kind = int(self._past.kind[row])
        leaves = self._leaves.get(kind)
        if leaves is None:
            leaves = self._leaves[kind] = ClassLeaves()
        leaves.push(float(self._past.used_at[row]), row)
        if len(leaves.old) > leaves.count_max or len(leaves.young) > leaves.count_max:
            leaves.keep(lambda used_at, row: self._counts(used_at, row, kind))
        self._changed.add(kind)

    def _make_room(self, count: int) -> None:
        old = len(self._here)
        if count > old:
            new = max(count, old + old // 8, 1024)
            for column in (*self._past, self._keys, self._here, self._is_leaf):
                column.resize(new, refcheck=False)
