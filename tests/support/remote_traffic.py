"""Puts and gets over a remote engine while something happens to it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.frame import FrameFault
from tests.support.remote_rig import RemoteRig

# How much longer than its deadline a call may take on a busy machine.
SLACK_SECONDS = 0.5


class Traffic:
    """Puts and gets, each with a deadline; counts how they end and how long they take."""

    def __init__(self, rig: RemoteRig, seed: int, deadline_seconds: float = 0.5) -> None:
        self._rig = rig
        self._chance = random.Random(seed)
        self._deadline_seconds = deadline_seconds
        self.endings: Counter[str] = Counter()
        self.longest_seconds = 0.0

    async def step(self) -> None:
        numbers = self._chance.sample(range(40), 4)
        began = time.monotonic()
        call = self._rig.put if self._chance.random() < 0.4 else self._rig.get
        endings = await call(numbers, timeout_seconds=self._deadline_seconds)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        self.endings.update(ending.value for ending in endings)

    async def run(self, seconds: float) -> Counter[str]:
        """What it was for so long."""
        before, until = Counter(self.endings), time.monotonic() + seconds
        while time.monotonic() < until:
            await self.step()
        return self.endings - before

    async def run_until(self, ending: RemoteOutcome, seconds: float = 10.0) -> None:
        before, until = self.endings[ending.value], time.monotonic() + seconds
        while self.endings[ending.value] == before:
            assert time.monotonic() < until, f"no call ended {ending}: {self.endings}"
            await self.step()

    async def seconds_of_an_off(self) -> float:
        """Of a get that was not let through; a trial now and then is."""
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            began = time.monotonic()
            endings = await self._rig.get([1], timeout_seconds=self._deadline_seconds)
            if endings == [RemoteOutcome.OFF]:
                return time.monotonic() - began
        raise AssertionError("every get was let through")

    async def run_while(self, act: Callable[[], None]) -> None:
        """Traffic while something happens to the engine, and for a moment before and after."""
        running = asyncio.ensure_future(self.run(0.15))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(act)
        await running

    def check(self) -> None:
        """No call was late, and no answer was that of another call."""
        assert not set(self.endings) & {fault.value for fault in FrameFault}, self.endings
        assert self.longest_seconds < self._deadline_seconds + SLACK_SECONDS
