"""What each tenant may have, against the simplest thing that could be right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.tenancy import Tenancy, TenantBudget, Turns, divide
from kvtier.core.write_shares import WriteShares

NAMES = ("a", "b", "c", "d")
HOUR = 3600.0


@st.composite
def budgets(draw: st.DrawFn) -> dict[str, TenantBudget]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    found = {}
    for name in names:
        low = draw(st.integers(0, 10)) / 10
        high = draw(st.integers(max(1, round(low * 10)), 10)) / 10
        found[name] = TenantBudget(low / len(names), high, draw(st.integers(1, 8)))
    return found


def poured(total: float, wants: dict[str, TenantBudget], drops: int = 20_000) -> dict[str, float]:
    """A drop after the other, always into the cup with the lowest level that is not full."""
    cups = {name: total * one.minimum for name, one in wants.items()}
    drop = total / drops
    while sum(cups.values()) + drop <= total:
        open_cups = [
            name for name, one in wants.items() if cups[name] + drop <= total * one.maximum
        ]
        if not open_cups:
            break
        lowest = min(open_cups, key=lambda name: (cups[name] / wants[name].weight, name))
        cups[lowest] += drop
    return cups


@given(wants=budgets(), total=st.integers(1, 1000))
def test_it_is_divided_as_if_it_were_poured(wants: dict[str, TenantBudget], total: int) -> None:
    found, right = divide(total, wants), poured(total, wants, drops=400)
    assert sum(found.values()) <= total * (1 + 1e-9)
    for name, one in wants.items():
        assert total * one.minimum - 1e-6 <= found[name] <= total * one.maximum + 1e-6
        assert found[name] == pytest.approx(right[name], abs=total / 400 * (len(wants) + 1))


def test_minima_beyond_the_whole_are_cut_alike() -> None:
    wants = {"a": TenantBudget(0.9), "b": TenantBudget(0.6)}
    assert divide(10, wants) == pytest.approx({"a": 6.0, "b": 4.0})


def test_who_is_idle_keeps_its_minimum_of_what_it_holds_and_nothing_else() -> None:
    tenancy = Tenancy({"a": TenantBudget(0.5), "b": TenantBudget()}, idle_seconds=10)
    tenancy.note_use("a", 0.0)
    tenancy.note_use("b", 100.0)
    held = {"a": 8.0, "b": 2.0}
    shares = tenancy.shares(10, held, 100.0, wanting="b")
    assert shares == pytest.approx({"a": 5.0, "b": 5.0})
    assert tenancy.shares(10, {"a": 1.0}, 100.0, wanting="b")["b"] == pytest.approx(9.0)
    assert tenancy.shares(10, held, 100.0, wanting="a") == pytest.approx({"a": 5.0, "b": 5.0})


def test_turns_go_round_by_weight_and_absence_earns_nothing() -> None:
    turns = Turns(Tenancy({"b": TenantBudget(weight=3)}, idle_seconds=10))
    for _ in range(100):
        turns.charge("a", 1.0)
    served = {"a": 0, "b": 0}
    for _ in range(40):
        first = turns.order(["a", "b"])[0]
        served[first] += 1
        turns.charge(first, 1.0)
    assert served["b"] == pytest.approx(30, abs=1)


def test_nobody_writes_what_another_is_guaranteed() -> None:
    shares = WriteShares({"meek": TenantBudget(0.25)}, bytes_per_hour=100)
    while shares.may_write("greedy"):
        shares.take("greedy", 1)
    written = 0
    while shares.may_write("meek"):
        shares.take("meek", 1)
        written += 1
    assert written == 25
    shares.tell(0.0)
    shares.tell(HOUR)
    assert shares.left_bytes == pytest.approx(100)


def test_what_a_guaranteed_part_cannot_hold_is_for_all() -> None:
    shares = WriteShares({"meek": TenantBudget(0.5)}, bytes_per_hour=100)
    while shares.may_write("greedy"):
        shares.take("greedy", 1)
    shares.tell(0.0)
    shares.tell(HOUR / 2)  # Half an hour earns 25 for each; meek's are saved up already.
    written = 0
    while shares.may_write("greedy"):
        shares.take("greedy", 1)
        written += 1
    assert written == 50


def test_nobody_writes_more_than_its_maximum() -> None:
    shares = WriteShares({"capped": TenantBudget(maximum=0.1)}, bytes_per_hour=100)
    written = 0
    while shares.may_write("capped"):
        shares.take("capped", 1)
        written += 1
    assert written == 10
    assert shares.may_write("other")
