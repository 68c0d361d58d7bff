"""The states of a replica: one table, one function."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvtier.core.replica import (
    REPLICA_TRANSITIONS,
    ReplicaEvent,
    ReplicaState,
    move,
    move_all,
    next_state,
    transition_diagram,
)
from kvtier.errors import IllegalTransition


def column(*states: ReplicaState) -> np.ndarray:
    return np.array(states, dtype=np.uint8)


def places(*indices: int) -> np.ndarray:
    return np.array(indices, dtype=np.int32)


@pytest.mark.parametrize(("state", "event"), list(product(ReplicaState, ReplicaEvent)))
def test_one_and_many_replicas_move_alike(state: ReplicaState, event: ReplicaEvent) -> None:
    states = column(state)
    if (state, event) in REPLICA_TRANSITIONS:
        move(states, places(0), event)
        assert states[0] == next_state(state, event)
    else:
        with pytest.raises(IllegalTransition):
            move(states, places(0), event)
        with pytest.raises(IllegalTransition):
            next_state(state, event)
        assert states[0] == state


def test_one_illegal_move_among_many_changes_none() -> None:
    states = column(ReplicaState.RESERVED, ReplicaState.READY)
    with pytest.raises(IllegalTransition, match="COMMIT while READY"):
        move(states, places(0, 1), ReplicaEvent.COMMIT)
    assert states.tolist() == [ReplicaState.RESERVED, ReplicaState.READY]


def test_moving_by_mask_leaves_the_others() -> None:
    states = column(ReplicaState.RESERVED, ReplicaState.GONE, ReplicaState.READY)
    move_all(states, states != ReplicaState.GONE, ReplicaEvent.VOID)
    assert states.tolist() == [ReplicaState.GONE] * 3
    with pytest.raises(IllegalTransition):
        move_all(states, states == ReplicaState.GONE, ReplicaEvent.VOID)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(REPLICA_TRANSITIONS.values()) == set(ReplicaState)
    assert {state for state, _ in REPLICA_TRANSITIONS} == set(ReplicaState)


def test_the_diagram_shows_every_transition() -> None:
    assert len(transition_diagram().splitlines()) == 1 + len(REPLICA_TRANSITIONS)
    assert "    RESERVED --> READY: commit" in transition_diagram()
