"""Figures of two sides that take turns: what is a ratio, whose turn it is, what is not counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.cli.bench_tiers_rounds import (
    OURS,
    RAW,
    RoundPlan,
    Samples,
    figures_of,
    measure_sides,
    order_of,
)

PLAN = RoundPlan(block_count=4, round_count=3, single_count=2)


class Machine:
    """A clock that moves only while a side works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, str, list[int]]] = []


class FakeSide:
    """Takes so many seconds a block, and the first time it is asked ten times as long."""

    def __init__(self, name: str, machine: Machine, seconds: float) -> None:
        self._name, self._machine, self._seconds = name, machine, seconds
        self._is_new = True

    def put(self, numbers: Sequence[int]) -> None:
        self._take("put", numbers, self._seconds)

    def get(self, numbers: Sequence[int]) -> None:
        self._take("get", numbers, 2 * self._seconds)

    def forget(self, numbers: Sequence[int]) -> None:
        self._machine.now += 1000.0
        self._machine.calls.append((self._name, "forget", list(numbers)))

    def _take(self, way: str, numbers: Sequence[int], seconds: float) -> None:
        slowness, self._is_new = (10.0 if self._is_new else 1.0), False
        self._machine.now += slowness * seconds * len(numbers)
        self._machine.calls.append((self._name, way, list(numbers)))


def measured() -> tuple[Machine, dict[tuple[str, str], Samples]]:
    machine = Machine()
    sides = {
        OURS: FakeSide(OURS, machine, 0.5),
        RAW: FakeSide(RAW, machine, 0.25),
    }
    return machine, measure_sides(sides, PLAN, now=lambda: machine.now)


def test_seconds_are_those_of_the_call_and_the_first_round_is_left_out() -> None:
    _, found = measured()
    assert found[OURS, "put"].batches == [2.0] * 3
    assert found[OURS, "get"].batches == [4.0] * 3
    assert found[RAW, "put"].batches == [1.0] * 3
    assert found[OURS, "put"].singles == [0.5] * 6
    assert found[RAW, "get"].singles == [0.5] * 6


def test_who_goes_first_alternates() -> None:
    assert order_of([OURS, RAW], 0) == [OURS, RAW]
    assert order_of([OURS, RAW], 1) == [RAW, OURS]
    machine, _ = measured()
    batches = [name for name, way, numbers in machine.calls if way == "put" and len(numbers) == 4]
    assert batches == [OURS, RAW, RAW, OURS, OURS, RAW, RAW, OURS]


def test_what_was_put_is_forgotten_before_it_is_put_again() -> None:
    machine, _ = measured()
    there: set[tuple[str, int]] = set()
    for name, way, numbers in machine.calls:
        these = {(name, number) for number in numbers}
        if way == "put":
            assert not these & there
            there |= these
        elif way == "get":
            assert these <= there
        else:
            there -= these
    assert not there


def test_a_ratio_is_of_speeds_and_the_median_of_rounds() -> None:
    found = {
        (OURS, "put"): Samples([2.0, 1.0, 4.0], [0.001, 0.003]),
        (RAW, "put"): Samples([1.0, 0.8, 1.0], [0.002, 0.002]),
        (OURS, "get"): Samples([1.0, 1.0, 1.0], [0.001]),
        (RAW, "get"): Samples([2.0, 2.0, 2.0], [0.001]),
    }
    figures = figures_of("cxl", found, batch_bytes=10**9)
    assert figures["cxl_put_ratio"] == 0.5
    assert figures["cxl_put_ratios"] == [0.5, 0.8, 0.25]
    assert figures["cxl_put_gbps"] == 0.5
    assert figures["cxl_put_raw_gbps"] == 1.0
    assert figures["cxl_get_ratio"] == 2.0
    assert figures["cxl_put_p50_ms"] == pytest.approx(1.0)
    assert figures["cxl_put_p99_ms"] == pytest.approx(3.0)
    assert figures["cxl_put_raw_p99_ms"] == pytest.approx(2.0)
