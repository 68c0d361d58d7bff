"""Several KV groups: one promise, a lease and a job in each; what a window loses is not stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from kvtier.connector.grouped import GroupedConnector
from kvtier.connector.grouped_call import Hit
from kvtier.connector.jobs import FailReason, JobResult, StepPlan
from kvtier.connector.settings import ConnectorSettings
from tests.support.clock import ManualClock
from tests.support.connector_rig import numbered_chain, spec_of
from tests.support.fake_client import FakeClient, FakeNamespace
from tests.support.stepped_control import SteppedControl

TOKENS = 16
HASHES = numbered_chain(6)
WINDOW = 2


class LastTwo:
    """Group 0 needs all blocks, group 1 the last two."""

    def find(
        self, hashes: Sequence[bytes], present: Sequence[Collection[bytes]], token_limit: int
    ) -> Hit:
        chain, window = present
        for count in range(min(len(hashes), token_limit // TOKENS), 0, -1):
            last = range(max(0, count - WINDOW), count)
            if all(one in chain for one in hashes[:count]) and all(
                hashes[index] in window for index in last
            ):
                return Hit(count * TOKENS, (tuple(range(count)), tuple(last)))
        return Hit(0, ((), ()))


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.client = FakeClient(self.clock)
        self.control = SteppedControl()
        spec = spec_of()
        specs = [replace(spec, kv_group="full"), replace(spec, kv_group="last", chained=False)]
        self.core = GroupedConnector(
            self.client,
            specs,
            LastTwo(),
            hash_tokens=TOKENS,
            settings=ConnectorSettings(stock_blocks=8, raise_internal_errors=True),
            clock=self.clock,
            control=self.control,
        )
        self.chain, self.window = (self.client.open_namespace(spec) for spec in specs)
        self.plan()  # Reserves the stock.

    def plan(self) -> tuple[StepPlan, ...]:
        plans = self.core.build_plans()
        self.control.step()
        return plans

    def told(self, plans: Sequence[StepPlan], failed: FailReason | None = None) -> None:
        jobs = [job for plan in plans for job in (*plan.onboards, *plan.offloads)]
        self.core.on_results([JobResult(job.job_id, 0, failed) for job in jobs])
        self.control.step()
        self.core.on_results(())

    def store(self, namespace: FakeNamespace, hashes: Sequence[bytes]) -> None:
        parent = None
        for one in hashes:
            namespace.resident[one] = self.client.free.pop()
            namespace.parents[one] = parent if namespace.spec.chained else None
            parent = one

    def asked(self, request_id: str, local_tokens: int = 0, limit: int = 1000) -> int | None:
        self.core.get_onboard_tokens(request_id, local_tokens, limit)
        self.control.step()
        return self.core.get_onboard_tokens(request_id, local_tokens, limit)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_prefix_ends_where_one_group_has_not_what_it_needs(rig: Rig) -> None:
    rig.store(rig.chain, HASHES)
    rig.store(rig.window, HASHES[1:4])
    rig.core.on_new_request("r", HASHES, 1000)
    assert rig.asked("r") == 4 * TOKENS
    tables = [[10, 11, 12, 13, 14], [-1, -1, 22, 23, 24]]
    rig.core.on_allocated("r", 0, 4 * TOKENS, tables)
    plans = rig.plan()
    assert [job.device_blocks for plan in plans for job in plan.onboards] == [
        (10, 11, 12, 13),
        (22, 23),
    ]
    assert len(rig.client.leases) == 2
    rig.told(plans)
    assert not rig.client.leases
    assert rig.core.stats().onboarded_blocks == 6
    assert rig.core.request_finished("r") == {}
    assert rig.core.request_count == 0


def test_lease_that_falls_short_in_one_group_is_a_miss_and_none_is_held(rig: Rig) -> None:
    rig.store(rig.chain, HASHES)
    rig.store(rig.window, HASHES)
    rig.core.on_new_request("r", HASHES, 1000)
    rig.control.step()
    rig.core.get_onboard_tokens("r", 0, 1000)
    # Between the first lease and the second.
    rig.client.during["acquire"] = lambda: rig.client.evict(rig.window, HASHES[5])
    rig.control.step()
    assert rig.core.get_onboard_tokens("r", 0, 1000) == 0
    assert rig.client.calls["acquire"] == 2
    assert not rig.client.leases
    assert rig.core.lease_count == 0


def test_failed_job_of_one_group_fails_the_load_and_is_not_offered_again(rig: Rig) -> None:
    rig.store(rig.chain, HASHES)
    rig.store(rig.window, HASHES)
    for name in ("r", "s"):
        rig.core.on_new_request(name, HASHES, 1000)
    assert rig.asked("r") == 6 * TOKENS
    rig.core.on_allocated("r", 0, 6 * TOKENS, [list(range(6)), [-1, -1, -1, -1, 8, 9]])
    plans = rig.plan()
    bad = plans[1].onboards[0].job_id
    rig.told(plans[:1])
    rig.core.on_results([JobResult(bad, 0, FailReason.COPY, failed_index=1)])
    assert rig.core.stats().onboard_failed_blocks == 8
    assert rig.core.get_onboard_tokens("r", 0, 1000) == 0
    rig.clock.advance(1.0)  # What was matched before is not believed any more.
    assert rig.asked("s") == 5 * TOKENS


def test_window_blocks_are_committed_without_parents_and_once(rig: Rig) -> None:
    rig.core.on_new_request("r", HASHES, 1000)
    rig.control.step()
    key = rig.core.on_blocks_offered("r", 1, HASHES[2:4], [5, 6])
    assert key is not None, "copies read the blocks"
    plans = rig.plan()
    rig.told(plans)
    assert set(rig.window.resident) == set(HASHES[2:4])
    assert [one.parent for one in rig.client.commits] == [None, None]
    assert rig.client.calls["commit"] == 1
    assert rig.core.on_blocks_offered("r", 1, HASHES[2:4], [7, 8]) is None
    assert rig.plan()[1].offloads == ()


def test_offered_blocks_are_given_up_when_the_engine_needs_them(rig: Rig) -> None:
    rig.client.free.clear()  # No slots: what is offered waits.
    rig.core.cores[1].on_recall(rig.window, 1000)
    rig.plan()
    key = rig.core.on_blocks_offered("r", 1, HASHES[:2], [5, 6])
    assert key is not None
    rig.core.on_device_blocks_short(1000)
    assert rig.core.on_results(()).released == (key,)
    assert rig.plan()[1].offloads == ()


def test_block_that_was_evicted_is_offloaded_again(rig: Rig) -> None:
    rig.core.on_blocks_offered("r", 1, HASHES[:1], [5])
    rig.told(rig.plan())
    rig.client.evict(rig.window, HASHES[0])
    rig.core.on_new_request("s", HASHES, 1000)
    rig.control.step()
    rig.core.on_blocks_offered("s", 1, HASHES[:1], [6])
    [job] = rig.plan()[1].offloads
    assert job.device_blocks == (6,)
