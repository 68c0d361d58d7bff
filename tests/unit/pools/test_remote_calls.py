"""Calls that cannot be taken back, in virtual time."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from kvtier.pools.remote.calls import Borrowed, Calls, ended_in_time, finished
from tests.support.virtual_loop import run_virtual


async def slept(seconds: float, value: int) -> int:
    await asyncio.sleep(seconds)
    return value


def test_members_end_each_for_itself_and_the_late_are_said_to_be() -> None:
    async def play() -> None:
        calls = Calls(8)
        works = [partial(slept, seconds, n) for n, seconds in enumerate((1.0, 9.0, 0.0))]
        assert await calls.run(works, 2.0, -1) == [0, -1, 2]
        assert await calls.run([], 2.0, -1) == []

    run_virtual(play())


def test_a_call_that_hangs_keeps_its_place_until_it_is_back() -> None:
    async def play() -> None:
        calls = Calls(2)
        assert await calls.run([partial(slept, 100.0, 1)] * 2, 1.0, -1) == [-1, -1]
        assert calls.under_way_count == 2
        assert await calls.run([partial(slept, 0.0, 2)], 1.0, -1) == [-1], "no place is free"
        await asyncio.sleep(100.0)
        assert calls.under_way_count == 0
        assert await calls.run([partial(slept, 0.0, 2)], 1.0, -1) == [2]

    run_virtual(play())


def test_what_never_got_a_place_is_never_begun() -> None:
    async def play() -> None:
        calls, begun = Calls(1), []

        async def work(n: int) -> int:
            begun.append(n)
            return await slept(5.0, n)

        assert await calls.run([partial(work, n) for n in range(3)], 1.0, -1) == [-1] * 3
        await asyncio.sleep(60.0)
        assert begun == [0]

    run_virtual(play())


def test_closing_waits_for_what_is_under_way_but_not_for_ever() -> None:
    async def play() -> None:
        calls = Calls(2)
        await calls.run([partial(slept, 3.0, 1), partial(slept, 50.0, 1)], 1.0, -1)
        assert not await calls.close(5.0)
        assert await calls.close(50.0)

    run_virtual(play())


def test_works_that_can_be_cancelled_are() -> None:
    async def play() -> None:
        ended: list[str] = []

        async def work() -> int:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.append("cancelled")
            return 1

        assert await ended_in_time([work(), slept(0.5, 7)], 1.0, -1) == [-1, 7]
        assert ended == ["cancelled"]

    run_virtual(play())


def test_a_work_that_must_be_finished_is_and_the_cancellation_passed_on() -> None:
    async def play() -> None:
        work = asyncio.ensure_future(slept(5.0, 1))
        waiting = asyncio.ensure_future(finished(work))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.done()
        assert work.result() == 1

    run_virtual(play())


def test_borrowed_memory_is_given_back_when_the_last_thread_has_left_it() -> None:
    async def play() -> None:
        memory, inside, may_go = Borrowed(), threading.Event(), threading.Event()
        left: list[float] = []

        def use() -> None:
            with memory.in_use():
                inside.set()
                may_go.wait()
                left.append(time.monotonic())

        using = [asyncio.ensure_future(asyncio.to_thread(use)) for _ in range(2)]
        await asyncio.to_thread(inside.wait)
        giving = asyncio.ensure_future(memory.give_back())
        await asyncio.sleep(0.02)
        giving.cancel()  # It waits all the same.
        await asyncio.sleep(0.02)
        assert not giving.done()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await giving
        assert len(left) == len([one for one in using if await ended(one)])
        with pytest.raises(TimeoutError), memory.in_use():
            raise AssertionError("it was given back")

    asyncio.run(play())


async def ended(using: asyncio.Future[None]) -> bool:
    """Whether it got the memory; a thread that came too late did not."""
    try:
        await using
    except TimeoutError:
        return False
    return True
