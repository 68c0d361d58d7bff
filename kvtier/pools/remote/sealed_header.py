"""How a sealed value begins; also for those who have no key, nor the package that opens it."""

from __future__ import annotations

from kvtier.memory import Bytes

SEAL_MAGIC = b"KVS1"
SEAL_HEADER_BYTES = 32
TAG_BYTES = 16
SEAL_BYTES = SEAL_HEADER_BYTES + TAG_BYTES


def is_sealed(value: Bytes) -> bool:
    return value[: len(SEAL_MAGIC)].data == SEAL_MAGIC
