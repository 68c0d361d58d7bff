"""Other names for block hashes, by which nobody finds out what the blocks hold."""

from __future__ import annotations

from hashlib import blake2b

SALT_BYTES = 32


def salted(block: bytes, salt: bytes) -> bytes:
    """A keyed hash (BLAKE2b) of a block's hash, as long as that: whoever guesses a prompt cannot
    see without the salt whether its blocks are there. Without salt it is the hash itself."""
    if not salt or not block:
        return block
    return blake2b(block, key=salt, digest_size=len(block)).digest()
