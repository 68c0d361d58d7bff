"""A thread that hangs holds nobody up; one that fails is heard."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier.server.threads import call_soon, run_in_thread


def test_result_and_failure_reach_who_waits() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def test() -> None:
        assert await run_in_thread(lambda: 5, "test") == 5
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(fail, "test")

    asyncio.run(test())


def test_a_thread_that_hangs_is_left_behind() -> None:
    released = threading.Event()

    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await run_in_thread(released.wait, "test-hangs")

    asyncio.run(test())  # Returns, with the thread still there.
    [hanging] = [one for one in threading.enumerate() if one.name == "test-hangs"]
    assert hanging.daemon
    released.set()
    hanging.join(10)  # Its end is told to nobody, without an error.
    assert not hanging.is_alive()


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_soon(loop, lambda: None)
