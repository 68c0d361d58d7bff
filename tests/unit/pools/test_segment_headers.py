from __future__ import annotations

import numpy as np

from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.pools.segment_headers import HEADER, pack_headers, parse_headers, sound_headers

SMALL = SlotLayout(4096, 1)
LARGE = SlotLayout(9000, 2)
A, B = (bytes([letter]) * 16 for letter in b"ab")


def test_shards_lie_side_by_side_each_padded() -> None:
    assert (LARGE.padded_shard_bytes, LARGE.slot_bytes, LARGE.payload_bytes) == (
        12_288,
        24_576,
        18_000,
    )


def test_headers_are_packed_parsed_and_checked() -> None:
    headers = [
        SegmentHeader(0, A, SlotLayout(4096, 1, is_sealed=True), 8, sequence=1 << 40, key_id=3),
        SegmentHeader(1, B, LARGE, 2, sequence=2),
    ]
    packed = pack_headers(headers, generation=7)
    assert sound_headers(packed, 7).tolist() == [True, True]
    assert parse_headers(packed, range(2)) == headers
    assert sound_headers(packed, 8).tolist() == [False, False]
    packed["sequence"][1] += 1
    assert sound_headers(packed, 7).tolist() == [True, False]
    assert sound_headers(np.zeros(2, HEADER), 0).tolist() == [False, False]
