"""Epochs among nodes in virtual time, with everything that may happen to them, from one seed."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.epochs import EpochTimes, EpochWatch
from tests.support.fake_remote import FakeRemote, Shelf
from tests.support.forms import rounds, sim_seeds
from tests.support.virtual_loop import LoopClock, run_virtual

FINGERPRINT = bytes(range(16))
SEEDS = sim_seeds(range(rounds(short=8, full=400)))


def watch_of(shelf: Shelf, seed: int, clock: LoopClock) -> EpochWatch:
    chance = random.Random(seed)
    return EpochWatch(
        FakeRemote(shelf),
        FINGERPRINT,
        chance.randbytes(16),
        clock=clock,
        draw=chance.getrandbits,
        times=EpochTimes(view_seconds=10.0, refresh_seconds=3.0, call_seconds=2.0),
    )


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("seed", SEEDS)
def test_after_any_clear_nobody_uses_an_older_epoch(seed: int) -> None:
    """Daemons come, stall, are cut off and come back; the record is lost now and then; clears at
    any moment; clocks up to 2 % wrong. Whenever a clear answers DONE, all older epochs are dead."""

    async def play() -> int:
        chance = random.Random(seed)
        shelf = Shelf()
        watches = [
            watch_of(shelf, 100 * seed + n, LoopClock(chance.uniform(0.98, 1.02))) for n in range(4)
        ]
        dead: set[int] = set()
        used: set[int] = set()
        answered = 0

        async def refreshing(watch: EpochWatch) -> None:
            while True:
                await watch.refresh()
                await asyncio.sleep(chance.choice([0.5, 3.0, 3.0, 3.0, 8.0, 25.0]))

        async def clearing(watch: EpochWatch) -> None:
            nonlocal answered
            while True:
                await asyncio.sleep(chance.uniform(0.0, 40.0))
                before = set(used)
                done = await watch.clear()
                if done.outcome is RemoteOutcome.DONE:
                    dead.update(before)
                    answered += 1

        async def troubling() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.0, 30.0))
                if chance.random() < 0.3:
                    shelf.records.clear()
                elif chance.random() < 0.3:
                    shelf.values.clear()
                else:
                    shelf.trouble = RemoteOutcome.UNREACHABLE
                    await asyncio.sleep(chance.uniform(0.0, 12.0))
                    shelf.trouble = None
                shelf.delay_seconds = chance.choice([0.0, 0.01, 0.5])

        works = [refreshing(watch) for watch in watches] + [clearing(one) for one in watches[:2]]
        tasks = [asyncio.ensure_future(work) for work in [*works, troubling()]]
        for _ in range(4000):
            await asyncio.sleep(0.1)
            for watch in watches:
                epoch = watch.current_epoch()
                assert epoch not in dead, f"seed {seed}: an epoch that was cleared is used"
                if epoch is not None:
                    used.add(epoch)
        for task in tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return answered

    assert run_virtual(play()) > 3
