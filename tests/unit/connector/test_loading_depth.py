"""How deep a request loads: by what was measured, unless it wishes otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import Unavailable
from kvtier.policy.load_or_recompute import OnboardWish
from tests.support.connector_rig import SHARD_BYTES, Rig, numbered_chain

BLOCK_TOKENS = 16
# A block of NVMe is taken to need a second until something is measured.
SETTINGS = ConnectorSettings(
    stock_blocks=16,
    onboard_wait_seconds=10.0,
    nvme_bytes_per_second=SHARD_BYTES,
    nvme_wait_seconds_max=1000.0,
)


def rig_of(block_seconds: float, **settings: object) -> tuple[Rig, list[bytes]]:
    """8 blocks, the last 4 on NVMe only; an engine that computes a block in so long."""
    rig = Rig(settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]
    chain = numbered_chain(8)
    rig.offload("first", chain)
    rig.client.demote(rig.namespace, chain[4])
    rig.scheduler.note_prefill(block_seconds / BLOCK_TOKENS)
    return rig, chain


def arrive(
    rig: Rig, request_id: str, chain: list[bytes], wish: OnboardWish | None = None
) -> int | None:
    rig.scheduler.on_new_request(request_id, chain, wish=wish)
    rig.answer()
    return rig.scheduler.get_onboard_count(request_id, 0)


def promised(rig: Rig, request_id: str, *, promote_seconds: float = 0.0) -> int | None:
    """What it is promised when its acquire has been answered."""
    rig.answer()
    rig.control.begin_waits()
    rig.clock.advance(promote_seconds)
    rig.control.end_waits()
    return rig.scheduler.get_onboard_count(request_id, 0)


def load(rig: Rig, request_id: str, count: int, *, seconds: float = 0.0) -> None:
    """The copy takes so long; then the request ends."""
    rig.scheduler.on_allocated(request_id, list(range(20, 20 + count)), count)
    rig.plan()
    rig.copy()
    rig.clock.advance(seconds)
    assert rig.results().onboarded == (request_id,)
    rig.scheduler.request_finished(request_id)
    rig.answer()


def test_only_what_is_in_memory_is_asked_for_where_nvme_is_slower_than_computing() -> None:
    rig, chain = rig_of(block_seconds=0.5)
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b") == 4
    assert rig.client.hashes_asked[-1] == 4
    assert rig.client.waits_asked[-1] == 0.0
    assert len(rig.namespace.nvme) == 4
    assert rig.scheduler.stats().avoided_blocks == 4
    load(rig, "b", 4)
    rig.check_nothing_held()


def test_all_is_loaded_where_computing_is_slower() -> None:
    rig, chain = rig_of(block_seconds=3.0)
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b", promote_seconds=4.0) == 8
    assert rig.scheduler.stats().avoided_blocks == 0


def test_nothing_is_asked_for_where_even_copies_are_slower() -> None:
    rig, chain = rig_of(block_seconds=1e-3)
    assert arrive(rig, "b", chain[:4]) is None  # Of copies nothing is known yet.
    assert promised(rig, "b") == 4
    load(rig, "b", 4, seconds=0.5)
    acquires = rig.client.calls["acquire"]
    assert arrive(rig, "c", chain[:4]) == 0
    assert rig.client.calls["acquire"] == acquires
    assert rig.scheduler.get_onboard_count("c", 0) == 0
    assert rig.scheduler.stats().avoided_blocks == 4
    rig.scheduler.on_allocated("c", (), 0)
    stats = rig.scheduler.stats()
    assert stats.load_regret_seconds == pytest.approx(0.5 - 4e-3)
    assert stats.recompute_regret_seconds == 0.0
    rig.scheduler.request_finished("c")
    rig.check_nothing_held()


def test_acquire_that_came_before_the_match_is_judged_by_what_it_found() -> None:
    rig, chain = rig_of(block_seconds=0.5)
    rig.scheduler.on_new_request("b", chain)
    assert rig.scheduler.get_onboard_count("b", 0) is None  # Asked for before the match is made.
    assert promised(rig, "b") == 4
    assert rig.control.waiting_count == 0, "it does not wait for what it computes sooner"


def test_wait_follows_the_rate_that_was_measured() -> None:
    rig, chain = rig_of(block_seconds=3.0)
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b", promote_seconds=2.0) == 8
    assert rig.client.waits_asked[-1] == pytest.approx(8.0)  # Twice 4 s, as was told.
    load(rig, "b", 8)
    rig.client.demote(rig.namespace, chain[4])
    assert arrive(rig, "c", chain) is None
    assert promised(rig, "c") == 8
    assert rig.client.waits_asked[-1] == pytest.approx(4.0)  # Twice 2 s, as was measured.


def test_wait_that_brings_nothing_is_known_to_take_longer() -> None:
    rig, chain = rig_of(block_seconds=3.0)
    rig.client.promote_limits = [0]
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b", promote_seconds=8.0) == 4
    load(rig, "b", 4)
    assert arrive(rig, "c", chain) is None
    assert promised(rig, "c") == 4
    assert rig.client.hashes_asked[-1] == 4


@pytest.mark.parametrize("is_setting", [False, True], ids=["of the request", "of the engine"])
def test_wish_is_obeyed(is_setting: bool) -> None:
    for wish, count in ((OnboardWish.ALWAYS, 8), (OnboardWish.NEVER, 0)):
        settings = {"onboard": wish} if is_setting else {}
        rig, chain = rig_of(block_seconds=0.5, **settings)
        answer = arrive(rig, "b", chain, None if is_setting else wish)
        assert (promised(rig, "b") if answer is None else answer) == count


def test_preempted_request_is_decided_anew() -> None:
    rig, chain = rig_of(block_seconds=0.5)
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b") == 4
    rig.scheduler.on_preempted("b")
    rig.scheduler.note_prefill(3.0 / BLOCK_TOKENS)
    assert rig.scheduler.get_onboard_count("b", 0) is None
    assert promised(rig, "b") is None  # Found in NVMe, and waited for.
    assert promised(rig, "b") == 8


def test_wait_that_fails_is_waited_for_no_more() -> None:
    rig, chain = rig_of(block_seconds=3.0)
    rig.client.fail_next("acquire", Unavailable("gone"))
    assert arrive(rig, "b", chain) is None
    assert promised(rig, "b") == 0
    rig.scheduler.request_finished("b")
    rig.answer()
    rig.check_nothing_held()
