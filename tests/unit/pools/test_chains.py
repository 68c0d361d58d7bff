"""Recovered blocks in chains, against a walk from every block to its first one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.pools.chains import ROOT, RecoveredChains, chains_of
from kvtier.pools.nvme_recovery import RecoveredBlocks

ONE, OTHER = b"1" * 16, b"2" * 16
LAYOUT = SlotLayout(4096, 1)
SEGMENT_ROWS = 8
ROW_COUNT_MAX = 16
EPOCH = 7

Blocks = Sequence[tuple[bytes, bytes | None]]
"""(hash, parent's hash), in the order of slots."""


def recovered(
    *segments: tuple[bytes, Blocks],
    recency: Sequence[int] | None = None,
    hash_bytes: int = 32,
) -> RecoveredBlocks:
    """What was found in segments 0, 1, ...: of which namespace each is, and its blocks."""
    blocks = [block for _, own in segments for block in own]
    slots, lives = [], []
    for number, (fingerprint, own) in enumerate(segments):
        slots += [number * ROW_COUNT_MAX + row for row in range(len(own))]
        header = SegmentHeader(number, fingerprint, LAYOUT, ROW_COUNT_MAX, 100 + number)
        lives.append((header, np.arange(len(own))))
    return RecoveredBlocks(
        slots=np.array(slots, np.uint32),
        hashes=as_array([block for block, _ in blocks]),
        parents=as_array([parent or b"" for _, parent in blocks]),
        hash_bytes=np.full(len(blocks), hash_bytes, np.uint8),
        epochs=np.full(len(blocks), EPOCH, np.uint32),
        lives=tuple(lives),
        void_slots=np.empty(0, np.uint32),
        recency=None if recency is None else np.array(recency, np.uint32),
    )


def as_array(hashes: Sequence[bytes]) -> np.ndarray:
    packed = b"".join(one.ljust(32, b"\0") for one in hashes)
    return np.frombuffer(packed, np.uint8).reshape(-1, 32)


def block(name: str, hash_bytes: int = 32) -> bytes:
    return name.encode().rjust(hash_bytes, b".")


def path(*names: str) -> list[tuple[bytes, bytes | None]]:
    """Blocks that follow one another."""
    return [
        (block(name), block(before) if before else None)
        for before, name in zip(("", *names), names, strict=False)
    ]


def in_segments(blocks: Blocks, fingerprint: bytes = ONE) -> list[tuple[bytes, Blocks]]:
    return [
        (fingerprint, blocks[first : first + SEGMENT_ROWS])
        for first in range(0, len(blocks), SEGMENT_ROWS)
    ]


def hashes_of(chains: RecoveredChains) -> list[bytes]:
    size = chains.hash_bytes
    return [chains.packed[at : at + size] for at in range(0, len(chains.packed), size)]


def reached(blocks: Blocks) -> dict[bytes, bytes | None]:
    """The blocks whose chain leads to a first block, by walking up from each."""
    parent_of = dict(blocks)
    found = {}
    for name, parent in blocks:
        at: bytes | None = name
        for _ in range(len(blocks) + 1):
            if at is None or at not in parent_of:
                break
            at = parent_of[at]
        if at is None:
            found[name] = parent
    return found


def assert_right(chains: RecoveredChains, blocks: Blocks, slot_of: Mapping[bytes, int]) -> None:
    kept = reached(blocks)
    hashes = hashes_of(chains)
    assert len(set(hashes)) == len(hashes)
    assert set(hashes) == set(kept)
    for position, (name, parent) in enumerate(zip(hashes, chains.parents.tolist(), strict=True)):
        assert parent < position, "a child before its parent"
        assert (hashes[parent] if parent != ROOT else None) == kept[name]
    assert chains.lower_slots.tolist() == [slot_of[name] for name in hashes]
    assert chains.dropped.tolist() == sorted(
        slot_of[name] for name, _ in blocks if name not in kept
    )
    segments = chains.lower_slots // ROW_COUNT_MAX
    assert chains.sequences.tolist() == [100 + segment for segment in segments.tolist()]
    types = [chains.parents.dtype, chains.lower_slots.dtype, chains.sequences.dtype]
    assert types == [np.int32, np.uint32, np.uint64]


def check(blocks: Blocks) -> RecoveredChains:
    found = recovered(*in_segments(blocks))
    [chains] = chains_of(found)
    slots = found.slots.tolist()
    assert_right(chains, blocks, {name: slots[i] for i, (name, _) in enumerate(blocks)})
    return chains


def test_a_chain_in_the_order_of_slots_stays_as_it_is() -> None:
    chains = check(path(*"abcdefghijklmnopqrst"))
    assert chains.parents.tolist() == list(range(-1, 19))
    assert (chains.fingerprint, chains.epoch, chains.hash_bytes) == (ONE, EPOCH, 32)
    assert chains.used_at is None


def test_a_chain_that_lies_backwards_is_turned_round() -> None:
    chains = check(path(*"abcdefghijklmnopqrst")[::-1])
    assert hashes_of(chains) == [block(name) for name in "abcdefghijklmnopqrst"]


def test_blocks_behind_a_gap_are_dropped() -> None:
    blocks = path(*"abcdefgh")
    del blocks[4]
    assert check(blocks).dropped.tolist() == [4, 5, 6]


def test_blocks_that_follow_each_other_in_a_circle_are_dropped() -> None:
    circle = [(block("x"), block("z")), (block("y"), block("x")), (block("z"), block("y"))]
    itself = [(block("s"), block("s"))]
    behind = [(block("t"), block("y")), (block("u"), block("t"))]
    check(itself)
    check([*path(*"ab"), *circle, *itself, *behind, *path(*"pq")])


def test_only_chains_without_a_first_block_leave_nothing() -> None:
    chains = check(path(*"abc")[1:])
    assert (chains.packed, len(chains.parents)) == (b"", 0)


@pytest.mark.parametrize("seed", range(60))
def test_any_forest_in_any_order_is_found_as_by_walking(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.choice([1, 2, 5, 30, 200])
    alike_bytes = chance.choice([0, 8, 17, 24])  # Hashes begin with so many equal bytes.
    names = [bytes(alike_bytes) + chance.randbytes(32 - alike_bytes) for _ in range(count)]
    blocks: list[tuple[bytes, bytes | None]] = []
    for number, name in enumerate(names):
        kind = chance.random()
        if kind < 0.1 or number == 0:
            blocks.append((name, None))
        elif kind < 0.6:
            blocks.append((name, names[number - 1]))
        elif kind < 0.9:
            blocks.append((name, chance.choice(names[:number])))
        elif kind < 0.95:
            blocks.append((name, chance.choice(names)))  # Perhaps a circle.
        else:
            blocks.append((name, bytes(alike_bytes) + chance.randbytes(32 - alike_bytes)))
    for _ in range(chance.choice([0, 1, count // 3])):
        blocks.pop(chance.randrange(len(blocks)))
        if not blocks:
            return
    order = chance.choice(["as written", "any", "runs"])
    if order == "any":
        chance.shuffle(blocks)
    elif order == "runs":
        cut = chance.randrange(len(blocks))
        blocks = blocks[cut:] + blocks[:cut]
    check(blocks)


def test_each_namespace_has_its_own_chains() -> None:
    """Equal hashes of two namespaces are two blocks, and no parent is found in the other one."""
    found = recovered((ONE, path(*"abc")), (OTHER, path(*"abcd")[1:]), (ONE, path(*"abcde")[3:]))
    one, other = chains_of(found)
    assert (one.fingerprint, hashes_of(one)) == (ONE, [block(name) for name in "abcde"])
    assert one.lower_slots.tolist() == [0, 1, 2, 32, 33]
    assert one.sequences.tolist() == [100, 100, 100, 102, 102]
    assert (other.fingerprint, hashes_of(other)) == (OTHER, [])
    assert other.dropped.tolist() == [16, 17, 18]


@pytest.mark.parametrize("hash_bytes", [16, 20, 31])
def test_short_hashes_are_packed_without_their_padding(hash_bytes: int) -> None:
    names = [block(name, hash_bytes) for name in "abc"]
    blocks = list(zip(names, [None, *names], strict=False))
    [chains] = chains_of(recovered((ONE, blocks), hash_bytes=hash_bytes))
    assert hashes_of(chains) == names
    assert chains.parents.tolist() == [-1, 0, 1]


def test_an_entry_that_differs_in_epoch_or_hash_length_from_its_namespace_is_dropped() -> None:
    found = recovered((ONE, path(*"abcd")), (ONE, path(*"xyz")))
    found.epochs[2] += 1
    found.hash_bytes[5] = 16
    [chains] = chains_of(found)
    assert hashes_of(chains) == [block(name) for name in "abx"]
    assert chains.dropped.tolist() == [2, 3, 17, 18]


def test_a_short_hash_with_something_behind_it_is_dropped() -> None:
    """As two blocks, the core would get the same hash twice."""
    name = block("a", 16)
    found = recovered((ONE, [(name, None), (name + b"?", None)]), hash_bytes=16)
    [chains] = chains_of(found)
    assert (hashes_of(chains), chains.dropped.tolist()) == ([name], [1])


def test_the_order_of_use_is_kept() -> None:
    found = recovered((ONE, path(*"abcd")), (OTHER, path(*"xy")), recency=[2, 17, 0, 16, 3])
    one, other = chains_of(found)
    assert one.used_at is not None
    assert other.used_at is not None
    assert one.used_at.tolist() == [-3.0, -6.0, -5.0, -1.0]  # "b" is not in it: before all.
    assert other.used_at.tolist() == [-2.0, -4.0]


def test_an_empty_pool_has_no_chains() -> None:
    assert chains_of(recovered()) == []


@pytest.mark.slow
def test_hashes_that_all_begin_alike_cost_no_square() -> None:
    """One chain of 70,000, more than 16 bits can count; compared each with each it would take
    minutes."""
    chance = random.Random(1)
    names = [bytes(24) + chance.randbytes(8) for _ in range(70_000)]
    blocks = list(zip(names, [None, *names], strict=False))
    chance.shuffle(blocks)
    found = recovered((ONE, blocks))
    [chains] = chains_of(found)
    assert hashes_of(chains) == names
