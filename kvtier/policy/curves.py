"""Reuse curves: evict the block that is worth least by what its class has taught.

A request gives its whole chain one time of use and, but for the blocks that others share, one
class. What is known of blocks, here or gone, is in one table by key (`reuse_history.py`); the
candidates for eviction are two leaves of each class, the oldest and the youngest
(`class_leaves.py`). The youngest matters: so the cache can refuse what was just offered, and keep
some sessions whole when all cannot stay.

With one class the order is LRU. How curves become worth: kvtier/policy/reuse_curves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.policy.class_leaves import Leaves, Worth
from kvtier.policy.curve_fit import Fitted, Sample, Tally, fit
from kvtier.policy.eviction import (
    Blocks,
    ChainOf,
    EvictionOrder,
    GuardReport,
    Keys,
    MayEvict,
    Rows,
    Victims,
    alone,
)
from kvtier.policy.guard import AgeAlone, Guard
from kvtier.policy.reuse_classes import ENDED, SHARED_LOG2_MAX, UNKNOWN, ClassTable, Request
from kvtier.policy.reuse_curves import BIN_COUNT, Floats, survivals_at
from kvtier.policy.reuse_history import Mask, Places, ReuseHistory
from kvtier.policy.worth_table import WorthTable

REFIT_SECONDS, REFIT_LATER_SECONDS = 30.0, 120.0
# For so long after the start it is fitted at the shorter interval.
REFIT_EARLY_SECONDS = 600.0
REMEMBERED_PER_BLOCK, REMEMBERED_MIN = 16, 1 << 20
# A refit looks at so many waiting blocks, evenly chosen; each then stands for several.
SAMPLE_MAX = 1 << 17

_USES_MAX = (1 << SHARED_LOG2_MAX + 1) - 1
_LOG2 = np.frexp(np.arange(_USES_MAX + 1))[1] - 1  # Of the uses of a block.


class CurvesPolicy:
    """Times are counted from a second before the first news."""

    def __init__(self, blocks: Blocks, *, features: bool = True) -> None:
        """Without features nothing tells blocks apart but their age: then it is LRU."""
        self._blocks = blocks
        self._classes = ClassTable(features=features)
        self._history = ReuseHistory(max(REMEMBERED_PER_BLOCK * blocks.count_max, REMEMBERED_MIN))
        self._leaves = Leaves(youngest=features)
        self._keys = np.zeros(0, dtype=np.uint64)
        self._reused, self._forgotten = Tally(), Tally()
        self._worth, self._age_alone = WorthTable(), AgeAlone()
        self._survival = np.ones((0, BIN_COUNT + 1))
        self._guard = Guard(self._worth, blocks.count_max) if features else None
        self._resident_count = 0
        self._now = 1.0
        self._origin: float | None = None
        self._fitted_at = 1.0

    # ------------------------------------------------------------------------------- what comes

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        now = self._note_time(now)
        keys = np.concatenate([self._keys[rows], absent]) if len(rows) else absent
        if not len(keys):
            return
        history = self._history
        places, known = history.find(keys)
        old, fresh, known_count = _parted(known)
        request = self._request(places, known_count, now, tenant)
        seen = places[old]
        self._reused.note(now - history.used_at[seen], history.kind[seen])
        if len(seen) < len(keys):
            places[fresh] = self._claim(keys[fresh], places[fresh], now)
        uses = history.uses[places]
        uses += uses < _USES_MAX
        kinds = self._kinds(request, uses)
        history.used_at[places], history.kind[places] = now, kinds
        history.uses[places] = uses
        history.end_turn[places[-2:]] = request.turn
        if len(rows):
            self._leaves.move(rows, now, kinds if isinstance(kinds, int) else kinds[: len(rows)])
        if self._guard is not None:
            self._worth.now = now
            self._guard.on_request(keys, _own_first(uses, request.turn + 1), now, kinds)

    def on_insert(self, rows: Rows, now: float) -> None:
        if not len(rows):
            return
        now = self._note_time(now)
        self._make_room(int(rows.max()) + 1)
        keys = self._blocks.keys_of(rows)
        places, known = self._history.find(keys)
        if np.count_nonzero(known) < len(known):  # Several times as fast as all().
            fresh = ~known
            places[fresh] = self._inherit(rows, keys[fresh], places[fresh], now)
        self._keys[rows] = keys
        self._resident_count += len(rows)
        self._leaves.insert(rows, self._history.used_at[places], self._history.kind[places])

    def on_touch(self, rows: Rows, now: float) -> None:
        if len(rows):
            mine = rows.astype(np.intp)
            kinds = self._leaves.kind[mine]
            kinds[kinds == ENDED] = self._classes.of_request(UNKNOWN)
            self._leaves.move(mine, self._note_time(now), kinds)

    def on_leaf(self, row: int) -> None:
        self._leaves.add(row)

    def on_remove(self, rows: Sequence[int]) -> None:
        self._leaves.remove(rows)
        self._resident_count -= len(rows)

    def on_session_end(self, rows: Rows) -> bool:
        """Make the prefix the next victim, tail first, but for what another session uses."""
        mine = rows.astype(np.intp)
        keys = self._keys[mine]
        places, known = self._history.find(keys)
        self._history.kind[places[known]] = ENDED
        if self._guard is not None:
            self._guard.on_session_end(keys)
        self._leaves.move(mine, -np.inf, ENDED)
        return True

    def on_turn_kind(self, rows: Rows, absent: Keys, turn_kind: int) -> None:
        mine, classes = rows.astype(np.intp), self._classes
        keys = np.concatenate([self._keys[mine], absent])
        places, known = self._history.find(keys)
        kinds = classes.of_turn_kind(self._history.kind[places[known]], turn_kind)
        self._history.kind[places[known]] = kinds
        if self._guard is not None:
            self._guard.on_turn_kind(keys[known], kinds)
        leaves = self._leaves
        told = classes.of_turn_kind(leaves.kind[mine], turn_kind)
        leaves.move(mine, leaves.used_at[mine], told)

    def nominate(self, count: int, may_evict: MayEvict, chain_of: ChainOf = alone) -> Victims:
        self._worth.now = self._now
        worth: Worth = self._worth
        if self._guard is not None:
            self._guard.note_full(self._resident_count, self._now)
            if self._guard.order is EvictionOrder.BY_AGE:
                worth = self._age_alone
        return self._leaves.nominate(count, may_evict, chain_of, worth)

    def guard_report(self) -> GuardReport:
        if self._guard is None:
            return GuardReport(EvictionOrder.UNGUARDED, 0, 0)
        return GuardReport(self._guard.order, *self._guard.hit_counts)

    # ------------------------------------------------------------------------------------ fitting

    def begin_refit(self) -> Callable[[], Fitted] | None:
        if not self._is_refit_due():
            return None
        return partial(fit, self._sample())

    def end_refit(self, fitted: object) -> None:
        assert isinstance(fitted, Fitted), "the result of another policy's refit"
        self._worth.learn(fitted.worth)
        self._survival = fitted.survival

    def reuse_probabilities(self, rows: Rows, seconds: float) -> Floats:
        mine = rows.astype(np.intp)
        kinds = self._leaves.kind[mine].astype(np.intp)
        found = np.ones(len(mine))
        fitted = kinds < len(self._survival)
        ages = self._now - self._leaves.used_at[mine[fitted]]
        survival = self._survival[kinds[fitted]]
        now, later = survivals_at(survival, ages), survivals_at(survival, ages + seconds)
        found[fitted] = 1.0 - np.divide(later, now, out=np.ones_like(now), where=now > 0)
        found[kinds == ENDED] = 0.0
        return found

    def _is_refit_due(self) -> bool:
        if self._origin is None:
            return False
        early = self._now < REFIT_EARLY_SECONDS
        return self._now - self._fitted_at >= (REFIT_SECONDS if early else REFIT_LATER_SECONDS)

    def _sample(self) -> Sample:
        """What `fit` needs; a copy."""
        self._fitted_at = self._now
        waiting, weight = self._history.sample(SAMPLE_MAX)
        count = self._classes.count
        return Sample(
            self._reused.counts(count),
            self._forgotten.counts(count),
            waiting,
            weight,
            tuple(self._classes.group_of),
            self._classes.group_count,
            self._now,
        )

    # ------------------------------------------------------------------------------------ helpers

    def _note_time(self, now: float) -> float:
        if self._origin is None:
            self._origin = now - 1.0
        self._now = max(self._now, now - self._origin)
        return self._now

    def _request(self, places: Places, known_count: int, now: float, tenant: int) -> Request:
        turn, gap = 1, None
        if known_count:
            deepest = places[known_count - 1]
            turn = min(int(self._history.end_turn[deepest]) + 1, 255)
            gap = now - float(self._history.used_at[deepest])
        new_tokens = (len(places) - known_count) * self._blocks.block_tokens
        return Request(tenant, turn, new_tokens, gap)

    def _claim(self, keys: Keys, places: Places, now: float) -> Places:
        """Entries for blocks that are not known yet."""
        found, forgotten = self._history.claim(keys, places, now)
        if forgotten is not None:
            self._forgotten.note(now - forgotten.used_at, forgotten.kind)
        return found

    def _kinds(self, request: Request, uses: npt.NDArray[np.uint16]) -> npt.NDArray[np.int16] | int:
        """One class for all, unless some of the blocks are shared."""
        kind = self._classes.of_request(request)
        if uses.item(0) <= request.turn + 1:  # Along a chain the uses fall.
            return kind
        shared = self._classes.of_shared(request.tenant, uses.item(0))
        kinds = np.full(len(uses), kind, np.int16)
        many = (uses > request.turn + 1).nonzero()[0]  # As a rule few.
        kinds[many] = shared[_LOG2[uses[many]]]
        return kinds

    def _inherit(self, rows: Rows, keys: Keys, places: Places, now: float) -> Places:
        """Blocks nobody has asked for: the engine's answer, which goes on with the request."""
        history = self._history
        kind, turn = ENDED, 1
        parents = self._blocks.parents_of(rows[:1])
        if parents[0] >= 0:
            (place,), (known,) = history.find(self._blocks.keys_of(parents))
            if known:
                kind, turn = int(history.kind[place]), int(history.end_turn[place])
        if kind == ENDED:
            kind = self._classes.of_request(UNKNOWN)
        found = self._claim(keys, places, now)
        history.kind[found], history.end_turn[found], history.uses[found] = kind, turn, 1
        return found

    def _make_room(self, count: int) -> None:
        self._leaves.make_room(count)
        old = len(self._keys)
        if count > old:
            self._keys.resize(max(count, old + old // 8, 1024), refcheck=False)


def _parted(known: Mask) -> tuple[slice | Mask, slice | Mask, int]:
    """(what is known, what is not, how many lead that are known). As a rule all of these lead."""
    known_count = int(np.count_nonzero(known))
    first = known_count if known_count == len(known) else int(known.argmin())
    if first == known_count:
        return slice(first), slice(first, None), first
    return known, ~known, first


def _own_first(uses: npt.NDArray[np.uint16], uses_max: int) -> int:
    """The first block that was not used by more requests than the conversation has had; the last
    one if that is not either."""
    if uses.item(-1) > uses_max:
        return len(uses) - 1
    return 0 if uses.item(0) <= uses_max else int((uses <= uses_max).argmax())
