"""Leases end once, at deadline + margin and not before."""

from __future__ import annotations

import pytest

from kvtier.core.leases import Lease, LeaseTable
from kvtier.types import EngineId, NamespaceId, SessionId
from tests.support.world import engine_id


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(margin_seconds=5)


def grant(table: LeaseTable, deadline: float, engine: EngineId | None = None) -> Lease:
    return table.grant(
        session=SessionId(1),
        engine=engine,
        namespace=NamespaceId(1),
        deadline=deadline,
    )


def test_leases_end_at_deadline_plus_margin_and_not_before(table: LeaseTable) -> None:
    lease = grant(table, 130.0)
    assert table.expire(now=134.9) == []
    assert table.expire(now=135.0) == [lease]
    assert table.expire(now=999.0) == []


def test_the_oldest_lease_expires_first(table: LeaseTable) -> None:
    late, early = grant(table, 20.0), grant(table, 10.0)
    assert table.expire(now=100.0) == [early, late]


def test_a_released_lease_does_not_expire(table: LeaseTable) -> None:
    lease = grant(table, 10.0)
    assert table.end(lease.lease) is lease
    assert table.end(lease.lease) is None
    assert table.expire(now=100.0) == []
    assert (len(table), table.count_of(SessionId(1))) == (0, 0)


def test_leases_end_with_their_engine_only(table: LeaseTable) -> None:
    mine, other = grant(table, 10.0, engine_id(1)), grant(table, 10.0, engine_id(2))
    own = grant(table, 10.0)  # The daemon's.
    assert table.end_engine(engine_id(1)) == [mine]
    assert table.all_leases() == [other, own]


def test_released_leases_leave_no_memory_behind(table: LeaseTable) -> None:
    for _ in range(5000):
        table.end(grant(table, 1e9).lease)
    table.expire(now=0.0)
    assert table.next_expiry() is None
