"""The breaker's table against what law 2 asks for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.client.breaker import (
    BREAKER_TRANSITIONS,
    BreakerEvent,
    BreakerState,
    next_breaker_state,
)
from kvtier.errors import IllegalTransition


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against three facts: is there a session, is it tainted, has it answered."""

    @initialize()
    def start(self) -> None:
        self.state = BreakerState.ABSENT
        self.has_session = False
        self.is_tainted = False
        self.has_answered = False

    def move(self, event: BreakerEvent) -> None:
        self.state = next_breaker_state(self.state, event)

    @rule()
    def open_session(self) -> None:
        if self.has_session:
            with pytest.raises(IllegalTransition):
                self.move(BreakerEvent.SESSION_OPENED)
            return
        self.move(BreakerEvent.SESSION_OPENED)
        self.has_session, self.is_tainted, self.has_answered = True, False, False

    @rule()  # What is reported late, after the session was lost, must change nothing.
    def lose_session(self) -> None:
        self.move(BreakerEvent.SESSION_LOST)
        self.has_session = False

    @rule()
    def answer_probe(self) -> None:
        self.move(BreakerEvent.ANSWERED)
        if self.is_tainted:
            self.has_session = False  # It must be replaced.
        self.has_answered = True  # Of no use without a session.

    @rule(changes_state=st.booleans())
    def miss_an_answer(self, changes_state: bool) -> None:
        self.move(BreakerEvent.EFFECT_UNKNOWN if changes_state else BreakerEvent.UNANSWERED)
        self.has_answered = False
        self.is_tainted |= changes_state

    @invariant()
    def calls_pass_exactly_on_an_untainted_session_that_answered(self) -> None:
        if not hasattr(self, "state"):
            return
        passes = self.has_session and self.has_answered and not self.is_tainted
        assert (self.state is BreakerState.CLOSED) == passes
        assert (self.state is BreakerState.ABSENT) == (not self.has_session)


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_suspect_session_is_never_used_again() -> None:
    leads_to = {
        after
        for (before, _), after in BREAKER_TRANSITIONS.items()
        if before is BreakerState.SUSPECT
    }
    assert leads_to == {BreakerState.SUSPECT, BreakerState.ABSENT}
