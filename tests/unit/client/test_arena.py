"""What an arena says before anything is mapped; and slots in segments of the CXL tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.client.arena import Arena, ArenaTable
from kvtier.client.codec import lease_of
from kvtier.client.segments import file_length
from kvtier.client.values import DIRECT_SLOTS, Namespace, NamespaceState, SessionRef
from kvtier.errors import BadFrame, StaleSlot
from kvtier.io.memory import create_memfd
from kvtier.memory import Mapping
from kvtier.namespace import NamespaceSpec
from kvtier.v1 import kvtier_pb2 as pb

SPEC = NamespaceSpec("m", "v1", "bf16", "LBHD", block_tokens=16, shard_bytes=4096)
SESSION = SessionRef(generation=7, session_id=1)


def test_a_miss_has_no_views_even_where_no_slab_is_mapped() -> None:
    table = ArenaTable()
    table.enter_generation(7)
    arena = Arena(table, Namespace(SPEC, about=1), 0)
    assert arena.views([], SESSION) == []
    with arena.hold([], SESSION) as views:
        assert views == []
    with pytest.raises(StaleSlot):
        arena.view(0, SESSION)


# ----------------------------------------------------------------------------------------- segments

SEGMENT_BYTES = 2 << 20
ROW_COUNT_MAX = 64
SHARDED = replace(SPEC, shard_bytes=5000, shard_count=2)
STRIDE = 8192


def opened() -> Namespace:
    namespace = Namespace(SHARDED, about=1)
    namespace.state = NamespaceState(
        namespace_id=3,
        fingerprint=b"f",
        epoch=1,
        slot_bytes=STRIDE,
        session=SESSION,
        token=b"t",
        segment_shard_bytes=STRIDE,
    )
    return namespace


@pytest.fixture
def segment_file() -> Iterator[int]:
    """Two segments; each page holds its number."""
    fd = create_memfd("segments", 2 * SEGMENT_BYTES)
    mapping = Mapping(fd, 2 * SEGMENT_BYTES)
    pages = mapping.array.reshape(-1, 4096)
    pages[:] = (np.arange(len(pages)) % 251).astype(np.uint8)[:, None]
    yield fd
    os.close(fd)


def offer(segment: int, **parts: int) -> pb.SegmentOffered:
    whole = {"offset": segment * SEGMENT_BYTES, "length": SEGMENT_BYTES} | parts
    return pb.SegmentOffered(segment=segment, row_count_max=ROW_COUNT_MAX, **whole)


def table_with(fd: int, *segments: int) -> ArenaTable:
    table = ArenaTable()
    table.enter_generation(7)
    for segment in segments:
        table.add_segment(offer(segment), fd, SESSION)
    return table


def test_shards_of_a_block_lie_side_by_side_in_its_slot(segment_file: int) -> None:
    table = table_with(segment_file, 0, 1)
    for shard in (0, 1):
        slots = [DIRECT_SLOTS + ROW_COUNT_MAX + 5, DIRECT_SLOTS + 2]
        views = Arena(table, opened(), shard).views(slots, SESSION)
        firsts = [SEGMENT_BYTES + (5 * 2 + shard) * STRIDE, (2 * 2 + shard) * STRIDE]
        assert [view[0] for view in views] == [first // 4096 % 251 for first in firsts]
        assert {len(view) for view in views} == {SHARDED.shard_bytes}


def test_a_segment_can_be_read_only(segment_file: int) -> None:
    view = Arena(table_with(segment_file, 0), opened(), 0).view(DIRECT_SLOTS, SESSION)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_descriptor_for_reading_is_enough(segment_file: int) -> None:
    fd = os.open(f"/proc/self/fd/{segment_file}", os.O_RDONLY)
    table = table_with(fd, 1)
    os.close(fd)
    assert len(Arena(table, opened(), 0).view(DIRECT_SLOTS + ROW_COUNT_MAX, SESSION)) == 5000


@pytest.mark.parametrize("slot", [ROW_COUNT_MAX, 2 * ROW_COUNT_MAX - 1])
def test_slots_of_segments_not_mapped_are_refused(segment_file: int, slot: int) -> None:
    arena = Arena(table_with(segment_file, 0), opened(), 0)
    with pytest.raises(StaleSlot):
        arena.view(DIRECT_SLOTS + slot, SESSION)
    with pytest.raises(StaleSlot):
        Arena(table_with(segment_file), opened(), 0).view(DIRECT_SLOTS, SESSION)


def test_a_slot_beyond_its_segment_is_refused(segment_file: int) -> None:
    big = opened()
    assert big.state is not None
    big.state = replace(big.state, segment_shard_bytes=SEGMENT_BYTES // 2)
    arena = Arena(table_with(segment_file, 0), big, 0)
    assert len(arena.view(DIRECT_SLOTS, SESSION)) == 5000
    with pytest.raises(StaleSlot):
        arena.view(DIRECT_SLOTS + 1, SESSION)


def test_segments_end_with_the_session_they_were_offered_to(segment_file: int) -> None:
    table = table_with(segment_file, 0)
    with Arena(table, opened(), 0).hold([DIRECT_SLOTS], SESSION) as views:
        table.refuse(SESSION)
        table.void_all()
        assert not table.wait_quiet(SESSION, 0.05), "a copy from it is under way"
        assert views[0][0] == 0
        del views[:]
    assert table.wait_quiet(SESSION, 1.0)
    assert table.take_unmapped(SESSION) == [], "it was never to be given back"
    with pytest.raises(StaleSlot):
        Arena(table, opened(), 0).view(DIRECT_SLOTS, SESSION)


@pytest.mark.parametrize("parts", [{"length": 3 * SEGMENT_BYTES}, {"length": 0}, {"offset": 100}])
def test_offers_that_do_not_fit_their_file_are_refused(
    segment_file: int, parts: dict[str, int]
) -> None:
    table = table_with(segment_file)
    with pytest.raises(BadFrame):
        table.add_segment(offer(0, **parts), segment_file, SESSION)


def test_a_segment_is_offered_once(segment_file: int) -> None:
    with pytest.raises(BadFrame, match="twice"):
        table_with(segment_file, 0, 0)


def test_who_pins_memory_for_a_device_maps_no_segment(segment_file: int) -> None:
    class Pins:
        def add(self, address: int, length_bytes: int) -> None: ...

        def give_up(self, address: int) -> bool:
            return True

    table = table_with(segment_file)
    table.set_pins(Pins())
    with pytest.raises(OSError, match="not pinned"):
        table.add_segment(offer(0), segment_file, SESSION)


def test_a_device_tells_its_length_in_sysfs_only(tmp_path: Path) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        number = os.fstat(fd).st_rdev
        folder = tmp_path / f"dev/char/{os.major(number)}:{os.minor(number)}"
        with pytest.raises(OSError, match="No such file"):
            file_length(fd, tmp_path)
        folder.mkdir(parents=True)
        (folder / "size").write_text("1073741824\n")
        assert file_length(fd, tmp_path) == 1 << 30
    finally:
        os.close(fd)


def test_a_lease_numbers_slots_in_segments_from_their_own_first_number_on() -> None:
    ready = pb.AcquireReady(lease_id=1, leased_count=3, slots=[7, 7, 8], slot_tiers=b"\0\1\1")
    assert lease_of(ready, SESSION).slots.tolist() == [7, DIRECT_SLOTS + 7, DIRECT_SLOTS + 8]
    plain = pb.AcquireReady(lease_id=1, leased_count=2, slots=[7, 8])
    assert lease_of(plain, SESSION).slots.tolist() == [7, 8]
    for tiers in (b"\0", b"\0\1\2"):
        ready.slot_tiers = tiers
        with pytest.raises(BadFrame):
            lease_of(ready, SESSION)
