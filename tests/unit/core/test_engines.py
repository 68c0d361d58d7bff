"""Sessions, processes and quarantine on directed stories; random ones are in tests/model."""

from __future__ import annotations

import pytest

from kvtier.core.engines import EngineTable, QuietAsked
from kvtier.core.events import SessionOpened
from kvtier.errors import Forbidden, Unauthenticated
from kvtier.types import NamespaceId, Role, SessionId
from tests.support.world import engine_id

SCHEDULER, WORKER = SessionId(1), SessionId(2)


def open_session(
    table: EngineTable, session: int, role: Role, *, replaces: int | None = None, number: int = 1
) -> None:
    table.open(
        SessionOpened(
            SessionId(session),
            engine=engine_id(number),
            role=role,
            shards=(0,) if role is not Role.SCHEDULER else (),
            by_value=role is Role.TOOL,
            replaces=None if replaces is None else SessionId(replaces),
        )
    )


@pytest.fixture
def table() -> EngineTable:
    table = EngineTable(grace_seconds=1.0)
    open_session(table, SCHEDULER, Role.SCHEDULER)
    open_session(table, WORKER, Role.WORKER)
    return table


def test_slots_wait_for_a_worker_that_was_told_to_copy(table: EngineTable) -> None:
    assert table.end_process(SCHEDULER, 10.0, dead=True) == [QuietAsked(WORKER, SCHEDULER)]
    assert table.take_finished(1e9) == []
    table.declare_quiet(WORKER, SCHEDULER)
    assert table.take_finished(10.0) == [SCHEDULER]
    assert table.take_finished(10.0) == []


def test_slots_wait_for_the_scheduler_that_may_still_tell_a_worker_to_copy(
    table: EngineTable,
) -> None:
    """It maps nothing; but until it knows, a worker that joins tomorrow does as it is told."""
    table.end_session(SCHEDULER, 10.0)
    table.declare_quiet(WORKER, SCHEDULER)
    table.end_process(WORKER, 11.0, dead=False)
    assert table.take_finished(1e9) == [WORKER]
    table.forget(WORKER)
    assert not table.is_engine_gone(engine_id(1)), "its leases are still good"
    open_session(table, 3, Role.WORKER)
    assert table.ask_again() == [QuietAsked(SessionId(3), SCHEDULER)]
    open_session(table, 4, Role.SCHEDULER, replaces=SCHEDULER)
    assert table.ask_again() == [QuietAsked(SessionId(4), SCHEDULER)]
    table.declare_quiet(SessionId(4), SCHEDULER)
    assert table.take_finished(1e9) == []
    table.declare_quiet(SessionId(3), SCHEDULER)
    assert table.take_finished(11.0) == [SCHEDULER]


def test_slots_wait_for_a_stopped_worker_whose_connection_ended(table: EngineTable) -> None:
    table.end_session(WORKER, 10.0)
    table.end_process(SCHEDULER, 10.0, dead=True)
    table.declare_quiet(WORKER, SCHEDULER)  # Its connection is over: it cannot have said so.
    assert table.take_finished(1e9) == []
    table.end_process(WORKER, 20.0, dead=True)
    assert table.take_finished(20.9) == []
    assert set(table.take_finished(21.0)) == {SCHEDULER, WORKER}


def test_a_worker_that_was_away_is_asked_when_it_is_back(table: EngineTable) -> None:
    table.end_session(WORKER, 10.0)
    assert table.end_session(SCHEDULER, 10.0) == []
    open_session(table, 3, Role.WORKER, replaces=WORKER)
    asked = set(table.ask_again())
    assert asked == {QuietAsked(SessionId(3), WORKER), QuietAsked(SessionId(3), SCHEDULER)}
    assert table.ask_again() == []


def test_a_worker_that_joins_late_is_waited_for_as_well(table: EngineTable) -> None:
    table.end_process(SCHEDULER, 10.0, dead=True)
    open_session(table, 3, Role.WORKER)
    assert table.ask_again() == [QuietAsked(SessionId(3), SCHEDULER)]
    table.declare_quiet(WORKER, SCHEDULER)
    assert table.take_finished(1e9) == []
    table.declare_quiet(SessionId(3), SCHEDULER)
    assert table.take_finished(10.0) == [SCHEDULER]


def test_dma_of_a_worker_that_died_before_is_waited_for(table: EngineTable) -> None:
    table.end_process(WORKER, 10.0, dead=True)
    table.end_process(SCHEDULER, 10.5, dead=False)
    assert table.take_finished(10.9) == []
    assert set(table.take_finished(11.0)) == {SCHEDULER, WORKER}


def test_a_worker_of_another_engine_has_no_say(table: EngineTable) -> None:
    open_session(table, 3, Role.WORKER, number=2)
    table.end_session(SCHEDULER, 10.0)
    table.declare_quiet(SessionId(3), SCHEDULER)
    assert table.take_finished(1e9) == []


def test_a_goodbye_needs_no_grace(table: EngineTable) -> None:
    table.end_process(WORKER, 10.0, dead=False)
    assert table.take_finished(10.0) == [WORKER]


def test_an_engine_is_gone_when_all_its_processes_are(table: EngineTable) -> None:
    table.end_process(WORKER, 10.0, dead=True)
    table.end_session(SCHEDULER, 10.0)
    assert not table.is_engine_gone(engine_id(1))
    table.end_process(SCHEDULER, 10.0, dead=True)
    assert table.is_engine_gone(engine_id(1))


def test_the_next_end_of_a_quarantine_by_time_is_known(table: EngineTable) -> None:
    assert table.next_ready() is None
    table.end_process(WORKER, 10.0, dead=True)
    assert table.next_ready() == 11.0


def test_an_ended_session_asks_for_nothing_more(table: EngineTable) -> None:
    table.end_session(SCHEDULER, 10.0)
    with pytest.raises(Unauthenticated):
        table.require_live(SCHEDULER)
    assert table.end_session(SCHEDULER, 11.0) == []


def test_slots_are_for_sessions_that_opened_the_namespace(table: EngineTable) -> None:
    with pytest.raises(Forbidden):
        table.require_slots(SCHEDULER, NamespaceId(1))
    table.require_live(SCHEDULER).namespaces[NamespaceId(1)] = None
    assert table.require_slots(SCHEDULER, NamespaceId(1)).session == SCHEDULER
    open_session(table, 3, Role.TOOL)
    with pytest.raises(Forbidden):
        table.require_slots(SessionId(3), NamespaceId(1))


def test_nothing_is_remembered_of_an_engine_that_is_gone(table: EngineTable) -> None:
    for session in (WORKER, SCHEDULER):
        table.end_process(session, 10.0, dead=True)
    for session in table.take_finished(11.0):
        table.forget(session)
    assert table.sessions() == []
    assert table._processes == {}
