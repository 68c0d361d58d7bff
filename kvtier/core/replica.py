"""The states of a replica, and the one function that moves it between them.

A *replica* is one block in one tier, in one slot. Where no replica is, the state reads GONE.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.errors import IllegalTransition

Places = npt.NDArray[np.int32]
"""Positions in a namespace's slot columns (core/slots.py); one a slot."""


class ReplicaState(IntEnum):
    GONE = 0
    RESERVED = 1
    READY = 2
    LEAVING = 3


# As numbers, to compare columns with: NumPy takes an enum's member apart at every comparison, and
# Python 3.11 looks for it by name.
GONE, RESERVED, READY, LEAVING = map(int, ReplicaState)


class ReplicaEvent(IntEnum):
    RESERVE = 0
    COMMIT = 1
    ABORT = 2
    NOMINATE = 3
    RESCUE = 4
    DROP = 5
    VOID = 6


REPLICA_TRANSITIONS: Mapping[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (ReplicaState.GONE, ReplicaEvent.RESERVE): ReplicaState.RESERVED,  # A new replica begins.
    (ReplicaState.RESERVED, ReplicaEvent.COMMIT): ReplicaState.READY,
    (ReplicaState.RESERVED, ReplicaEvent.ABORT): ReplicaState.GONE,
    (ReplicaState.READY, ReplicaEvent.NOMINATE): ReplicaState.LEAVING,
    (ReplicaState.LEAVING, ReplicaEvent.RESCUE): ReplicaState.READY,  # Hit again in time.
    (ReplicaState.LEAVING, ReplicaEvent.DROP): ReplicaState.GONE,
    # Cleared, corrupt, or its place withdrawn: gone at once, whatever still pins the slot.
    (ReplicaState.RESERVED, ReplicaEvent.VOID): ReplicaState.GONE,
    (ReplicaState.READY, ReplicaEvent.VOID): ReplicaState.GONE,
    (ReplicaState.LEAVING, ReplicaEvent.VOID): ReplicaState.GONE,
}

_ILLEGAL = 255


def _transition_matrix() -> npt.NDArray[np.uint8]:
    matrix = np.full((len(ReplicaState), len(ReplicaEvent)), _ILLEGAL, dtype=np.uint8)
    for (state, event), after in REPLICA_TRANSITIONS.items():
        matrix[state, event] = after
    return matrix


_MATRIX = _transition_matrix()
_AFTER = {event: np.ascontiguousarray(_MATRIX[:, event]) for event in ReplicaEvent}


def next_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """What becomes of one replica; raises IllegalTransition against the table."""
    try:
        return REPLICA_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None


def move(states: npt.NDArray[np.uint8], places: Places, event: ReplicaEvent) -> None:
    """The only way replicas change state: all of `places` at once, or IllegalTransition."""
    after = _AFTER[event].take(states.take(places))
    if np.count_nonzero(after == _ILLEGAL):
        wrong = ReplicaState(int(states[places][after == _ILLEGAL][0]))
        raise IllegalTransition(f"{event.name} while {wrong.name}")
    states[places] = after


def move_all(
    states: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_], event: ReplicaEvent
) -> None:
    """`move` for most places at once: where `mask` is set."""
    after = _AFTER[event][states[mask]]
    if (after == _ILLEGAL).any():
        raise IllegalTransition(f"{event.name} against the table")
    states[mask] = after


def transition_diagram() -> str:
    """The table as a Mermaid diagram, for docs/architecture.md."""
    lines = ["stateDiagram-v2"]
    for (state, event), after in REPLICA_TRANSITIONS.items():
        lines.append(f"    {state.name} --> {after.name}: {event.name.lower()}")
    return "\n".join(lines)
