"""How many calls a tenant may make, and that no other one feels it."""

from __future__ import annotations

import pytest

from kvtier.errors import LimitExceeded
from kvtier.server.call_limits import CallLimits


def count_admitted(limits: CallLimits, tenant: str, *, asked: int, now: float) -> int:
    return sum(limits.may_begin(tenant, now) for _ in range(asked))


def test_a_rate_holds_over_time_and_for_its_tenant_alone() -> None:
    limits = CallLimits(calls_max=10, rates={"red": 100})
    assert count_admitted(limits, "red", asked=500, now=0.0) == 100
    assert count_admitted(limits, "blue", asked=500, now=0.0) == 500
    assert count_admitted(limits, "red", asked=500, now=0.5) == 50
    assert count_admitted(limits, "red", asked=500, now=60.0) == 100, "a second's worth at most"


def test_the_refusal_names_the_option() -> None:
    limits = CallLimits(calls_max=10, rates={"red": 1})
    assert "tenant.red.calls_per_second" in str(limits.refusal("red"))


def test_calls_under_way_are_each_tenants_own() -> None:
    limits = CallLimits(calls_max=1)
    with limits.under_way("red"), limits.under_way("red"):
        with pytest.raises(LimitExceeded, match=r"grpc.calls_max"):
            limits.check_room("red")
        with limits.under_way("blue"):
            limits.check_room("blue")
    assert limits.active_count == 0


def test_what_was_taken_can_be_given_back_when_no_more_may_be_taken() -> None:
    limits = CallLimits(calls_max=10, rates={"red": 10})
    assert count_admitted(limits, "red", asked=50, now=0.0) == 10
    given = sum(limits.may_begin("red", 0.0, gives_back=True) for _ in range(50))
    assert given == 10, "a second's worth, for this too is bounded"
    assert count_admitted(limits, "red", asked=50, now=0.9) == 0, "it is paid for afterwards"
