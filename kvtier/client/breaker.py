"""The circuit breaker: law 2 as a table. Pure; whoever owns it reports what happened.

Calls pass in CLOSED only. In every other state they fail at once, whatever the daemon does:

    ABSENT   no session; somebody is opening one
    OPEN     a session, but the daemon has not shown that it answers
    SUSPECT  a call whose effect is unknown timed out: once the daemon answers again, this session
             must be replaced by a new one that names it, because slots or leases may be ours that
             we know nothing of
    CLOSED   calls pass
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from kvtier.errors import IllegalTransition


class BreakerState(Enum):
    ABSENT = auto()
    OPEN = auto()
    SUSPECT = auto()
    CLOSED = auto()


class BreakerEvent(Enum):
    SESSION_OPENED = auto()
    SESSION_LOST = auto()
    ANSWERED = auto()  # A probe was answered, with whatever.
    UNANSWERED = auto()  # A call that changes nothing got no answer.
    EFFECT_UNKNOWN = auto()  # A call that changes state got no answer.


_S, _E = BreakerState, BreakerEvent

BREAKER_TRANSITIONS: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.ABSENT, _E.SESSION_OPENED): _S.OPEN,
    (_S.ABSENT, _E.SESSION_LOST): _S.ABSENT,
    # Reports of calls that were under way when the session was lost.
    (_S.ABSENT, _E.ANSWERED): _S.ABSENT,
    (_S.ABSENT, _E.UNANSWERED): _S.ABSENT,
    (_S.ABSENT, _E.EFFECT_UNKNOWN): _S.ABSENT,
    (_S.OPEN, _E.ANSWERED): _S.CLOSED,
    (_S.OPEN, _E.UNANSWERED): _S.OPEN,
    (_S.OPEN, _E.EFFECT_UNKNOWN): _S.SUSPECT,
    (_S.OPEN, _E.SESSION_LOST): _S.ABSENT,
    (_S.CLOSED, _E.ANSWERED): _S.CLOSED,
    (_S.CLOSED, _E.UNANSWERED): _S.OPEN,
    (_S.CLOSED, _E.EFFECT_UNKNOWN): _S.SUSPECT,
    (_S.CLOSED, _E.SESSION_LOST): _S.ABSENT,
    # The way out of SUSPECT leads through a new session only.
    (_S.SUSPECT, _E.ANSWERED): _S.ABSENT,
    (_S.SUSPECT, _E.UNANSWERED): _S.SUSPECT,
    (_S.SUSPECT, _E.EFFECT_UNKNOWN): _S.SUSPECT,
    (_S.SUSPECT, _E.SESSION_LOST): _S.ABSENT,
}


def next_breaker_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """The only way a breaker changes state."""
    try:
        return BREAKER_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None
