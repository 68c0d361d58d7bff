"""The breaker of a remote tier, by hand: time and chance are arguments."""

from __future__ import annotations

from kvtier.pools.remote.breaker import Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(
    trouble_count=3,
    window_count=5,
    open_seconds_min=1.0,
    open_seconds_max=4.0,
    trial_seconds_max=30.0,
)


def breaker_of(jitter: float = 0.0) -> Breaker:
    return Breaker(SETTINGS, lambda: jitter)


def trouble(breaker: Breaker, now: float, reason: str = "timed_out") -> None:
    ticket = breaker.begin(now=now)
    assert ticket is not None
    breaker.on_trouble(ticket, reason, now=now)


def success(breaker: Breaker, now: float) -> None:
    ticket = breaker.begin(now=now)
    assert ticket is not None
    breaker.on_success(ticket)


def opened(now: float = 0.0) -> Breaker:
    breaker = breaker_of()
    for _ in range(3):
        trouble(breaker, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_some_troubles_among_the_last_calls_open_it() -> None:
    breaker = breaker_of()
    for wanted in (trouble, success, trouble, success):
        wanted(breaker, 0.0)
    assert breaker.state is BreakerState.CLOSED
    trouble(breaker, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_troubles_of_long_ago_are_forgotten() -> None:
    breaker = breaker_of()
    for wanted in (trouble, trouble, success, success, success, success, trouble):
        wanted(breaker, 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_an_open_one_lets_nothing_through_until_its_time() -> None:
    breaker = opened(now=10.0)
    assert breaker.begin(now=10.99) is None
    assert breaker.skipped_count == 1
    assert breaker.begin(now=11.0) is not None
    assert breaker.state is BreakerState.HALF_OPEN


def test_only_one_call_at_a_time_is_a_trial() -> None:
    breaker = opened()
    assert breaker.begin(now=1.0) is not None
    assert breaker.begin(now=1.0) is None
    assert breaker.begin(now=30.9) is None
    assert breaker.begin(now=31.0) is not None, "a trial that never reports is given up"


def test_a_call_that_its_caller_gave_up_tells_nothing() -> None:
    breaker = breaker_of()
    for _ in range(10):
        ticket = breaker.begin(now=0.0)
        assert ticket is not None
        breaker.on_given_up(ticket)
    assert breaker.state is BreakerState.CLOSED
    breaker = opened()
    trial = breaker.begin(now=1.0)
    assert trial is not None
    breaker.on_given_up(trial)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.begin(now=1.0) is not None, "another one may try"


def test_a_good_trial_closes_it() -> None:
    breaker = opened()
    success(breaker, 1.0)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.begin(now=1.0) is not None


def test_each_failed_trial_doubles_the_delay_up_to_the_most() -> None:
    breaker, now = opened(), 0.0
    for delay in (1.0, 2.0, 4.0, 4.0):
        assert breaker.begin(now=now + delay - 0.01) is None
        now += delay
        trouble(breaker, now)
        assert breaker.state is BreakerState.OPEN


def test_delays_begin_anew_only_after_a_window_of_good_answers() -> None:
    breaker = opened()
    success(breaker, 1.0)
    for _ in range(3):
        trouble(breaker, 1.0)
    assert breaker.begin(now=2.9) is None, "one good answer was luck"
    success(breaker, 3.0)
    for _ in range(5):
        success(breaker, 3.0)
    for _ in range(3):
        trouble(breaker, 3.0)
    assert breaker.begin(now=3.9) is None
    assert breaker.begin(now=4.0) is not None


def test_what_began_before_a_change_tells_nothing_of_now() -> None:
    breaker = breaker_of()
    late_one, late_other = breaker.begin(now=0.0), breaker.begin(now=0.0)
    assert late_one is not None
    assert late_other is not None
    for _ in range(3):
        trouble(breaker, 0.0)
    assert breaker.begin(now=1.0) is not None
    breaker.on_success(late_one)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.on_trouble(late_other, "timed_out", now=1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.troubles["timed_out"] == 4, "but it is counted"


def test_every_change_is_told_once_with_its_reason() -> None:
    breaker = opened()
    success(breaker, 1.0)
    changes = breaker.take_changes()
    assert [(one.before, one.after, one.reason) for one in changes] == [
        (BreakerState.CLOSED, BreakerState.OPEN, "timed_out"),
        (BreakerState.OPEN, BreakerState.HALF_OPEN, "timed_out"),
        (BreakerState.HALF_OPEN, BreakerState.CLOSED, ""),
    ]
    assert breaker.take_changes() == []


def test_jitter_makes_the_delay_shorter_by_up_to_a_half() -> None:
    breaker = breaker_of(jitter=1.0)
    for _ in range(3):
        trouble(breaker, 0.0)
    assert breaker.begin(now=0.49) is None
    assert breaker.begin(now=0.5) is not None
