"""Block hashes are fixed for all time: routers and stored blocks depend on these very bytes."""

from __future__ import annotations

import pytest

from kvtier.engine.hashing import HashChain, block_hash, encode_cbor, root_hash

ROOT_OF_VLLM = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [  # RFC 8949, appendix A.
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1_000_000, "1a000f4240"),
        (1_000_000_000_000, "1b000000e8d4a51000"),
        (18_446_744_073_709_551_615, "1bffffffffffffffff"),
        (-1, "20"),
        (-1000, "3903e7"),
        (None, "f6"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("ü", "62c3bc"),
        ([], "80"),
        ([1, [2, 3], [4, 5]], "8301820203820405"),
        (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_cbor_is_the_standards_canonical_form(value: object, encoded: str) -> None:
    assert encode_cbor(value).hex() == encoded  # type: ignore[arg-type]


def test_a_bool_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_cbor([True])


def test_root_is_that_of_vllm_for_the_same_seed() -> None:
    assert root_hash("vllm-none-hash").hex() == ROOT_OF_VLLM


def test_chain_vectors() -> None:
    chain = HashChain(seed="vllm-none-hash", block_tokens=4)
    chain.extend([1, 2, 3, 4, 500, 60_000, 7, 8, 9])
    assert [block.hex() for block in chain.hashes] == VECTORS


def test_salted_chain_vectors() -> None:
    chain = HashChain(seed="vllm-none-hash", block_tokens=4, cache_salt="tenant")
    chain.extend([1, 2, 3, 4, 500, 60_000, 7, 8, 9])
    assert [block.hex() for block in chain.hashes] == SALTED_VECTORS


def test_chain_grown_token_by_token_is_the_chain_of_the_whole() -> None:
    tokens = list(range(23))
    grown = HashChain(seed="s", block_tokens=4)
    for count in range(len(tokens) + 1):
        grown.extend(tokens[:count])
    whole = HashChain(seed="s", block_tokens=4)
    whole.extend(tokens)
    assert grown.hashes == whole.hashes
    assert len(whole.hashes) == 5


def test_every_part_changes_the_hash() -> None:
    parent = root_hash("s")
    base = block_hash(parent, [1, 2])
    others = {
        block_hash(root_hash("t"), [1, 2]),
        block_hash(parent, [2, 1]),
        block_hash(parent, [1, 2], [["cache_salt", "x"]]),
        block_hash(parent, [1, 2, 0]),
    }
    assert base not in others
    assert len(others) == 4


VECTORS = [
    "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
    "4909cc6f1d5c71dbccefc7ed9caa905dad6a5606fd0f6c3e91c6de127516678b",
]
SALTED_VECTORS = [
    "bad43dbd2bcbb1ecd06a96c90984418cf236a558165eec30d09d81875e9506f6",
    "7749349c61011d1450e948376e6fef00ac4caf5f67d204f77e3505585ec83ae4",
]
