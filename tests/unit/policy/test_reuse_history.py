"""What is remembered of blocks, and for how long."""

from __future__ import annotations

import numpy as np

from kvtier.policy.reuse_history import WAYS, ReuseHistory


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def remember(table: ReuseHistory, keys: np.ndarray, now: float) -> list[float]:
    """As if these were used; returns the times of what was forgotten for them."""
    places, known = table.find(keys)
    found, forgotten = table.claim(keys[~known], places[~known], now)
    places[~known] = found
    table.used_at[places] = now
    return [] if forgotten is None else forgotten.used_at.tolist()


def test_what_is_remembered_is_what_was_said_last() -> None:
    table, told, now = ReuseHistory(1 << 14), {}, 0.0
    chance = np.random.default_rng(7)
    for _ in range(200):
        now += 1.0
        keys = np.unique(chance.integers(0, 5000, 40)).astype(np.uint64)
        places, known = table.find(keys)
        assert [key in told for key in keys.tolist()] == known.tolist()
        times = table.used_at[places[known]].tolist()
        assert times == [told[key] for key in keys[known].tolist()]
        assert not remember(table, keys, now), "forgot with room left"
        told.update(dict.fromkeys(keys.tolist(), now))
    assert table.count == len(told)


def test_full_table_forgets_what_was_used_longest_ago() -> None:
    table = ReuseHistory(WAYS)
    for number in range(WAYS):
        remember(table, keys_of(number), 1.0 + number)
    assert sorted(remember(table, keys_of(100, 101), 50.0)) == [1.0, 2.0]
    _, known = table.find(keys_of(0, 1, 2, 100, 101))
    assert known.tolist() == [False, False, True, True, True]
    assert table.count == WAYS


def test_each_of_a_full_set_is_found_where_it_is() -> None:
    table = ReuseHistory(WAYS)
    keys = keys_of(*range(WAYS))
    remember(table, keys, 1.0)
    places, known = table.find(keys_of(*range(WAYS), WAYS))
    assert sorted(places[:WAYS].tolist()) == list(range(WAYS))
    assert known.tolist() == [True] * WAYS + [False]


def test_more_at_once_than_a_set_holds_are_cut_off() -> None:
    table = ReuseHistory(WAYS)
    keys = keys_of(*range(3 * WAYS))
    remember(table, keys, 1.0)
    assert 1 <= int(table.find(keys)[1].sum()) <= WAYS


def test_new_keys_of_one_set_find_places_of_their_own() -> None:
    table = ReuseHistory(WAYS)
    remember(table, keys_of(1), 1.0)
    keys = keys_of(*range(2, 1 + WAYS))
    places, _ = table.find(keys)
    found, _ = table.claim(keys, places, 2.0)
    assert len(set(found.tolist())) == WAYS - 1
    assert table.find(keys_of(*range(1, 1 + WAYS)))[1].all()


def test_sample_stands_for_all() -> None:
    table = ReuseHistory(1 << 16)
    remember(table, np.arange(30_000, dtype=np.uint64), 1.0)
    waits, weight = table.sample(1 << 12)
    assert len(waits.kind) <= 1 << 12
    assert abs(len(waits.kind) * weight - 30_000) < 0.1 * 30_000
