from __future__ import annotations

import struct

import pytest

from kvtier.io.alignment import parse_statx


def statx(mask: int, memory: int, offset: int) -> bytes:
    raw = bytearray(256)
    struct.pack_into("=I", raw, 0, mask)
    struct.pack_into("=II", raw, 152, memory, offset)
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "alignment"),
    [
        (statx(0x2000, 4, 512), 512),
        (statx(0x27FF, 4096, 512), 4096),
        (statx(0x2000, 0, 0), 0),
        (statx(0x07FF, 4, 512), None),
    ],
)
def test_the_kernel_tells_the_larger_of_two_alignments_none_at_all_or_nothing(
    raw: bytes, alignment: int | None
) -> None:
    assert parse_statx(raw) == alignment
