"""Curves: what it learns, and that it is LRU where there is nothing to learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvtier.policy import curves
from kvtier.policy.curve_fit import fit
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import (
    TURN_KINDS_MAX,
    Blocks,
    EvictionPolicy,
    Keys,
    PolicyMaker,
    Rows,
)
from kvtier.policy.lru import LruPolicy
from kvtier.policy.reuse_classes import CLASS_COUNT_MAX, ENDED, ClassTable, Request
from kvtier.sim.replay import replay_policy
from kvtier.sim.traces import Trace, TracedRequest
from tests.support.policy_blocks import FakeBlocks


def trace_of(*requests: tuple[float, list[int]], parent: list[int]) -> Trace:
    found = [
        TracedRequest(at, 16 * len(chain), 0, np.array(chain, np.int32)) for at, chain in requests
    ]
    found.sort(key=lambda one: one.at)
    return Trace("made up", 16, tuple(found), np.array(parent, np.int32))


def chats_and_documents(rounds: int) -> Trace:
    """Each minute a long document that nobody asks for again, and a chat that goes on when three
    more documents have come."""
    requests: list[tuple[float, list[int]]] = []
    parent: list[int] = []

    def chain(count: int) -> list[int]:
        first = len(parent)
        parent.extend([-1, *range(first, first + count - 1)])
        return list(range(first, first + count))

    for number in range(rounds):
        requests.append((60.0 * number, chain(100)))
        chat = chain(30)
        requests += [(60.0 * number + 10, chat[:20]), (60.0 * number + 200, chat)]
    return trace_of(*requests, parent=parent)


def victims(trace: Trace, make_policy: PolicyMaker, capacity: int) -> list[int]:
    gone: list[int] = []

    def spied(blocks: Blocks) -> EvictionPolicy:
        policy = make_policy(blocks)
        on_remove = policy.on_remove

        def remove(rows: list[int]) -> None:
            gone.extend(rows)
            on_remove(rows)

        policy.on_remove = remove  # type: ignore[method-assign]
        return policy

    replay_policy(trace, spied, capacity)
    return gone


@pytest.mark.slow
def test_with_one_class_the_victims_are_those_of_lru() -> None:
    trace = chats_and_documents(20)
    plain = victims(trace, lambda blocks: CurvesPolicy(blocks, features=False), 300)
    assert len(plain) > 2000
    assert plain == victims(trace, LruPolicy, 300)


@pytest.mark.slow
def test_blocks_of_requests_that_are_never_repeated_go_first() -> None:
    trace = chats_and_documents(40)
    assert replay_policy(trace, LruPolicy, 300).hit_count < 0.1 * 40 * 20
    assert replay_policy(trace, CurvesPolicy, 300).hit_count > 0.7 * 40 * 20


def test_fit_is_asked_for_as_time_goes_by_and_only_then() -> None:
    policy = CurvesPolicy(FakeBlocks())
    assert policy.begin_refit() is None
    row, none = np.array([0], np.int32), np.zeros(0, np.uint64)
    policy.on_insert(row, 5.0)
    assert policy.begin_refit() is None
    policy.on_request(row, none, 5.0 + curves.REFIT_SECONDS)
    work = policy.begin_refit()
    assert work is not None
    assert policy.begin_refit() is None, "asked twice for the same"
    policy.end_refit(work())


def test_what_will_be_used_again_is_told_by_class_once_that_is_known() -> None:
    policy = CurvesPolicy(FakeBlocks(count_max=1 << 12, block_tokens=1000))
    none = np.zeros(0, np.int32)
    for number in range(400):  # Short requests are asked again a little later, long ones never.
        short = np.array([10_000 + number], np.uint64)
        policy.on_request(none, short, 10.0 * number)
        policy.on_request(none, short, 10.0 * number + 3)
        policy.on_request(none, np.arange(60, dtype=np.uint64) + 100 * number, 10.0 * number + 5)
    rows: Rows = np.arange(90_000, 90_061, dtype=np.int32)
    policy.on_request(none, np.array([90_000], np.uint64), 4001.0)
    policy.on_request(none, np.arange(60, dtype=np.uint64) + 90_001, 4001.0)
    policy.on_insert(rows, 4001.0)
    assert policy.reuse_probabilities(rows, 60.0).tolist() == [1.0] * 61
    policy.end_refit(fit(policy._sample()))
    found = policy.reuse_probabilities(rows, 60.0)
    assert found[0] > 0.5
    assert found[1:].max() < 0.1
    policy.on_session_end(rows[:1])
    assert policy.reuse_probabilities(rows[:1], 60.0).tolist() == [0.0]


class Told(CurvesPolicy):
    """An engine says of each turn what kind it was."""

    def __init__(self, blocks: Blocks, kind_of: Callable[[int], int]) -> None:
        super().__init__(blocks)
        self.kind_of = kind_of

    def on_request(self, rows: Rows, absent: Keys, now: float, tenant: int = 0) -> None:
        super().on_request(rows, absent, now, tenant)
        self.tell(rows)

    def on_insert(self, rows: Rows, now: float) -> None:
        super().on_insert(rows, now)
        self.tell(rows)

    def tell(self, rows: Rows) -> None:
        if len(rows):
            self.on_turn_kind(rows, np.zeros(0, np.uint64), self.kind_of(int(rows[0])))


TOOL, USER = 1, 2
CALL_BLOCKS = 40


def calls_and_questions(rounds: int) -> Trace:
    """Each minute four chats that begin alike; the first calls a tool and goes on when there have
    been ten more, of the others nothing is heard again."""
    requests: list[tuple[float, list[int]]] = []
    parent: list[int] = []
    for number in range(4 * rounds):
        first = len(parent)
        parent += [-1, *range(first, first + CALL_BLOCKS - 1)]
        chain, at = list(range(first, first + CALL_BLOCKS)), 15.0 * number
        requests.append((at, chain[:-2]))
        if number % 4 == 0:
            requests.append((at + 160, chain))
    return trace_of(*requests, parent=parent)


def true_kind(head: int) -> int:
    return TOOL if head // CALL_BLOCKS % 4 == 0 else USER


@pytest.mark.slow
def test_what_a_tool_is_to_answer_is_kept_and_what_a_user_may_never_answer_goes() -> None:
    trace, capacity = calls_and_questions(60), 6 * CALL_BLOCKS
    ratios = {}
    for name, kind_of in {
        "true": true_kind,
        "one": lambda head: TOOL,
        "chance": lambda head: 1 + head // CALL_BLOCKS * 7919 % 5 % 2,
    }.items():
        result = replay_policy(trace, partial(Told, kind_of=kind_of), capacity)
        ratios[name] = result.hit_count / (60 * (CALL_BLOCKS - 2))
    assert ratios["true"] > 0.8
    assert max(ratios["one"], ratios["chance"]) < 0.65


def test_admission_knows_kinds_of_turns() -> None:
    policy = CurvesPolicy(FakeBlocks(count_max=1 << 12))
    none = np.zeros(0, np.int32)
    for number in range(2000):
        key = np.array([number], np.uint64)
        policy.on_request(none, key, float(number))
        policy.on_turn_kind(none, key, TOOL if number % 2 else USER)
        if number % 2:
            policy.on_request(none, key, number + 0.5)
            policy.on_turn_kind(none, key, USER)
    rows: Rows = np.array([9001, 9002], np.int32)
    for row, turn_kind in zip(rows, (TOOL, USER), strict=True):
        policy.on_request(none, np.array([row], np.uint64), 2001.0)
        policy.on_insert(np.array([row], np.int32), 2001.0)
        policy.on_turn_kind(np.array([row], np.int32), np.zeros(0, np.uint64), turn_kind)
    policy.end_refit(fit(policy._sample()))
    tool, user = policy.reuse_probabilities(rows, 60.0)
    assert tool > 0.5
    assert user < 0.1


def test_kinds_change_no_class_of_shared_blocks_or_ended_sessions_and_are_bounded() -> None:
    classes = ClassTable()
    shared = int(classes.of_shared(0, 64)[-1])
    one = classes.of_request(Request(0, 1, 500, None))
    kinds = np.array([ENDED, shared, one], np.int16)
    told = classes.of_turn_kind(kinds, 3)
    assert told[:2].tolist() == [ENDED, shared]
    assert told[2] not in kinds
    assert classes.of_turn_kind(told, 3).tolist() == told.tolist()
    for tenant in range(CLASS_COUNT_MAX):
        found = np.array([classes.of_request(Request(tenant, 1, 500, None))], np.int16)
        for kind in range(1, 1 + TURN_KINDS_MAX):
            assert classes.of_turn_kind(found, kind)[0] < CLASS_COUNT_MAX
    assert classes.count == CLASS_COUNT_MAX


def test_work_of_a_fit_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SAMPLE_MAX", 256)
    policy = CurvesPolicy(FakeBlocks())
    rows: Rows = np.arange(5000, dtype=np.int32)
    policy.on_insert(rows, 1.0)
    sample = policy._sample()
    assert len(sample.waiting.kind) <= 2 * 256
    assert len(sample.waiting.kind) * sample.weight == pytest.approx(5000, rel=0.2)


def test_leaf_that_is_touched_for_ever_leaves_nothing_behind() -> None:
    policy = CurvesPolicy(FakeBlocks())
    row, none = np.array([0], np.int32), np.zeros(0, np.uint64)
    policy.on_insert(row, 0.0)
    policy.on_leaf(0)
    for second in range(1500):
        policy.on_request(row, none, float(second))
    assert policy._leaves.entry_count() < 800
