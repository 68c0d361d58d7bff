"""Values for a remote engine, sealed: encrypted and authenticated with AES-256-GCM.

    offset  size  field
         0     4  magic, b"KVS1"
         4     4  format version, little-endian
         8     8  id of the key
        16    12  nonce, by chance
        28     4  zero
        32     n  the value as frame.py describes it, header included, encrypted
      32+n    16  tag

What is authenticated besides is the whole of that header and what block it is: namespace, epoch,
hash and shape. So whoever can write to the engine can make blocks miss, and cannot make one pass
for another; a value only opens under the name that it was sealed for. Compressed is first, then
encrypted: the cipher's output cannot be.

The keys are those of the NVMe tier's file (`key_file.py`): the first one seals, all of them open.
Each namespace has a key of its own, derived from each of them (HKDF, RFC 5869), so that no 2^32
nonces of chance are ever drawn under one: a namespace that puts 10,000 blocks a second for 5 days
has. With keys, a value without a seal does not count: anybody could have made it.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.memory import Bytes
from kvtier.pools.key_file import SECRET_BYTES, Key
from kvtier.pools.remote.frame import BlockShape, FrameFault
from kvtier.pools.remote.sealed_header import SEAL_HEADER_BYTES, SEAL_MAGIC, TAG_BYTES
from kvtier.types import BlockHash

VERSION = 1
NONCE_BYTES = 12
_HEAD = struct.Struct("<4sIQ12s4x")
assert _HEAD.size == SEAL_HEADER_BYTES
Take = Callable[[int], Bytes]


class ValueSealer:
    """The keys of one namespace. Any thread may seal and open."""

    def __init__(self, keys: Sequence[Key], fingerprint: bytes) -> None:
        """The first key seals."""
        self.key_id = keys[0].id
        self._ciphers = {key.id: AESGCM(_derived(key, fingerprint)) for key in keys}

    def seal(self, frame: Bytes, shape: BlockShape, block: BlockHash, take: Take) -> Bytes:
        """The value to put, in memory of `take`."""
        header = _HEAD.pack(SEAL_MAGIC, VERSION, self.key_id, secrets.token_bytes(NONCE_BYTES))
        out = take(SEAL_HEADER_BYTES + frame.nbytes + TAG_BYTES)
        np.copyto(out[:SEAL_HEADER_BYTES], np.frombuffer(header, np.uint8))
        nonce, facts = _nonce_in(header), _facts(header, shape, block)
        self._ciphers[self.key_id].encrypt_into(
            nonce, frame.data, facts, out[SEAL_HEADER_BYTES:].data
        )
        return out

    def open(
        self, value: Bytes, shape: BlockShape, block: BlockHash, take: Take
    ) -> Bytes | FrameFault:
        """The frame, in memory of `take`; or why it is none of ours."""
        if value.nbytes < SEAL_HEADER_BYTES + TAG_BYTES:
            return FrameFault.SHORT
        header = value[:SEAL_HEADER_BYTES].tobytes()  # gil-ok: 32 bytes.
        magic, version, key_id, nonce = _HEAD.unpack(header)
        if magic != SEAL_MAGIC:
            return FrameFault.UNSEALED
        if version != VERSION:
            return FrameFault.VERSION
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            return FrameFault.KEY
        frame = take(value.nbytes - SEAL_HEADER_BYTES - TAG_BYTES)
        try:
            cipher.decrypt_into(
                nonce, value[SEAL_HEADER_BYTES:].data, _facts(header, shape, block), frame.data
            )
        except InvalidTag:
            return FrameFault.SEAL
        return frame


def _derived(key: Key, fingerprint: bytes) -> bytes:
    return HKDF(SHA256(), SECRET_BYTES, fingerprint, b"kvtier remote 1 values").derive(key.secret)


def _nonce_in(header: bytes) -> bytes:
    nonce: bytes = _HEAD.unpack(header)[3]
    return nonce


def _facts(header: bytes, shape: BlockShape, block: BlockHash) -> bytes:
    """What is authenticated beside the frame."""
    shaped = struct.pack("<IIQB", shape.epoch, shape.shard_count, shape.payload_bytes, len(block))
    return header + shape.fingerprint + shaped + block
