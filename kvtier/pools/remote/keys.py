"""Keys of values in a remote engine; nothing but these names is ever touched there.

    kvtier1/FINGERPRINT/epoch                  record: the namespace's epoch and its members
    kvtier1/FINGERPRINT/seen/LIFE.EPOCH/MEMBER a daemon has seen this epoch
    kvtier1/FINGERPRINT/EPOCH/HASH             one block

Since the epoch is part of a block's key, a block of a cleared epoch is never even asked for, and
one key has one payload for ever.
"""

from __future__ import annotations

from kvtier.pools.remote.engine import RemoteKey
from kvtier.types import BlockHash

ROOT = "kvtier1"


def block_key(fingerprint: bytes, epoch: int, block: BlockHash) -> RemoteKey:
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/{epoch:08x}/{block.hex()}")


def epoch_key(fingerprint: bytes) -> RemoteKey:
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/epoch")


def namespace_folder(fingerprint: bytes) -> RemoteKey:
    """What begins all keys of the namespace."""
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/")


def epoch_folder(fingerprint: bytes, epoch: int) -> RemoteKey:
    """What begins all keys of its blocks in this epoch."""
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/{epoch:08x}/")


def seen_folder(fingerprint: bytes) -> RemoteKey:
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/seen/")


def acknowledgement_key(fingerprint: bytes, life: int, epoch: int, member: bytes) -> RemoteKey:
    return RemoteKey(f"{ROOT}/{fingerprint.hex()}/seen/{life:016x}.{epoch:08x}/{member.hex()}")
