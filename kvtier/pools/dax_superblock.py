"""Superblock of a dax device: that it is kvtier's, and who has it now; pure.

It fills the first 4 KiB; slabs begin at the device's alignment behind it. Nothing of a device is
read again by a later life of the daemon, since such memory forgets when power goes: the superblock
only tells our devices from somebody else's.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"kvtierDX"
FORMAT_VERSION = 1
SUPERBLOCK_BYTES = 4096

# magic, version, zero, alignment, generation, device bytes, slab bytes.
_FIELDS = struct.Struct("<8sHHIQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class DaxSuperblock:
    """What is written when a pool takes the device."""

    generation: int
    device_bytes: int
    align_bytes: int
    slab_bytes: int  # 0: formatted, and not used yet.
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        body = _FIELDS.pack(
            MAGIC,
            self.version,
            0,
            self.align_bytes,
            self.generation,
            self.device_bytes,
            self.slab_bytes,
        ).ljust(SUPERBLOCK_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def parse_dax_superblock(raw: bytes) -> DaxSuperblock | None:
    """None when it is no superblock, or not a whole one."""
    if len(raw) != SUPERBLOCK_BYTES or not raw.startswith(MAGIC):
        return None
    body, (crc,) = raw[: -_CRC.size], _CRC.unpack(raw[-_CRC.size :])
    if zlib.crc32(body) != crc:
        return None
    _, version, _, align_bytes, generation, device_bytes, slab_bytes = _FIELDS.unpack_from(raw)
    return DaxSuperblock(generation, device_bytes, align_bytes, slab_bytes, version)
