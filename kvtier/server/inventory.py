"""An inventory of what is parked: what a later life needs beside slabs and the slot table.

A memfd with two halves, written in turn, so that a writer that dies between any two stores leaves
the half before whole:

    offset  size  field
         0     4  magic, b"KVH1"
         4     4  format version, little-endian like every number here
         8     8  number of the writing; of two sound halves the higher one counts
        16     4  length of the text
        20     4  CRC-32 of bytes 0..19 and the text
        24        text: JSON
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from kvtier.io.memory import create_memfd

MAGIC = b"KVH1"
VERSION = 1
HALF_BYTES = 8 << 20  # Sparse; a slab set takes about 100 bytes, a session 200.
_HEAD = struct.Struct("<4sIQI")
_CRC = struct.Struct("<I")
_TEXT_AT = _HEAD.size + _CRC.size
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParkedSlab:
    """A slab; it is parked under its name."""

    name: str
    slab: int
    page_kind: str
    huge_bytes: int = 0
    node: int | None = None


@dataclass(frozen=True, slots=True)
class ParkedSet:
    """A slab set."""

    fingerprint: str  # Hexadecimal, like all bytes here.
    slabs: tuple[ParkedSlab, ...]
    slot_first: int
    slot_count: int
    slot_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class ParkedSession:
    """A session that somebody may still touch memory under."""

    session: int
    engine: str
    role: str
    shards: tuple[int, ...]
    by_value: bool
    process: int  # Sessions of one process have the same number here.
    state: str  # Of the process: a name of core's ProcessState.
    client: str = ""
    token: str = ""  # Empty: its client will never name it again.
    replaces: int = 0
    replaced_by: int = 0
    pidfd: str = ""  # The name that its process is parked under.
    tenant: str = ""
    uid: int = -1  # Of its user; -1 where nobody could tell.


@dataclass(frozen=True, slots=True)
class Inventory:
    generation: int  # 0: the writer has given up to keep anything.
    table_version: int
    slot_next: int
    sets: tuple[ParkedSet, ...] = ()
    table: str = ""  # The name that the slot table is parked under.
    slab_next: int = 1
    session_next: int = 1
    tries: int = 0  # Lives in a row that took it over and ended soon after, out of order.
    life: int = 0  # How often this memory has been taken over.
    hold_seconds: float = 0.0  # How long a lease of this life runs at most.
    namespaces: tuple[str, ...] = ()  # Canonical JSON of their facts, in the order of their ids.
    sessions: tuple[ParkedSession, ...] = ()


class InventoryFile:
    """The memfd; one process writes."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: that of the life before, which is gone on with; it is ours then."""
        self.fd = create_memfd("kvtier-inventory", 2 * HALF_BYTES) if fd is None else fd
        # Of what is in the inventory, by its id: thousands of sets stay as they are.
        self._texts: dict[int, tuple[object, str]] = {}
        found = _newest(self.fd)
        self._number = 0 if found is None else found[0]

    def write(self, inventory: Inventory) -> None:
        """When this returns the new one counts; until then the old one does."""
        text = self._text(inventory).encode()
        assert len(text) <= HALF_BYTES - _TEXT_AT, "the inventory has outgrown its half"
        self._number += 1
        head = _HEAD.pack(MAGIC, VERSION, self._number, len(text))
        crc = _CRC.pack(zlib.crc32(text, zlib.crc32(head)))
        os.pwrite(self.fd, head + crc + text, self._number % 2 * HALF_BYTES)

    def _text(self, inventory: Inventory) -> str:
        """What `json.dumps(asdict(inventory))` means."""
        parts: dict[str, tuple[Any, ...]] = {
            "sets": inventory.sets,
            "sessions": inventory.sessions,
        }
        texts = {
            id(one): self._texts.get(id(one)) or (one, json.dumps(asdict(one)))
            for ones in parts.values()
            for one in ones
        }
        self._texts = texts
        rest = json.dumps(asdict(replace(inventory, sets=(), sessions=())))
        for name, ones in parts.items():
            whole = ", ".join(texts[id(one)][1] for one in ones)
            rest = rest.replace(f'"{name}": []', f'"{name}": [{whole}]', 1)
        return rest

    def close(self) -> None:
        os.close(self.fd)


def read_inventory(fd: int) -> Inventory | str:
    """The newest one that is whole, or why there is none that could be believed."""
    try:
        found = _newest(fd)
    except OSError as error:
        return f"the inventory cannot be read: {error}"
    if found is None:
        return "the inventory is torn, or none"
    _, version, text = found
    if version != VERSION:
        return f"the inventory has version {version}, this daemon reads version {VERSION}"
    try:
        return _inventory(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"the inventory cannot be understood: {error!r}"


def _inventory(found: dict[str, Any]) -> Inventory:
    sets = tuple(
        replace(
            _known(ParkedSet, one), slabs=tuple(_known(ParkedSlab, slab) for slab in one["slabs"])
        )
        for one in found["sets"]
    )
    sessions = tuple(
        replace(_known(ParkedSession, one), shards=tuple(one["shards"]))
        for one in found.get("sessions", ())
    )
    namespaces = tuple(found.get("namespaces", ()))
    return replace(_known(Inventory, found), sets=sets, sessions=sessions, namespaces=namespaces)


def _known(kind: type[T], found: dict[str, Any]) -> T:
    """Another build may have written more than this one knows, or left out what is newer."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # A dataclass.
    return kind(**{name: value for name, value in found.items() if name in names})


def _newest(fd: int) -> tuple[int, int, bytes] | None:
    halves = [half for at in range(2) if (half := _read_half(fd, at * HALF_BYTES)) is not None]
    return max(halves, default=None)


def _read_half(fd: int, offset: int) -> tuple[int, int, bytes] | None:
    """(number, version, text), or None for anything that is not whole."""
    head = os.pread(fd, _TEXT_AT, offset)
    if len(head) < _TEXT_AT:
        return None
    magic, version, number, length = _HEAD.unpack_from(head)
    (crc,) = _CRC.unpack_from(head, _HEAD.size)
    if magic != MAGIC or length > HALF_BYTES - _TEXT_AT:
        return None
    text = os.pread(fd, length, offset + _TEXT_AT)
    if zlib.crc32(text, zlib.crc32(head[: _HEAD.size])) != crc:
        return None
    return number, version, text
