"""Values sealed with a key: nothing of a block shows, nothing but the block opens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from kvtier.codec.codecs import CodecId
from kvtier.pools.key_file import Key
from kvtier.pools.remote.breaker import BreakerState
from kvtier.pools.remote.engine import RemoteOutcome
from kvtier.pools.remote.frame import HEADER_BYTES, FrameFault
from kvtier.pools.remote.sealed_header import SEAL_BYTES, SEAL_HEADER_BYTES
from tests.support.fake_remote import FakeRemote, Shelf
from tests.support.kv_bytes import bf16_block
from tests.support.remote_rig import RemoteRig

OLD, NEW, OTHER = (Key(number, bytes([number]) * 32) for number in (1, 2, 3))
CODECS = [CodecId.NONE, CodecId.PLANES_LZ4, CodecId.PLANES_ZSTD]
PAYLOAD_BYTES = 4096
FOREIGN = (FrameFault.KEY, FrameFault.UNSEALED)
DONE = RemoteOutcome.DONE


def rig_of(shelf: Shelf, keys: Sequence[Key], codec: CodecId = CodecId.NONE) -> RemoteRig:
    return RemoteRig(FakeRemote(shelf), codec, payload_bytes=PAYLOAD_BYTES, keys=keys)


def put(shelf: Shelf, keys: Sequence[Key], codec: CodecId = CodecId.NONE, count: int = 1) -> None:
    async def play() -> None:
        rig = rig_of(shelf, keys, codec)
        assert await rig.put(range(count)) == [DONE] * count
        await rig.close()

    asyncio.run(play())


def got(shelf: Shelf, keys: Sequence[Key], number: int = 0) -> tuple[object, RemoteRig]:
    async def play() -> tuple[object, RemoteRig]:
        rig = rig_of(shelf, keys)
        [ending] = await rig.get([number])
        await rig.close()
        return ending, rig

    return asyncio.run(play())


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_of_a_block_shows_and_its_key_opens_it(codec: CodecId) -> None:
    shelf = Shelf()
    put(shelf, [OLD], codec)
    [value] = shelf.values.values()
    payload = bf16_block(PAYLOAD_BYTES, 0).tobytes()
    assert not any(payload[at : at + 16] in value for at in range(0, PAYLOAD_BYTES, 16)), (
        "plain bytes"
    )
    assert b"KVR1" not in value
    assert got(shelf, [OLD])[0] is DONE


def places(length: int, chance: random.Random) -> list[int]:
    """Every byte of both headers and of the tag, and some between."""
    heads = SEAL_HEADER_BYTES + HEADER_BYTES
    between = chance.sample(range(heads, length - 16), 60)
    return [*range(heads), *between, *range(length - 16, length)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_bit_flipped_anywhere_is_a_miss(codec: CodecId) -> None:
    shelf, chance = Shelf(), random.Random(7)
    put(shelf, [OLD], codec)
    [(key, value)] = shelf.values.items()

    async def play() -> None:
        rig = rig_of(shelf, [OLD])
        for place in places(len(value), chance):
            torn = bytearray(value)
            torn[place] ^= 1 << chance.randrange(8)
            shelf.values[key] = bytes(torn)
            # Not by way of the breaker, which would soon ask no more.
            [ending] = await rig_of(shelf, [OLD]).get([0])
            assert isinstance(ending, FrameFault), f"byte {place} of {len(value)}: {ending}"
        shelf.values[key] = value
        assert await rig.get([0]) == [DONE]

    asyncio.run(play())


@pytest.mark.parametrize("cut", [0, 3, SEAL_HEADER_BYTES, SEAL_BYTES - 1, SEAL_BYTES, -1])
def test_a_value_of_another_length_is_a_miss(cut: int) -> None:
    shelf = Shelf()
    put(shelf, [OLD])
    [(key, value)] = shelf.values.items()
    for torn in (value[:cut], value + b"\0"):
        shelf.values[key] = torn
        assert isinstance(got(shelf, [OLD])[0], FrameFault)


def test_a_block_does_not_pass_for_another() -> None:
    shelf = Shelf()
    put(shelf, [OLD], count=2)
    one, other = shelf.values
    shelf.values[one], shelf.values[other] = shelf.values[other], shelf.values[one]
    assert got(shelf, [OLD])[0] is FrameFault.SEAL


def test_a_new_key_seals_and_the_old_one_still_opens() -> None:
    shelf = Shelf()
    put(shelf, [OLD])
    assert got(shelf, [NEW, OLD])[0] is DONE
    put(shelf, [NEW, OLD])
    assert got(shelf, [NEW])[0] is DONE
    assert got(shelf, [OLD])[0] is FrameFault.KEY


@pytest.mark.parametrize(
    ("keys_put", "keys_got", "fault"),
    [
        ([OLD], [OTHER], FrameFault.KEY),
        ([OLD], [], FrameFault.KEY),
        ([], [OLD], FrameFault.UNSEALED),
        ([OLD], [Key(1, b"?" * 32)], FrameFault.SEAL),
    ],
)
def test_the_wrong_key_opens_nothing_and_is_counted(
    keys_put: list[Key], keys_got: list[Key], fault: FrameFault
) -> None:
    shelf = Shelf()
    put(shelf, keys_put)
    ending, rig = got(shelf, keys_got)
    assert ending is fault
    assert rig.breaking.troubles == {fault.value: 1}


@pytest.mark.parametrize("keys", [[OTHER], []])
def test_values_of_other_keys_leave_the_breaker_alone(keys: list[Key]) -> None:
    shelf = Shelf()
    put(shelf, [OLD])

    async def play() -> None:
        rig = rig_of(shelf, keys)
        for _ in range(20):
            [ending] = await rig.get([0])
            assert ending in FOREIGN
        assert rig.breaking.reading_state is BreakerState.CLOSED

    asyncio.run(play())


def test_no_two_values_are_sealed_alike() -> None:
    """Else two that differ would tell what they have in common."""
    found = set()
    for _ in range(2):
        shelf = Shelf()
        put(shelf, [OLD])
        found.update(shelf.values.values())
    assert len(found) == 2
