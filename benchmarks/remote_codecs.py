"""What codecs are worth on a slow link, and whether `auto` finds out: real time, real codecs.

The link is a throttle: one value after the other takes its bytes over the speed asked for, without
using the processor. Blocks are 2 MiB of bf16 that compress as KV does (synthetic: see
tests/support/kv_bytes.py). For each speed the codecs and `auto` take turns; a turn puts a batch and
gets it back. `auto` begins without knowing anything, so its first turns are left out; its trials
are not.

    python -m benchmarks.remote_codecs [--speeds 5 1 0.5 0.2 0.1] [--blocks 24] [--rounds 7]

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np

from kvtier.cli.environment import describe
from kvtier.codec.codecs import CodecId
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.policy.codec_choice import CodecChoice
from kvtier.pools.remote.blocks import CodecChooser, FixedCodec
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.engine import RemoteEngine, RemoteKey, RemoteOutcome, Reply, Value
from kvtier.pools.remote.framing import BlockViews, bytes_of
from tests.support.fake_remote import FakeRemote, Shelf
from tests.support.remote_rig import RemoteRig

BLOCK_BYTES = 2 << 20
LEARNING_ROUNDS = 2


class Throttled(FakeRemote):
    """A remote engine at the end of a link of a given speed."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(Shelf(), "throttle:")
        self._bytes_per_second = bytes_per_second
        self._kept: dict[RemoteKey, Bytes] = {}
        self._buffers = Buffers()
        self._link = IoThreads("throttle", count=1)

    @property
    def buffers(self) -> Buffers:
        return self._buffers

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        await self._take(sum(bytes_of(value) for _, value in values))
        for key, value in values:
            place = self._kept.get(key)
            if place is None or place.nbytes != bytes_of(value):
                place = self._kept[key] = np.empty(bytes_of(value), np.uint8)
            np.concatenate(value, out=place)
        return [RemoteOutcome.DONE] * len(values)

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        await self._take(sum(self._kept[key].nbytes for key in keys))
        replies = []
        for key in keys:
            value = self._buffers.take(self._kept[key].nbytes)
            np.copyto(value, self._kept[key])
            replies.append(Reply(RemoteOutcome.DONE, value))
        return replies

    async def _take(self, count_bytes: int) -> None:
        """In a thread: the loop's own timers are a millisecond coarse."""
        loop = asyncio.get_running_loop()
        seconds = count_bytes / self._bytes_per_second
        await loop.run_in_executor(self._link, time.sleep, seconds)


def rig_of(chooser: CodecChooser, bytes_per_second: float) -> RemoteRig:
    link = Throttled(bytes_per_second)
    engine: RemoteEngine = link
    return RemoteRig(
        engine, payload_bytes=BLOCK_BYTES, shard_count=1, chooser=chooser, buffers=link.buffers
    )


async def turn(rig: RemoteRig, blocks: Sequence[BlockViews], places: Sequence[BlockViews]) -> float:
    """Seconds to put the batch and get it back."""
    began = time.perf_counter()
    endings = await rig.blocks.put(blocks, timeout_seconds=600.0)
    endings += (await rig.blocks.get(places, timeout_seconds=600.0)).endings
    seconds = time.perf_counter() - began
    assert set(endings) == {RemoteOutcome.DONE}, endings
    return seconds


async def compare(speed: float, block_count: int, rounds: int) -> dict[str, object]:
    choice = CodecChoice([int(codec) for codec in CodecId])
    choosers: dict[str, CodecChooser] = {codec.name.lower(): FixedCodec(codec) for codec in CodecId}
    choosers["auto"] = choice
    rigs = {name: rig_of(chooser, speed * 1e9) for name, chooser in choosers.items()}
    blocks = [rigs["auto"].views_of(number) for number in range(block_count)]
    places = [BlockViews(one.block, [np.empty_like(one.shards[0])]) for one in blocks]
    seconds: dict[str, list[float]] = {name: [] for name in rigs}
    for _ in range(LEARNING_ROUNDS):
        for rig in rigs.values():
            await turn(rig, blocks, places)
    for _ in range(rounds):
        for name, rig in rigs.items():
            seconds[name].append(await turn(rig, blocks, places))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    best = min((name for name in medians if name != "auto"), key=lambda name: medians[name])
    ratio = statistics.median(
        mine / theirs for mine, theirs in zip(seconds["auto"], seconds[best], strict=True)
    )
    for rig in rigs.values():
        await rig.close()
    return {
        "link_gbps": speed,
        "seconds": {name: round(found, 4) for name, found in medians.items()},
        "best_fixed": best,
        "auto_chose": CodecId(choice.chosen).name.lower(),
        "auto_to_best": round(ratio, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[5.0, 1.0, 0.5, 0.2, 0.1])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found = [asyncio.run(compare(speed, args.blocks, args.rounds)) for speed in args.speeds]
    report = {
        "environment": describe(),
        "block_bytes": BLOCK_BYTES,
        "blocks": args.blocks,
        "rounds": args.rounds,
        "links": found,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
