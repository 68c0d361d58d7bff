"""Block hashes that any router can recompute: SHA-256 over canonical CBOR.

    root         = SHA-256(cbor(seed text))
    hash of block = SHA-256(cbor([hash of the block before or root, [token ids], extra]))

`extra` is null for plain text; the first block of a salted prompt has [["cache_salt", salt]], and
the chain carries it on. Equal to vLLM's `sha256_cbor` for the same seed (0.31 and later for salts).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import TypeAlias

from kvtier.types import BlockHash

CborValue: TypeAlias = "int | bytes | str | Sequence[CborValue] | None"

_MAJOR_UNSIGNED, _MAJOR_NEGATIVE, _MAJOR_BYTES, _MAJOR_TEXT, _MAJOR_ARRAY = range(5)
_NULL = b"\xf6"


def encode_cbor(value: CborValue) -> bytes:
    """Canonical CBOR (RFC 8949 §4.2.1: shortest heads, definite lengths) of the types we hash."""
    if value is None:
        return _NULL
    if isinstance(value, bool):
        raise TypeError("a bool is no part of a block hash")
    if isinstance(value, int):
        return _head(_MAJOR_UNSIGNED, value) if value >= 0 else _head(_MAJOR_NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return _head(_MAJOR_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode("utf-8")
        return _head(_MAJOR_TEXT, len(text)) + text
    return _head(_MAJOR_ARRAY, len(value)) + b"".join([encode_cbor(part) for part in value])


def root_hash(seed: str) -> BlockHash:
    """What stands where the first block's parent would be."""
    return BlockHash(hashlib.sha256(encode_cbor(seed)).digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int], extra: CborValue = None) -> BlockHash:
    """The hash of one full block after `parent`."""
    return BlockHash(hashlib.sha256(encode_cbor([parent, token_ids, extra])).digest())


class HashChain:
    """The hashes of a growing run of tokens, one for each full block."""

    def __init__(self, *, seed: str, block_tokens: int, cache_salt: str | None = None) -> None:
        self._root = root_hash(seed)
        self.block_tokens = block_tokens
        self.cache_salt = cache_salt
        self._first_extra: CborValue = None if cache_salt is None else [["cache_salt", cache_salt]]
        self.hashes: list[BlockHash] = []

    def copy(self) -> HashChain:
        """The same run of tokens so far, that may go on in another way."""
        twin = copy(self)
        twin.hashes = list(self.hashes)
        return twin

    @property
    def is_plain(self) -> bool:
        """Whether tokens alone make the hashes."""
        return self._first_extra is None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks that have become full; `token_ids` are all tokens from the first on."""
        while (len(self.hashes) + 1) * self.block_tokens <= len(token_ids):
            start = len(self.hashes) * self.block_tokens
            tokens = token_ids[start : start + self.block_tokens]
            if self.hashes:
                self.hashes.append(block_hash(self.hashes[-1], tokens))
            else:
                self.hashes.append(block_hash(self._root, tokens, self._first_extra))


def _head(major: int, count: int) -> bytes:
    """The initial byte and the argument of one CBOR item, as short as can be."""
    tag = major << 5
    if count < 24:
        return bytes((tag | count,))
    if count < 1 << 8:
        return bytes((tag | 24, count))
    if count < 1 << 16:
        return bytes((tag | 25,)) + count.to_bytes(2, "big")
    if count < 1 << 32:
        return bytes((tag | 26,)) + count.to_bytes(4, "big")
    return bytes((tag | 27,)) + count.to_bytes(8, "big")
