"""While large bytes move in a thread, the event loop's thread runs: nothing holds the GIL.

One operation of 256 MiB each, so that one that kept the GIL would stop the ticker from its start
to its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.io.checksum import block_checksum
from kvtier.io.copy import copy_batch, copy_summed, read_pieces, write_piece
from kvtier.io.memory import MADV_POPULATE_WRITE, create_memfd
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.memory import Mapping
from kvtier.pools.key_file import Key
from kvtier.pools.sealing import SealedPlace, Sealer
from kvtier.pools.slabs import PageKind, Slab, populate_slab, punch_slab
from kvtier.types import SlabId

SLAB_BYTES = 256 << 20
TICK_SECONDS = 0.0005
# Of the turns that fit into the operation. A busy machine takes many; a held GIL takes all but
# one at either end.
TURN_SHARE_MIN = 0.05
TURNS_WITHOUT_GIL_MAX = 2


def turns_during(work: Callable[[], object]) -> tuple[int, int]:
    """How often this thread got its turn while `work` ran in another, and how often it wanted."""
    times: list[float] = []

    def run() -> None:
        times.append(time.monotonic())
        work()
        times.append(time.monotonic())

    turns: list[float] = []
    worker = threading.Thread(target=run)
    worker.start()
    while worker.is_alive():
        turns.append(time.monotonic())
        time.sleep(TICK_SECONDS)
    worker.join()
    started, ended = times
    wanted = (ended - started) / TICK_SECONDS
    return sum(started < turn < ended for turn in turns), int(wanted)


def assert_leaves_turns(work: Callable[[], object]) -> None:
    got, wanted = turns_during(work)
    assert got > max(TURNS_WITHOUT_GIL_MAX, TURN_SHARE_MIN * wanted), f"{got} turns of {wanted}"


def make_slab(number: int) -> Slab:
    return populate_slab(SlabId(number), SLAB_BYTES, PageKind.BASE, clock=SystemClock())


@pytest.fixture(scope="module")
def slabs() -> Iterator[list[Slab]]:
    slabs = [make_slab(1), make_slab(2)]
    yield slabs
    for slab in slabs:
        punch_slab(slab)


def test_populating_in_one_call_holds_no_gil() -> None:
    fd = create_memfd("kvtier-test", SLAB_BYTES)
    mapping = Mapping(fd, SLAB_BYTES)
    os.close(fd)
    assert_leaves_turns(lambda: mapping.advise(MADV_POPULATE_WRITE))


@pytest.mark.parametrize("kind", [PageKind.BASE, PageKind.COLLAPSED])
def test_making_a_slab_holds_no_gil(kind: PageKind) -> None:
    made: list[Slab] = []

    def make() -> None:
        made.append(populate_slab(SlabId(3), SLAB_BYTES, kind, clock=SystemClock()))

    assert_leaves_turns(make)
    punch_slab(made[0])


def test_copying_holds_no_gil(slabs: list[Slab]) -> None:
    target, source = (slab.mapping.array for slab in slabs)
    assert_leaves_turns(lambda: copy_batch([target], [source]))


def test_copying_and_summing_holds_no_gil(slabs: list[Slab]) -> None:
    target, source = (slab.mapping.array for slab in slabs)
    assert_leaves_turns(lambda: copy_summed([target], [source], SLAB_BYTES))


def test_a_checksum_holds_no_gil(slabs: list[Slab]) -> None:
    shard = slabs[0].mapping.array
    assert_leaves_turns(lambda: block_checksum([shard]))


@pytest.mark.parametrize("side", ["sealing", "opening"])
def test_a_sealed_block_holds_no_gil(slabs: list[Slab], side: str) -> None:
    layout = SlotLayout(SLAB_BYTES - 4096, 1, is_sealed=True)
    place = SealedPlace(SegmentHeader(0, b"f" * 16, layout, 1, sequence=1, key_id=1), 0)
    sealer = Sealer([Key(1, b"k" * 32)], generation=1)
    shard, sealed = slabs[0].mapping.array[: layout.shard_bytes], slabs[1].mapping.array
    if side == "sealing":
        assert_leaves_turns(lambda: sealer.seal_block(place, [shard], sealed))
        return
    sealer.seal_block(place, [shard], sealed)
    opened: list[bool] = []
    assert_leaves_turns(lambda: opened.append(sealer.open_block(place, sealed, [shard])))
    assert opened == [True]


def test_reading_and_writing_by_value_leaves_turns_to_others(slabs: list[Slab]) -> None:
    source, target = ([slab.mapping.array] for slab in slabs)

    def move() -> None:
        first = 0
        for piece in read_pieces(source):
            write_piece(target, first, piece)
            first += len(piece)

    assert_leaves_turns(move)


def test_this_test_sees_an_operation_that_holds_the_gil(slabs: list[Slab]) -> None:
    target, source = (slab.mapping.array for slab in slabs)
    source[:] = np.uint8(1)

    def assign() -> None:
        target.data[:] = source.data  # A memoryview's assignment keeps the GIL.

    got, _ = turns_during(assign)
    assert got <= TURNS_WITHOUT_GIL_MAX
