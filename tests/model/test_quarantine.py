"""Quarantine against a plain model: who could still write under an ended session."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.engines import EngineTable
from kvtier.core.events import SessionOpened
from kvtier.types import Role, SessionId
from tests.support.machines import machine_settings
from tests.support.world import engine_id

GRACE = 1.0
picks = st.integers(0, 63)


@dataclass(eq=False)
class Model:
    """One process as it really is."""

    number: int
    role: Role
    alive: bool = True
    sessions: list[SessionId] = field(default_factory=list)
    connected: bool = True
    died_at: float | None = None
    quiet: set[SessionId] = field(default_factory=set)

    @property
    def maps(self) -> bool:
        return self.role is not Role.SCHEDULER

    def counts_for(self, session: SessionId, engine: int) -> bool:
        """Whether it may touch slots under the engine's session, or tell somebody else to."""
        return self.number == engine and (self.maps or session in self.sessions)


class QuarantineMachine(RuleBasedStateMachine):
    """Slots return if and only if whoever maps slots or had them is quiet, or dead for a while."""

    @initialize()
    def start(self) -> None:
        self.table = EngineTable(grace_seconds=GRACE)
        self.now = 10.0
        self.next_session = 1
        self.processes: list[Model] = []
        self.ended: dict[SessionId, int] = {}  # Quarantined: session -> engine.
        self.asked: set[tuple[SessionId, SessionId]] = set()
        self.begin(1, Role.BOTH)
        self.begin(2, Role.SCHEDULER)
        self.begin(2, Role.WORKER)

    @rule(number=st.integers(1, 2), role=st.sampled_from([Role.SCHEDULER, Role.WORKER, Role.BOTH]))
    def begin(self, number: int, role: Role) -> None:
        if len(self.processes) > 8:
            return
        process = Model(number, role)
        self.processes.append(process)
        self.open(process, None)

    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        process = self.process(pick)
        if process.alive and process.connected:
            process.connected = False
            self.end(process)
            self.note(self.table.end_session(process.sessions[-1], self.now))

    @rule(pick=picks, seen=st.booleans())
    def reconnect(self, pick: int, seen: bool) -> None:
        """`seen`: the daemon has noticed before that the old connection ended."""
        process = self.process(pick)
        if not process.alive or process.connected == seen:
            return
        old = process.sessions[-1]
        self.open(process, old if self.table.get(old) is not None else None)
        if not seen:
            self.ended[old] = process.number
        self.note(self.table.end_session(old, self.now))
        self.note(self.table.ask_again())

    @rule(pick=picks, dead=st.booleans())
    def die_or_say_bye(self, pick: int, dead: bool) -> None:
        process = self.process(pick)
        if not process.alive or not (dead or process.connected):
            return
        if process.connected:
            self.end(process)
        process.alive = process.connected = False
        process.died_at = self.now if dead else None
        self.note(self.table.end_process(process.sessions[-1], self.now, dead=dead))

    @rule(pick=picks, about=picks)
    def declare_quiet(self, pick: int, about: int) -> None:
        process = self.process(pick)
        if process.connected and self.ended:
            session = sorted(self.ended)[about % len(self.ended)]
            process.quiet.add(session)
            self.table.declare_quiet(process.sessions[-1], session)

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        finished = self.table.take_finished(self.now)
        for session in sorted(self.ended):
            assert (session in finished) == self.is_harmless(session), f"session {session}"
        for session in finished:
            del self.ended[session]
            self.table.forget(session)
        self.note(self.table.ask_again())
        self.everybody_was_asked()

    @invariant()
    def books_agree(self) -> None:
        assert self.table.check_invariants() == []
        for number in (1, 2):
            if any(one.alive and one.maps for one in self.processes if one.number == number):
                assert not self.table.is_engine_gone(engine_id(number)), "a worker lives"

    # --------------------------------------------------------------------------------- helpers

    def process(self, pick: int) -> Model:
        return self.processes[pick % len(self.processes)]

    def open(self, process: Model, replaces: SessionId | None) -> None:
        session = SessionId(self.next_session)
        self.next_session += 1
        self.table.open(
            SessionOpened(
                session,
                engine=engine_id(process.number),
                role=process.role,
                shards=(0,) if process.maps else (),
                replaces=replaces,
            )
        )
        process.sessions.append(session)
        process.connected = True

    def end(self, process: Model) -> None:
        self.ended[process.sessions[-1]] = process.number

    def note(self, asked: list[object]) -> None:
        self.asked.update((one.session, one.about) for one in asked)  # type: ignore[attr-defined]

    def everybody_was_asked(self) -> None:
        """Nobody who is waited for can say that he was not asked."""
        for about, number in self.ended.items():
            for one in self.processes:
                if not one.counts_for(about, number):
                    continue
                if one.connected and about not in one.quiet:
                    assert (one.sessions[-1], about) in self.asked, f"never asked about {about}"

    def is_harmless(self, session: SessionId) -> bool:
        for one in self.processes:
            if not one.counts_for(session, self.ended[session]):
                continue
            if one.alive and session not in one.quiet:
                return False
            if one.maps and one.died_at is not None and self.now < one.died_at + GRACE:
                return False
        return True


TestQuarantine = QuarantineMachine.TestCase
TestQuarantine.settings = machine_settings(examples=150, steps=40)
TestQuarantine.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
