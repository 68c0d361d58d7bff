"""Work that cannot be cancelled is finished before the cancellation goes on."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.server.finish import finish


def test_cancelled_caller_waits_for_the_end_of_the_work() -> None:
    steps: list[str] = []

    async def body() -> None:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()
            steps.append("done")

        caller = asyncio.create_task(finish(work()))
        await asyncio.sleep(0)
        for _ in range(2):
            caller.cancel()
            await asyncio.sleep(0)
            assert not caller.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert steps == ["done"]

    asyncio.run(body())


def test_result_and_error_reach_the_caller() -> None:
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise ValueError("x")

    assert asyncio.run(finish(good())) == 7
    with pytest.raises(ValueError, match="x"):
        asyncio.run(finish(bad()))
