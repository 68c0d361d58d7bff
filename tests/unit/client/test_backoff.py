from __future__ import annotations

import random

from kvtier.client.backoff import Backoff


def test_delays_double_up_to_the_maximum() -> None:
    backoff = Backoff(0.05, 2.0, random.Random(1))
    steps = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for step in steps:
        assert step / 2 <= backoff.next_seconds() <= step


def test_success_starts_small_again() -> None:
    backoff = Backoff(0.05, 2.0, random.Random(1))
    for _ in range(10):
        backoff.next_seconds()
    backoff.reset()
    assert backoff.next_seconds() <= 0.05


def test_two_engines_do_not_come_back_in_step() -> None:
    one, other = (Backoff(0.05, 2.0, random.Random(seed)) for seed in (1, 2))
    assert [one.next_seconds() for _ in range(5)] != [other.next_seconds() for _ in range(5)]


def test_the_same_seed_waits_the_same() -> None:
    one, other = (Backoff(0.05, 2.0, random.Random(7)) for _ in range(2))
    assert [one.next_seconds() for _ in range(5)] == [other.next_seconds() for _ in range(5)]
