"""Ghosts: what is remembered of blocks that are not here."""

from __future__ import annotations

import numpy as np

from kvtier.policy.ghosts import WAYS, GhostTable, Past


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def used(*times: float) -> Past:
    past = Past.of_none(len(times))
    past.used_at[:], past.uses[:] = times, 1
    return past


def test_what_is_remembered_is_what_was_said_last() -> None:
    table, told, now = GhostTable(1 << 14), {}, 0.0
    chance = np.random.default_rng(7)
    for _ in range(200):
        now += 1.0
        keys = np.unique(chance.integers(0, 5000, 40)).astype(np.uint64)
        places = table.find(keys)
        assert [key in told for key in keys.tolist()] == (places >= 0).tolist()
        times = table.get(places[places >= 0]).used_at.tolist()
        assert times == [told[key] for key in keys[places >= 0].tolist()]
        table.set(places[places >= 0], used(*[now] * int((places >= 0).sum())))
        fresh = keys[places < 0]
        assert not len(table.add(fresh, used(*[now] * len(fresh))).uses), "forgot with room left"
        told.update(dict.fromkeys(keys.tolist(), now))
        gone = keys[:5]
        table.take(table.find(gone))
        for key in gone.tolist():
            del told[key]


def test_full_table_forgets_what_was_used_longest_ago() -> None:
    table = GhostTable(WAYS)
    table.add(keys_of(*range(WAYS)), used(*range(WAYS)))
    forgotten = table.add(keys_of(100, 101), used(50.0, 50.0))
    assert sorted(forgotten.used_at.tolist()) == [0.0, 1.0]
    places = table.find(keys_of(0, 1, 2, 100, 101))
    assert (places >= 0).tolist() == [False, False, True, True, True]


def test_more_at_once_than_a_set_holds_are_cut_off() -> None:
    table = GhostTable(WAYS)
    table.add(keys_of(*range(3 * WAYS)), used(*[1.0] * 3 * WAYS))
    assert int((table.find(keys_of(*range(3 * WAYS))) >= 0).sum()) == WAYS


def test_sample_stands_for_all() -> None:
    table = GhostTable(1 << 16)
    keys = np.arange(30_000, dtype=np.uint64)
    table.add(keys, used(*[1.0] * len(keys)))
    past, weight = table.sample(1 << 12)
    assert len(past.uses) <= 1 << 12
    assert abs(len(past.uses) * weight - len(keys)) < 0.1 * len(keys)
