"""What may happen to a Mooncake Store: master killed or stopped, no room, a dead client, lies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.codec.codecs import CodecId
from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.frame import FrameFault
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from tests.support.forms import rounds, state_finding
from tests.support.mooncake_master import MooncakeMaster, mooncake_master, needs_mooncake
from tests.support.remote_rig import RemoteRig
from tests.support.remote_traffic import Traffic

pytestmark = [needs_mooncake, pytest.mark.slow]

DONE, ABSENT = RemoteOutcome.DONE, RemoteOutcome.ABSENT


def play(
    master: MooncakeMaster,
    work: Callable[[RemoteRig], Awaitable[None]],
    segment_bytes: int = 64 << 20,
    **more: Any,
) -> None:
    settings = MooncakeSettings(master.address, "127.0.0.1", segment_bytes=segment_bytes)

    async def main() -> None:
        rig = RemoteRig(MooncakeEngine(settings), **more)
        try:
            await work(rig)
        finally:
            await rig.close()

    asyncio.run(main())


@pytest.mark.full_form
def test_a_master_that_is_killed_and_comes_back_costs_misses_only(tmp_path: Path) -> None:
    kills = rounds(short=1, full=15)

    async def work(rig: RemoteRig) -> None:
        traffic = Traffic(rig, 1)
        for _ in range(kills):
            await traffic.run_until(DONE, seconds=40.0)
            await traffic.run_while(master.kill)
            await traffic.run_until(RemoteOutcome.OFF)
            await asyncio.to_thread(master.start)
        await traffic.run_until(DONE, seconds=40.0)
        traffic.check()
        state_finding(f"mooncake's master killed {kills} times: {dict(traffic.endings)}")

    with mooncake_master(tmp_path) as master:
        play(master, work, codec=CodecId.PLANES_LZ4)


def test_a_master_that_stands_still_costs_deadlines_and_then_nothing(tmp_path: Path) -> None:
    """The library would wait for 30 s."""

    async def work(rig: RemoteRig) -> None:
        traffic = Traffic(rig, 2, deadline_seconds=0.25)
        await traffic.run_until(DONE)
        master.stop()
        await traffic.run_until(RemoteOutcome.TIMED_OUT)
        await traffic.run_until(RemoteOutcome.OFF)
        assert await traffic.seconds_of_an_off() < 0.1, "an open breaker does not wait"
        master.resume()
        await traffic.run_until(DONE, seconds=40.0)
        traffic.check()

    with mooncake_master(tmp_path) as master:
        play(master, work)


def test_a_master_that_is_not_there_at_the_start_is_found_later(tmp_path: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        assert (await rig.put([1], timeout_seconds=5.0))[0] in (
            RemoteOutcome.UNREACHABLE,
            RemoteOutcome.TIMED_OUT,
        )
        await asyncio.to_thread(master.start)
        until = time.monotonic() + 40.0
        while await rig.put([1], timeout_seconds=5.0) != [DONE]:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        assert await rig.get([1]) == [DONE]

    with mooncake_master(tmp_path) as master:
        master.kill()
        play(master, work)


def test_a_store_without_room_evicts_or_refuses_and_serves_what_it_has(tmp_path: Path) -> None:
    segment_bytes = 16 << 20

    async def work(rig: RemoteRig) -> None:
        too_large = np.zeros(segment_bytes + 1, np.uint8)
        outcome = await rig.engine.put([(rig.key_of(99), [too_large])], timeout_seconds=5.0)
        assert outcome == [RemoteOutcome.FULL]
        for number in range(30):
            [ending] = await rig.put([number])
            assert ending in (DONE, RemoteOutcome.FULL, RemoteOutcome.OFF)
        endings = await rig.get(range(30))
        assert set(endings) == {DONE, ABSENT}, "what the master evicts is a miss"
        assert endings.count(DONE) * rig.payload_bytes <= segment_bytes

    with mooncake_master(tmp_path) as master:
        play(master, work, segment_bytes=segment_bytes, payload_bytes=1_000_000)


def test_a_store_that_lies_is_a_miss(tmp_path: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        assert await rig.put([1, 2, 3]) == [DONE] * 3
        [reply] = await rig.engine.get(
            [rig.key_of(2)], value_bytes_max=1 << 20, timeout_seconds=5.0
        )
        assert reply.value is not None
        await rig.engine.delete([rig.key_of(1), rig.key_of(3)], timeout_seconds=5.0)
        torn = reply.value.copy()
        torn[5000] ^= 1
        planted = [(rig.key_of(1), [reply.value]), (rig.key_of(3), [reply.value[:-1]])]
        assert await rig.engine.put(planted, timeout_seconds=5.0) == [DONE, DONE]
        await rig.engine.delete([rig.key_of(2)], timeout_seconds=5.0)
        await rig.engine.put([(rig.key_of(2), [torn])], timeout_seconds=5.0)
        endings = await rig.get([1, 2, 3])
        assert endings == [FrameFault.HASH, FrameFault.TORN, FrameFault.HASH]

    with mooncake_master(tmp_path) as master:
        play(master, work)


LENDER = """
import asyncio, sys
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from tests.support.remote_rig import RemoteRig

async def main():
    settings = MooncakeSettings(sys.argv[1], "127.0.0.1", segment_bytes=64 << 20)
    rig = RemoteRig(MooncakeEngine(settings))
    assert {one.value for one in await rig.put(range(20))} == {"done"}
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_node_that_dies_takes_its_blocks_along_and_nothing_else(tmp_path: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        numbers = range(20)
        assert set(await rig.get(numbers)) == {DONE}, "over TCP, from the other process"
        lender.kill()
        lender.wait(10)
        began = time.monotonic()
        endings = await rig.get(numbers, timeout_seconds=2.0)
        assert time.monotonic() - began < 2.5
        assert DONE not in endings

    with mooncake_master(tmp_path) as master:
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, master.address], stdout=subprocess.PIPE, text=True
        )
        try:
            assert lender.stdout is not None
            assert lender.stdout.readline().strip() == "ready"
            play(master, work, segment_bytes=0)
        finally:
            lender.kill()
            lender.wait(10)
            lender.stdout.close()
