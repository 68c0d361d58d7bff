from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvtier.cli.file_blocks import (
    HASH_BYTES,
    Receipt,
    blocks_of,
    check_blocks,
    group_count,
    parse_receipt,
    read_receipt,
    spec_of,
)
from kvtier.errors import BadRequest, CorruptReplica

BLOCK = 8


def blocks(content: bytes) -> list[tuple[bytes, bytes, int]]:
    return list(blocks_of(io.BytesIO(content), BLOCK))


def receipt_of(content: bytes) -> Receipt:
    return Receipt("f", "files", BLOCK, len(content), tuple(one[0] for one in blocks(content)))


def test_the_last_block_is_padded_and_its_length_told() -> None:
    found = blocks(b"0123456789")
    assert [block for _, block, _ in found] == [b"01234567", b"89" + bytes(6)]
    assert [used for _, _, used in found] == [8, 2]


def test_an_empty_file_has_no_blocks() -> None:
    assert blocks(b"") == []


def test_a_hash_names_the_whole_prefix() -> None:
    first, second = blocks(b"a" * 16), blocks(b"b" * 8 + b"a" * 8)
    assert first[1][1] == second[1][1], "equal bytes in the second block"
    assert first[1][0] != second[1][0], "after another first block they have another hash"


def test_a_file_that_comes_in_small_pieces_has_the_same_blocks() -> None:
    class Trickle(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            return super().read(min(3, count or 0))

    assert list(blocks_of(Trickle(b"0123456789"), BLOCK)) == blocks(b"0123456789")


def test_a_flipped_bit_does_not_pass_the_check() -> None:
    hashes = [one[0] for one in blocks(b"0123456789")]
    content = [one[1] for one in blocks(b"0123456789")]
    check_blocks(None, hashes, content)
    with pytest.raises(CorruptReplica):
        check_blocks(None, hashes, [content[0], b"88" + bytes(6)])
    with pytest.raises(CorruptReplica):
        check_blocks(None, hashes[1:], content[1:])


def test_a_receipt_survives_json() -> None:
    receipt = receipt_of(b"0123456789")
    assert parse_receipt(json.loads(json.dumps(receipt.to_json()))) == receipt


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", "something else"),
        ("block_bytes", 0),
        ("block_bytes", -8),
        ("file_bytes", 17),
        ("hashes", ["00"]),
        ("hashes", ["zz" * HASH_BYTES] * 2),
        ("hashes", 5),
    ],
)
def test_a_damaged_receipt_is_refused(name: str, value: object) -> None:
    facts = {**receipt_of(b"0123456789").to_json(), name: value}
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_receipt(facts)


def test_other_block_sizes_and_names_are_other_namespaces() -> None:
    spec_of("files", BLOCK).validate()
    fingerprints = {
        spec_of(name, size).fingerprint() for name in ("files", "more") for size in (8, 16)
    }
    assert len(fingerprints) == 4


def test_a_group_has_at_least_one_block() -> None:
    assert group_count(2 << 20) == 32
    assert group_count(1 << 30) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF" + bytes(100), b"plain text", b'{"a": "\xff"}', b"{}", b"{"]
)
def test_a_file_that_is_no_receipt_is_named_as_such(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=f"^{path} is no receipt of `kvtier put`"):
        read_receipt(path)


def test_a_receipt_is_read_as_it_was_printed(tmp_path: Path) -> None:
    receipt = receipt_of(b"0123456789")
    path = tmp_path / "receipt"
    path.write_text("\n" + json.dumps(receipt.to_json(), indent=2))
    assert read_receipt(path) == receipt
