"""A slab that is withdrawn for another namespace while its engine copies into it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.observer import Observer, observing
from tests.support.processes import CallFailed, Engine, engine_processes, eventually

OPTIONS = {"lease.grace_seconds": "0.2"}
SLAB_SLOTS = 32  # 4 slabs of 4 MiB.
LAST_SLAB_FIRST = 3 * SLAB_SLOTS
CHAINS = 24
CHAIN_BLOCKS = 4


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB", options=OPTIONS) as running:
        running.wait_populated()
        yield running


def reserve_in_the_last_slab(owner: Engine) -> dict[str, object]:
    """Bind all slabs to the owner's namespace; slots of the one that was bound last.

    That is the one that will be withdrawn.
    """
    for number in range(CHAINS):
        asked = {"label": f"owner-{number}", "count": CHAIN_BLOCKS}
        assert owner.ask("offload", **asked)["count"] == CHAIN_BLOCKS
    given = owner.ask("reserve", count=4)
    assert min(given["slots"]) >= LAST_SLAB_FIRST
    eventually(lambda: owner.ask("session")["mapped"] == 4 * SLAB_SLOTS, "all slabs are its own")
    return given


def copy_in_the_last_slab(owner: Engine) -> dict[str, object]:
    """A copy without end."""
    given = reserve_in_the_last_slab(owner)
    owner.ask("begin_copy", slots=given["slots"], session=given["session"])
    return given


def mapped_slot_count(observer: Observer) -> int:
    return observer.client.arena(observer.namespace).mapped_slot_count


def check_gets_nothing(newcomer: Observer, seconds: float) -> None:
    """The slab is not dropped, so there is no memory for anybody else."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert mapped_slot_count(newcomer) == 0, "a slab is reused that somebody writes to"
        tier = newcomer.dram()
        assert tier.populated_bytes == tier.budget_bytes
        assert list(newcomer.client.check().violations) == []
        time.sleep(0.02)


def check_is_used(newcomer: Observer, label: str) -> None:
    """The namespace that wanted memory has its slab, and its own bytes in it."""
    eventually(lambda: mapped_slot_count(newcomer) > 0, "the other namespace has a slab")
    for number in range(4):
        assert newcomer.offload(f"{label}-{number}", CHAIN_BLOCKS) == CHAIN_BLOCKS
    time.sleep(0.2)  # If anybody still wrote, this would be the time.
    for number in range(4):
        assert newcomer.read_chain(f"{label}-{number}", CHAIN_BLOCKS) == CHAIN_BLOCKS
    newcomer.check()


def check_owner_goes_on(owner: Engine) -> None:
    """It keeps blocks of its other slabs, with the right bytes, and offloads again."""
    chains = [f"owner-{number}" for number in range(CHAINS)]
    hits = sum(owner.ask("onboard", label=one, count=CHAIN_BLOCKS)["count"] for one in chains)
    assert hits >= SLAB_SLOTS
    assert owner.ask("offload", label="owner again", count=CHAIN_BLOCKS)["count"] == CHAIN_BLOCKS


def finish_copy(owner: Engine, given: dict[str, object]) -> None:
    """The copy ends; what it filled is void, and its slots cannot be written to again."""
    owner.ask("end_copy")
    slots, session = given["slots"], given["session"]
    with pytest.raises(CallFailed, match="StaleSlot"):
        owner.ask("begin_copy", slots=slots, session=session)
    owner.ask("abort", slots=slots, session=session)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped meanwhile"])
def test_slab_is_not_dropped_before_the_copy_into_it_has_ended(
    daemon: RunningDaemon, is_stopped: bool
) -> None:
    with engine_processes() as engines:
        owner = engines.start(daemon.socket, salt="a")
        given = copy_in_the_last_slab(owner)
        if is_stopped:
            owner.stop()
        with observing(daemon.socket, "b", needs_slots=False) as newcomer:
            check_gets_nothing(newcomer, 1.0)
            if is_stopped:
                owner.resume()
                check_gets_nothing(newcomer, 0.5)
            finish_copy(owner, given)
            check_is_used(newcomer, "b")
            check_owner_goes_on(owner)
            owner.end()
            newcomer.wait_settled()


@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "killed"])
def test_slab_is_not_dropped_while_a_stopped_engine_maps_it(
    daemon: RunningDaemon, is_killed: bool
) -> None:
    with engine_processes() as engines:
        owner = engines.start(daemon.socket, salt="a")
        given = reserve_in_the_last_slab(owner)
        owner.ask("abort", slots=given["slots"], session=given["session"])
        owner.stop()  # Without any slot: only its mapping speaks for it.
        with observing(daemon.socket, "b", needs_slots=False) as newcomer:
            check_gets_nothing(newcomer, 1.0)
            if is_killed:
                owner.kill()
            else:
                owner.resume()  # It hears of the withdrawal and unmaps by itself.
            check_is_used(newcomer, "b")


def test_slab_of_a_stopped_engine_is_dropped_when_it_is_dead(daemon: RunningDaemon) -> None:
    with engine_processes() as engines:
        owner = engines.start(daemon.socket, salt="a")
        copy_in_the_last_slab(owner)
        owner.stop()
        with observing(daemon.socket, "b", needs_slots=False) as newcomer:
            check_gets_nothing(newcomer, 1.0)
            owner.kill()
            check_is_used(newcomer, "b")
            newcomer.wait_settled()


def test_commit_into_a_withdrawn_slab_is_void(daemon: RunningDaemon) -> None:
    with engine_processes() as engines:
        owner = engines.start(daemon.socket, salt="a")
        given = copy_in_the_last_slab(owner)
        with observing(daemon.socket, "b", needs_slots=False) as newcomer:
            check_gets_nothing(newcomer, 0.3)
            owner.ask("end_copy")
            count = len(list(given["slots"]))  # type: ignore[call-overload]
            hashes = [bytes([number] * 32).hex() for number in range(count)]
            outcomes = owner.ask("commit", hashes=hashes, **given)["outcomes"]
            assert outcomes == ["VOID"] * count
            check_is_used(newcomer, "b")
