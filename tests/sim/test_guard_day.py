"""A day of the guard in virtual time: on traces curves are never a point below LRU."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.guard_day import HOUR, POLICIES, WORKLOADS, Played, night_and_day, play
from kvtier.policy.eviction import EvictionOrder
from kvtier.policy.guard import BETTER_RATIO, WINDOW_SECONDS
from kvtier.sim.traces import Trace
from tests.support.forms import is_torture, rounds, state_finding

BELOW_LRU_MAX = 0.01
NIGHT_HOURS, DAY_HOURS = (7.0, 1.0) if is_torture() else (3.5, 0.5)
OF_TRACES = [name for name in WORKLOADS if name != "night and day"] if is_torture() else ["chat"]


@cache
def trace_of(name: str, hours: float) -> Trace:
    return WORKLOADS[name].make(hours)


@cache
def of_lru(name: str, hours: float) -> Played:
    return play(trace_of(name, hours), POLICIES["lru"], WORKLOADS[name].size)


@cache
def adversary() -> Trace:
    return night_and_day(rounds(short=4, full=24), NIGHT_HOURS, DAY_HOURS)


def by_age_at(played: Played, since: float) -> float:
    """The first time from then on that it evicts by age."""
    ends = [at for at, _ in played.orders[1:]] + [float("inf")]
    return next(
        max(at, since)
        for (at, order), end in zip(played.orders, ends, strict=True)
        if order is EvictionOrder.BY_AGE and end > since
    )


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(rounds(short=60, full=3600))
@pytest.mark.parametrize("name", OF_TRACES)
def test_guarded_curves_are_never_a_point_below_lru_on_traces(name: str) -> None:
    hours = 24.0 if is_torture() else 1.0
    lru = of_lru(name, hours)
    curves = play(trace_of(name, hours), POLICIES["curves"], WORKLOADS[name].size)
    state_finding(
        f"guard: {name}, {hours:.0f} h: lru {lru.hit_ratio:.4f}, curves "
        f"{curves.hit_ratio:.4f}, {curves.by_age_share():.1%} of it by age"
    )
    assert curves.orders[-1][1] is not EvictionOrder.UNGUARDED
    assert curves.hit_ratio >= lru.hit_ratio - BELOW_LRU_MAX


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.timeout(rounds(short=60, full=900))
def test_guard_saves_most_of_what_curves_lose_where_they_learned_the_wrong_thing() -> None:
    """Not all: what was learned has lost before it is seen, and a sample sees it late."""
    size = WORKLOADS["night and day"].size
    lru, curves, unguarded = (
        play(adversary(), POLICIES[one], size) for one in ("lru", "curves", "unguarded")
    )
    lost, saved = lru.hit_ratio - unguarded.hit_ratio, curves.hit_ratio - unguarded.hit_ratio
    state_finding(
        f"guard: made so that curves lose, {curves.seconds / HOUR:.0f} h: lru "
        f"{lru.hit_ratio:.4f}, curves {curves.hit_ratio:.4f}, without guard "
        f"{unguarded.hit_ratio:.4f}; {curves.by_age_share():.1%} of it by age"
    )
    assert lost > 3 * BELOW_LRU_MAX, "curves do not lose here"
    assert saved > 0.5 * lost
    if is_torture():  # Of a whole day; half an hour of four is more of it than an hour of eight.
        assert curves.hit_ratio >= lru.hit_ratio - BELOW_LRU_MAX
    morning = NIGHT_HOURS * HOUR
    while morning < curves.seconds:  # Ends: goes on by a day each time.
        lost_at = first_lost(unguarded, lru, morning)
        late = by_age_at(curves, morning) - lost_at
        assert late <= 2 * WINDOW_SECONDS, f"{late:.0f} s, on the morning at {morning:.0f} s"
        morning += (NIGHT_HOURS + DAY_HOURS) * HOUR


def first_lost(curves: Played, lru: Played, since: float) -> float:
    """The end of the first window from then on in which curves had clearly fewer hits."""
    first = int(since / WINDOW_SECONDS)
    pairs = zip(curves.window_hits[first:], lru.window_hits[first:], strict=False)
    lost = next(place for place, (mine, other) in enumerate(pairs) if mine * BETTER_RATIO < other)
    return (first + lost + 1) * WINDOW_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_guard_saves_a_cache_whose_curves_evict_badly() -> None:
    """Evicting by age from the second window on, it has most of what age alone has."""
    trace, size, lru = trace_of("chat", 1.0), WORKLOADS["chat"].size, of_lru("chat", 1.0)
    wrong, unguarded = (play(trace, POLICIES[one], size) for one in ("wrong", "wrong, unguarded"))
    guarded_at = next(at for at, one in wrong.orders if one is not EvictionOrder.UNGUARDED)
    assert by_age_at(wrong, guarded_at) - guarded_at <= 2 * WINDOW_SECONDS
    assert unguarded.hit_ratio < lru.hit_ratio / 2
    assert wrong.hit_ratio >= lru.hit_ratio - BELOW_LRU_MAX
