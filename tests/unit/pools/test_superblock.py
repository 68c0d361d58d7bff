from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.errors import ConfigError
from kvtier.pools.superblock import (
    COPY_OFFSETS,
    FORMAT_VERSION,
    HEADERS_FIRST,
    SUPERBLOCK_BYTES,
    Geometry,
    Superblock,
    assert_readable,
    fitting_geometry,
    newer,
    parse_superblock,
)

GEOMETRY = Geometry(segment_bytes=256 << 20, segment_count=30, row_count_max=4096, path_count=2)
SUPERBLOCK = Superblock(
    pool_id=bytes(range(16)),
    generation=1 << 63,
    geometry=GEOMETRY,
    path_index=1,
    life=3,
    revision=17,
    is_clean=True,
    recency_count=5,
    recency_checksum=(1 << 64) - 1,
)


def test_what_was_packed_is_parsed() -> None:
    packed = SUPERBLOCK.pack()
    assert len(packed) == SUPERBLOCK_BYTES
    assert parse_superblock(packed) == SUPERBLOCK


@pytest.mark.parametrize("place", [0, 8, 100, 2000, SUPERBLOCK_BYTES - 1])
def test_one_wrong_byte_anywhere_makes_it_void(place: int) -> None:
    packed = bytearray(SUPERBLOCK.pack())
    packed[place] ^= 1
    assert parse_superblock(bytes(packed)) is None


def test_the_newer_whole_copy_counts() -> None:
    later = SUPERBLOCK.next_revision(is_clean=False)
    assert newer(SUPERBLOCK, later) == later == newer(later, SUPERBLOCK)
    assert newer(None, SUPERBLOCK) == SUPERBLOCK == newer(SUPERBLOCK, None)
    assert newer(None, None) is None


def test_sequence_numbers_of_a_later_life_are_higher() -> None:
    later = SUPERBLOCK.next_revision(life=4)
    assert later.sequence_first - SUPERBLOCK.sequence_first == 1 << 40
    assert replace(SUPERBLOCK, life=0).sequence_first > 0


def test_areas_follow_one_another_and_end_with_the_capacity() -> None:
    places = [
        COPY_OFFSETS[-1] + SUPERBLOCK_BYTES,
        HEADERS_FIRST,
        GEOMETRY.table_first,
        GEOMETRY.recency_first,
        GEOMETRY.segments_first,
        GEOMETRY.length_bytes,
    ]
    assert places == sorted(places)
    assert GEOMETRY.segments_first % (2 << 20) == 0
    assert GEOMETRY.recency_first - GEOMETRY.table_first == 30 * 4096 * 128


@pytest.mark.parametrize("length_bytes", [(1 << 30) + 5, 8 << 30, 333 << 30, 7 << 40])
@pytest.mark.parametrize("path_count", [1, 3])
@pytest.mark.parametrize("segment_bytes", [64 << 10, 256 << 20])
def test_as_many_segments_as_fit_and_not_one_more(
    length_bytes: int, path_count: int, segment_bytes: int
) -> None:
    geometry = fitting_geometry(length_bytes, path_count=path_count, segment_bytes=segment_bytes)
    assert geometry.length_bytes <= length_bytes
    assert replace(geometry, segment_count=geometry.segment_count + 1).length_bytes > length_bytes


def test_too_little_room_for_a_segment_is_told() -> None:
    with pytest.raises(ConfigError, match="too few for one segment"):
        fitting_geometry(256 << 20, path_count=1)


def test_a_format_is_read_if_its_writer_says_so() -> None:
    assert_readable(SUPERBLOCK, "x")
    later = FORMAT_VERSION + 1
    assert_readable(replace(SUPERBLOCK, version=later, reader_version_min=FORMAT_VERSION), "x")
    with pytest.raises(ConfigError, match=f"x has format version {later}, this kvtier knows"):
        assert_readable(replace(SUPERBLOCK, version=later, reader_version_min=later), "x")
    with pytest.raises(ConfigError):
        assert_readable(replace(SUPERBLOCK, version=0, reader_version_min=0), "x")
