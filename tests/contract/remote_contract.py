"""What every remote engine promises, whatever it is: in batches, within a deadline, as values."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from kvtier.codec.codecs import CodecId
from kvtier.memory import Bytes
from kvtier.pools.key_file import Key
from kvtier.pools.remote.engine import RemoteEngine, RemoteKey, RemoteOutcome
from kvtier.pools.remote.frame import FrameFault
from tests.support.remote_rig import RemoteRig

T = TypeVar("T")
SECONDS = 10.0
BIG = 6 << 20
SMALL = 4 << 10  # With this the members of a batch may share calls.
DONE, ABSENT, LOST = RemoteOutcome.DONE, RemoteOutcome.ABSENT, RemoteOutcome.LOST


def key_of(name: object) -> RemoteKey:
    return RemoteKey(f"kvtier1/contract/{name}")


def value_of(seed: int, count_bytes: int = 1000) -> Bytes:
    return np.frombuffer(random.Random(seed).randbytes(count_bytes), np.uint8)


def is_value(found: Bytes | None, seed: int, count_bytes: int = 1000) -> bool:
    return found is not None and np.array_equal(found, value_of(seed, count_bytes))


class RemoteEngineContract(ABC):
    """`make_engine` gives another client of the same, at first empty, remote engine."""

    @abstractmethod
    async def make_engine(self) -> RemoteEngine: ...

    def run(self, play: Callable[..., Coroutine[Any, Any, T]], count: int = 1) -> T:
        """The play with so many clients, closed afterwards."""

        async def main() -> T:
            engines = [await self.make_engine() for _ in range(count)]
            try:
                return await play(*engines)
            finally:
                for engine in engines:
                    await engine.close()

        return asyncio.run(main())

    def test_a_folder_is_emptied_of_all_that_anybody_put_but_for_what_is_kept(self) -> None:
        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            record = key_of("mine/epoch")
            await one.replace_record(record, expected=None, value=b"1", timeout_seconds=SECONDS)
            mine = [key_of(f"mine/a/{number}") for number in range(40)]
            kept = [key_of(f"mine/b/{number}") for number in range(3)]
            near = [key_of("min/a/1"), key_of("mine2/a/1"), key_of("min")]
            keys = [*mine, *kept, *near]
            for engine, some in ((one, keys[::2]), (other, keys[1::2])):
                values = [(key, [value_of(1)]) for key in some]
                assert set(await engine.put(values, timeout_seconds=SECONDS)) == {DONE}
            await other.get(mine[:5], value_bytes_max=2000, timeout_seconds=SECONDS)
            spared = [record, key_of("mine/b/")]
            emptied = await one.delete_under(key_of("mine/"), kept=spared, timeout_seconds=SECONDS)
            assert (emptied.outcome, emptied.count) == (DONE, 40)
            assert await other.exists(mine, timeout_seconds=SECONDS) == [ABSENT] * 40
            assert set(await other.exists(kept + near, timeout_seconds=SECONDS)) == {DONE}
            assert (await other.read_record(record, timeout_seconds=SECONDS)).outcome is DONE
            again = await one.delete_under(key_of("mine/"), kept=spared, timeout_seconds=SECONDS)
            assert (again.outcome, again.count) == (DONE, 0)

        self.run(play, count=2)

    @pytest.mark.parametrize("codec", [CodecId.NONE, CodecId.PLANES_ZSTD])
    def test_sealed_blocks_come_back_with_their_key_only(self, codec: CodecId) -> None:
        old, new = Key(1, b"o" * 32), Key(2, b"n" * 32)

        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            writer = RemoteRig(one, codec, keys=[old])
            assert await writer.put(range(8)) == [DONE] * 8
            for keys, ending in (
                ([new, old], DONE),
                ([new], FrameFault.KEY),
                ([], FrameFault.KEY),
            ):
                assert await RemoteRig(other, codec, keys=keys).get(range(8)) == [ending] * 8

        self.run(play, count=2)

    def test_a_block_scribbled_over_since_its_checksum_is_found_by_nobody(self) -> None:
        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            writer = RemoteRig(one)
            blocks = [writer.views_of(number) for number in range(50, 53)]
            blocks[1].shards[1][7] ^= 1
            endings = await writer.blocks.put(blocks, timeout_seconds=SECONDS)
            assert endings == [DONE, FrameFault.CHECKSUM, DONE]
            assert await RemoteRig(other).get(range(50, 53)) == [DONE, ABSENT, DONE]

        self.run(play, count=2)

    def test_what_was_put_is_got_by_another_client(self) -> None:
        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            values = [(key_of(n), [value_of(n, 5000 * n + 1)]) for n in range(8)]
            assert await one.put(values, timeout_seconds=SECONDS) == [DONE] * 8
            replies = await other.get(
                [key for key, _ in values], value_bytes_max=BIG, timeout_seconds=SECONDS
            )
            for n, reply in enumerate(replies):
                assert is_value(reply.value, n, 5000 * n + 1), n

        self.run(play, 2)

    def test_a_large_value_comes_back_whole(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            value = value_of(1, (5 << 20) + 3)
            assert await engine.put([(key_of("large"), [value])], timeout_seconds=SECONDS) == [DONE]
            [reply] = await engine.get(
                [key_of("large")], value_bytes_max=BIG, timeout_seconds=SECONDS
            )
            assert is_value(reply.value, 1, (5 << 20) + 3)

        self.run(play)

    def test_members_of_a_batch_end_each_for_itself(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            values = [(key_of("a"), [value_of(1)]), (key_of("c"), [value_of(3)])]
            await engine.put(values, timeout_seconds=SECONDS)
            keys = [key_of(name) for name in "abc"]
            replies = await engine.get(keys, value_bytes_max=SMALL, timeout_seconds=SECONDS)
            assert [reply.outcome for reply in replies] == [DONE, ABSENT, DONE]
            assert is_value(replies[2].value, 3)
            assert await engine.exists(keys, timeout_seconds=SECONDS) == [DONE, ABSENT, DONE]
            assert await engine.delete(keys, timeout_seconds=SECONDS) == [DONE, ABSENT, DONE]
            assert await engine.exists(keys, timeout_seconds=SECONDS) == [ABSENT] * 3

        self.run(play)

    def test_an_empty_batch_is_an_empty_answer(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            assert await engine.put([], timeout_seconds=SECONDS) == []
            assert await engine.get([], value_bytes_max=1, timeout_seconds=SECONDS) == []
            assert await engine.exists([], timeout_seconds=SECONDS) == []
            assert await engine.delete([], timeout_seconds=SECONDS) == []

        self.run(play)

    def test_a_value_that_was_put_twice_is_whole(self) -> None:
        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            for engine in (one, other):
                outcome = await engine.put([(key_of("a"), [value_of(1)])], timeout_seconds=SECONDS)
                assert outcome == [DONE]
            [reply] = await one.get([key_of("a")], value_bytes_max=BIG, timeout_seconds=SECONDS)
            assert is_value(reply.value, 1)

        self.run(play, 2)

    def test_a_value_that_is_too_long_is_refused(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            await engine.put([(key_of("a"), [value_of(1, 2000)])], timeout_seconds=SECONDS)
            [reply] = await engine.get([key_of("a")], value_bytes_max=1999, timeout_seconds=SECONDS)
            assert reply.outcome is RemoteOutcome.FAILED
            [reply] = await engine.get([key_of("a")], value_bytes_max=2000, timeout_seconds=SECONDS)
            assert reply.outcome is DONE

        self.run(play)

    def test_a_batch_of_hundreds_is_one_call(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            values = [(key_of(n), [value_of(n, 64)]) for n in range(300)]
            assert await engine.put(values, timeout_seconds=SECONDS) == [DONE] * 300
            keys = [key for key, _ in values]
            assert await engine.exists(keys, timeout_seconds=SECONDS) == [DONE] * 300
            replies = await engine.get(keys, value_bytes_max=SMALL, timeout_seconds=SECONDS)
            assert all(is_value(reply.value, n, 64) for n, reply in enumerate(replies))

        self.run(play)

    def test_a_record_is_changed_by_who_knows_it(self) -> None:
        async def play(one: RemoteEngine, other: RemoteEngine) -> None:
            key = key_of("record")
            assert (await one.read_record(key, timeout_seconds=SECONDS)).outcome is ABSENT
            assert await replace(one, key, b"x", b"1") is LOST
            assert await replace(one, key, None, b"1") is DONE
            assert await replace(other, key, None, b"2") is LOST
            assert await replace(other, key, b"1", b"2") is DONE
            assert await replace(one, key, b"1", b"3") is LOST
            assert await record_of(one, key) == await record_of(other, key) == b"2"

        self.run(play, 2)

    def test_records_are_apart_from_each_other_and_from_values(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            assert await replace(engine, key_of("a"), None, b"1") is DONE
            assert await replace(engine, key_of("b"), None, b"2") is DONE
            await engine.put([(key_of("c"), [value_of(1)])], timeout_seconds=SECONDS)
            assert await record_of(engine, key_of("a")) == b"1"
            assert await record_of(engine, key_of("b")) == b"2"

        self.run(play)

    def test_of_those_that_race_for_a_record_exactly_one_wins(self) -> None:
        async def play(*engines: RemoteEngine) -> None:
            key, before = key_of("raced"), None
            for turn in range(self.race_count):
                values = [b"%d by %d" % (turn, n) for n in range(len(engines))]
                outcomes = await asyncio.gather(
                    *(
                        replace(engine, key, before, value)
                        for engine, value in zip(engines, values, strict=True)
                    )
                )
                assert sorted(outcomes) == sorted([DONE] + [LOST] * (len(engines) - 1)), turn
                before = values[outcomes.index(DONE)]
                assert {await record_of(engine, key) for engine in engines} == {before}

        self.run(play, 2)

    race_count = 25

    def test_no_time_means_timed_out_and_no_wait(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            await engine.put([(key_of("a"), [value_of(1)])], timeout_seconds=SECONDS)
            began = time.monotonic()
            calls: list[Awaitable[Any]] = [
                engine.put([(key_of("b"), [value_of(2)])] * 2, timeout_seconds=0.0),
                engine.get([key_of("a")], value_bytes_max=BIG, timeout_seconds=0.0),
                engine.exists([key_of("a")] * 3, timeout_seconds=0.0),
                engine.delete([key_of("a")], timeout_seconds=0.0),
            ]
            lengths = [len(await call) for call in calls]
            assert lengths == [2, 1, 3, 1]
            assert time.monotonic() - began < 1.0

        self.run(play)

    def test_a_healthy_engine_says_so(self) -> None:
        async def play(engine: RemoteEngine) -> None:
            health = await engine.health(timeout_seconds=SECONDS)
            assert health.outcome is DONE, health.detail

        self.run(play)


async def replace(
    engine: RemoteEngine, key: RemoteKey, expected: bytes | None, value: bytes
) -> RemoteOutcome:
    return await engine.replace_record(key, expected=expected, value=value, timeout_seconds=SECONDS)


async def record_of(engine: RemoteEngine, key: RemoteKey) -> bytes | None:
    reply = await engine.read_record(key, timeout_seconds=SECONDS)
    if reply.value is None:
        pytest.fail(f"{key}: {reply.outcome}")
    return reply.value.tobytes()
