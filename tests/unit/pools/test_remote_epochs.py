"""Epochs among nodes, in virtual time: after a clear has answered nobody uses the old one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome
from kvtier.pools.remote.epochs import (
    EpochRecord,
    EpochTimes,
    EpochWatch,
    decode_record,
    encode_record,
)
from kvtier.pools.remote.keys import epoch_key
from tests.support.fake_remote import FakeRemote, Shelf
from tests.support.virtual_loop import LoopClock, run_virtual

FINGERPRINT = bytes(range(16))
KEY = epoch_key(FINGERPRINT)
TIMES = EpochTimes(view_seconds=10.0, refresh_seconds=3.0, call_seconds=2.0)


def watch_of(shelf: Shelf, seed: int, clock: LoopClock | None = None) -> EpochWatch:
    chance = random.Random(seed)
    return EpochWatch(
        FakeRemote(shelf),
        FINGERPRINT,
        chance.randbytes(16),
        clock=clock or LoopClock(),
        draw=chance.getrandbits,
        times=TIMES,
    )


async def now() -> float:
    return asyncio.get_running_loop().time()


def test_daemons_of_one_namespace_find_the_same_epoch() -> None:
    async def play() -> None:
        shelf = Shelf()
        watches = [watch_of(shelf, seed) for seed in range(5)]
        assert all(watch.current_epoch() is None for watch in watches)
        await asyncio.gather(*(watch.refresh() for watch in watches))
        epochs = {watch.current_epoch() for watch in watches}
        assert len(epochs) == 1
        assert epochs.isdisjoint({None, 0})

    run_virtual(play())


def test_a_view_ends_at_its_time_and_the_tier_is_off_then() -> None:
    async def play() -> None:
        shelf = Shelf()
        watch = watch_of(shelf, 1)
        await watch.refresh()
        shelf.trouble = RemoteOutcome.UNREACHABLE
        assert await watch.refresh() is RemoteOutcome.UNREACHABLE
        await asyncio.sleep(9.9)
        assert watch.current_epoch() is not None
        await asyncio.sleep(0.1)
        assert watch.current_epoch() is None
        assert "unreachable" in watch.trouble
        shelf.trouble = None
        await watch.refresh()
        assert watch.current_epoch() is not None

    run_virtual(play())


def test_a_view_counts_from_before_the_read_began() -> None:
    async def play() -> None:
        shelf = Shelf()
        watch = watch_of(shelf, 1)
        await watch.refresh()
        shelf.delay_seconds = 1.5
        await watch.refresh()
        await asyncio.sleep(8.4)
        assert watch.current_epoch() is not None
        await asyncio.sleep(0.2)
        assert watch.current_epoch() is None

    run_virtual(play())


def test_a_clear_that_everybody_acknowledges_answers_in_one_round_of_refreshes() -> None:
    async def play() -> None:
        shelf = Shelf()
        watches = [watch_of(shelf, seed) for seed in range(4)]
        following = [asyncio.ensure_future(watch.follow()) for watch in watches]
        await asyncio.sleep(20.0)
        old = watches[0].current_epoch()
        began = await now()
        done = await watches[0].clear()
        assert done.outcome is RemoteOutcome.DONE
        assert done.is_acknowledged
        assert await now() - began < TIMES.refresh_seconds + 1.0
        assert {watch.current_epoch() for watch in watches} == {done.epoch}
        assert done.epoch != old
        assert not shelf.values, "acknowledgements are not left behind"
        await ended(following)

    run_virtual(play())


def test_a_clear_waits_until_a_silent_daemon_has_no_view_any_more() -> None:
    async def play() -> None:
        shelf = Shelf()
        silent, clearing = watch_of(shelf, 1), watch_of(shelf, 2)
        following = [asyncio.ensure_future(clearing.follow())]
        await asyncio.sleep(20.0)
        await silent.refresh()
        began = await now()
        done = await clearing.clear()
        assert done.outcome is RemoteOutcome.DONE
        assert not done.is_acknowledged
        assert done.silent_members == 1
        assert silent.current_epoch() is None
        assert await now() - began >= TIMES.view_seconds
        began = await now()
        again = await clearing.clear()
        assert again.silent_members == 0, "the dead are forgotten"
        await ended(following)

    run_virtual(play())


def test_a_daemon_that_lives_but_could_not_acknowledge_is_waited_for_the_next_time_too() -> None:
    async def play() -> None:
        shelf = Shelf()
        mute, clearing = watch_of(shelf, 1), watch_of(shelf, 2)
        following = [asyncio.ensure_future(one.follow()) for one in (mute, clearing)]
        await asyncio.sleep(20.0)
        shelf.capacity_bytes = 0
        first = await clearing.clear()
        assert not first.is_acknowledged
        assert mute.current_epoch() == first.epoch, "it lives and has seen the change"
        second = await clearing.clear()
        assert mute.current_epoch() != first.epoch
        assert second.outcome is RemoteOutcome.DONE
        await ended(following)

    run_virtual(play())


def test_acknowledgements_are_not_believed_by_who_has_not_followed_the_record() -> None:
    """The record was lost and made anew by another; a member of the lost one has a view still."""

    async def play() -> None:
        shelf = Shelf()
        old, new = watch_of(shelf, 1), watch_of(shelf, 2)
        await old.refresh()
        await asyncio.sleep(5.0)
        del shelf.records[KEY]
        done = await new.clear()
        assert done.outcome is RemoteOutcome.DONE
        assert old.current_epoch() is None
        assert not done.is_acknowledged

    run_virtual(play())


def test_a_record_that_was_lost_means_a_new_epoch() -> None:
    async def play() -> None:
        shelf = Shelf()
        watch = watch_of(shelf, 1)
        await watch.refresh()
        before = watch.current_epoch()
        del shelf.records[KEY]
        await watch.refresh()
        assert watch.current_epoch() not in (before, None)

    run_virtual(play())


@pytest.mark.parametrize("damaged", [b"", b"rubbish", b"\0" * 44])
def test_a_damaged_record_is_replaced(damaged: bytes) -> None:
    async def play() -> None:
        shelf = Shelf()
        shelf.records[KEY] = damaged
        watch = watch_of(shelf, 1)
        assert await watch.refresh() is RemoteOutcome.DONE
        assert watch.current_epoch() is not None

    run_virtual(play())


def test_an_old_copy_of_the_record_brings_no_cleared_epoch_back() -> None:
    """An engine that failed over to a replica that had not seen the last change."""

    async def play() -> None:
        shelf = Shelf()
        watch = watch_of(shelf, 1)
        await watch.refresh()
        cleared = watch.current_epoch()
        old_copy = shelf.records[KEY]
        await watch.clear()
        shelf.records[KEY] = old_copy
        await watch.refresh()
        assert watch.current_epoch() not in (cleared, None)

    run_virtual(play())


def test_a_clear_that_cannot_change_the_record_promises_nothing() -> None:
    async def play() -> None:
        shelf = Shelf()
        watch = watch_of(shelf, 1)
        await watch.refresh()
        before = dict(shelf.records)
        shelf.trouble = RemoteOutcome.REFUSED
        assert (await watch.clear()).outcome is RemoteOutcome.REFUSED
        assert shelf.records == before

    run_virtual(play())


def test_a_daemon_that_leaves_is_not_waited_for() -> None:
    async def play() -> None:
        shelf = Shelf()
        leaving, staying = watch_of(shelf, 1), watch_of(shelf, 2)
        following = [asyncio.ensure_future(staying.follow())]
        await asyncio.sleep(20.0)
        await leaving.refresh()
        await leaving.leave()
        assert leaving.current_epoch() is None
        assert (await staying.clear()).is_acknowledged
        await ended(following)

    run_virtual(play())


async def ended(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@given(
    life=st.integers(0, 2**64 - 1),
    number=st.integers(0, 2**32 - 1),
    epoch=st.integers(1, 2**32 - 1),
    members=st.lists(st.binary(min_size=16, max_size=16), max_size=5),
)
def test_a_record_is_read_as_it_was_written(
    life: int, number: int, epoch: int, members: list[bytes]
) -> None:
    record = EpochRecord(life, number, epoch, tuple(members))
    data = encode_record(record, FINGERPRINT)
    assert decode_record(data, FINGERPRINT) == record
    assert decode_record(data, bytes(16)) is None
    assert decode_record(data[:-1], FINGERPRINT) is None


def test_records_of_two_namespaces_have_two_keys() -> None:
    assert epoch_key(bytes(16)) != KEY == RemoteKey(f"kvtier1/{FINGERPRINT.hex()}/epoch")
