"""The lease table against a dict of leases and their end times."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.leases import LeaseTable
from kvtier.types import EngineId, LeaseId, NamespaceId, SessionId
from tests.support.machines import machine_settings
from tests.support.world import engine_id

MARGIN = 5.0
picks = st.integers(0, 63)


class LeaseTableMachine(RuleBasedStateMachine):
    """Each lease ends once: released, at deadline + margin and not before, or with its engine."""

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(margin_seconds=MARGIN)
        self.now = 100.0
        self.open: dict[LeaseId, tuple[float, SessionId, EngineId]] = {}
        self.ended: list[LeaseId] = []

    @rule(session=st.integers(1, 4), seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def grant(self, session: int, seconds: float) -> None:
        engine = engine_id(session % 2)
        lease = self.table.grant(
            session=SessionId(session),
            engine=engine,
            namespace=NamespaceId(1),
            deadline=self.now + seconds,
        ).lease
        assert lease not in self.open
        assert lease not in self.ended, "a lease's number was used again"
        self.open[lease] = (self.now + seconds, SessionId(session), engine)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        known = sorted([*self.open, *self.ended])
        if known:
            lease = known[pick % len(known)]
            found = self.table.end(lease)
            assert (found is not None) == (lease in self.open)
            self.forget(lease)

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.5, 5.0, 40.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        due = [lease for lease, (end, _, _) in self.open.items() if end + MARGIN <= self.now]
        expired = [one.lease for one in self.table.expire(now=self.now)]
        assert sorted(expired) == sorted(due)
        ends = [self.open[lease][0] for lease in expired]
        assert ends == sorted(ends), "not the oldest first"
        for lease in expired:
            self.forget(lease)

    @rule(number=st.integers(0, 1))
    def end_engine(self, number: int) -> None:
        mine = [lease for lease, one in self.open.items() if one[2] == engine_id(number)]
        assert sorted(one.lease for one in self.table.end_engine(engine_id(number))) == mine
        for lease in mine:
            self.forget(lease)

    @invariant()
    def books_agree(self) -> None:
        assert len(self.table) == len(self.open)
        for session in range(1, 5):
            mine = sum(one[1] == session for one in self.open.values())
            assert self.table.count_of(SessionId(session)) == mine
        due = self.table.next_expiry()
        ends = [end + MARGIN for end, _, _ in self.open.values()]
        assert not ends or (due is not None and due <= min(ends)), "nobody would wake up"

    def forget(self, lease: LeaseId) -> None:
        if self.open.pop(lease, None) is not None:
            self.ended.append(lease)


TestLeaseTable = LeaseTableMachine.TestCase
TestLeaseTable.settings = machine_settings(examples=40, steps=40)
TestLeaseTable.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
