"""The files of a recording: a header, batches of events, and a mark at an orderly end.

    line      JSON: format, kvtier, recording, number, event_first, manager, policy, forms
    batch     "KVRB", length, CRC-32 of what follows, number of its first event, event count,
              digest of all decisions up to its last event; then the events, by zlib
    end       "KVRE", length, CRC-32; JSON: reason, events

An event is the time it came at, itself (or the number of an event that the core itself wanted
continued), the error it was refused with if it was, and the mark of the decisions after it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from kvtier.core.events import Event
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.errors import BadRequest
from kvtier.recording.decisions import DIGEST_BYTES, MARK_BYTES
from kvtier.recording.values import Decoder, forms
from kvtier.types import TierName
from kvtier.version import VERSION

FORMAT = 1
BATCH, END = b"KVRB", b"KVRE"
_HEAD = struct.Struct("<4sII")
_BATCH = struct.Struct(f"<QI{DIGEST_BYTES}s")
_HEADER_BYTES_MAX = 1 << 20
_BATCH_BYTES_MAX = 1 << 28
# What bytes that stand for no events may raise while they are taken for some.
_NO_EVENTS = (
    *(zlib.error, ValueError, TypeError, AttributeError, OverflowError, RecursionError),
    *(SyntaxError, AssertionError, BadRequest),
)


@dataclass(frozen=True, slots=True)
class Header:
    """What one file begins with. `number`: of the file in its recording, from 0 on."""

    recording: str
    number: int
    event_first: int
    manager: ManagerConfig
    policy: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """One event; `continued` is the number of the Continue that it answers, from 0 on."""

    now: float
    event: Event | None
    continued: int | None
    refused: str | None
    mark: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    event_first: int
    events: list[Recorded]
    digest: bytes


@dataclass(frozen=True, slots=True)
class End:
    reason: str
    events: int


def file_name(recording: str, number: int) -> str:
    return f"kvtier-{recording}-{number:06d}.kvrec"


def header_line(header: Header) -> bytes:
    values = {
        "format": FORMAT,
        "kvtier": VERSION,
        **{name: getattr(header, name) for name in ("recording", "number", "event_first")},
        "policy": header.policy,
        "manager": {**asdict(header.manager), "key_salt": ""},
        "forms": forms(),
    }
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def batch_bytes(
    event_first: int, event_count: int, digest: bytes, events: bytes | bytearray
) -> bytes:
    return _framed(BATCH, _BATCH.pack(event_first, event_count, digest) + zlib.compress(events, 1))


def end_bytes(reason: str, events: int) -> bytes:
    return _framed(END, json.dumps({"reason": reason, "events": events}).encode())


def _framed(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(kind, len(body), zlib.crc32(body)) + body


class RecordingFile:
    """One file, read from its beginning to its end. BadRequest says what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise BadRequest(f"cannot read {path}: {error.strerror}") from None
        self.header = self._read_header()
        self.end: End | None = None
        self._decoder = Decoder()

    def batches(self) -> Iterator[Batch]:
        event_next = self.header.event_first
        while self.end is None:  # Ends: the file does.
            at = self._file.tell()
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise BadRequest(self._broken_off(at, event_next))
            kind, length, check = _HEAD.unpack(head)
            if kind not in (BATCH, END) or length > _BATCH_BYTES_MAX:
                raise BadRequest(self._damaged(at, event_next))
            body = self._file.read(length)
            if len(body) < length:
                raise BadRequest(self._broken_off(at, event_next))
            if zlib.crc32(body) != check:
                raise BadRequest(self._damaged(at, event_next))
            if kind == END:
                self.end = self._end(body)
                return
            batch = self._batch(body)
            if batch.event_first != event_next:
                raise BadRequest(
                    f"{self.path}: event {batch.event_first} follows event {event_next - 1}: "
                    "events are missing"
                )
            event_next += len(batch.events)
            yield batch

    def close(self) -> None:
        self._file.close()

    def _batch(self, body: bytes) -> Batch:
        if len(body) < _BATCH.size:
            raise BadRequest(f"{self.path}: a batch of {len(body)} bytes has no head")
        event_first, event_count, digest = _BATCH.unpack_from(body)
        decoder = self._decoder
        try:
            decoder.feed(_unpacked(body[_BATCH.size :]))
            events = [_recorded(decoder) for _ in range(event_count)]
        except _NO_EVENTS as error:
            raise BadRequest(f"{self.path}: events from {event_first} on: {error}") from None
        return Batch(event_first, events, digest)

    def _end(self, body: bytes) -> End:
        try:
            said = json.loads(body)
            return End(str(said["reason"]), int(said["events"]))
        except (*_NO_EVENTS, KeyError):
            raise BadRequest(f"{self.path}: its end mark is damaged") from None

    def _read_header(self) -> Header:
        line = self._file.readline(_HEADER_BYTES_MAX)
        try:
            values = json.loads(line)
            if values["format"] != FORMAT:
                raise BadRequest(
                    f"{self.path} has format {values['format']}: this kvtier reads {FORMAT}"
                )
            if values["forms"] != forms():
                raise BadRequest(
                    f"{self.path} was recorded by kvtier {values['kvtier']}, whose events differ "
                    f"from those of this one ({VERSION}): replay it with that version"
                )
            return Header(
                recording=str(values["recording"]),
                number=int(values["number"]),
                event_first=int(values["event_first"]),
                manager=_manager_config(values["manager"]),
                policy=str(values["policy"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise BadRequest(
                f"{self.path} is no recording of kvtier, or its header is damaged"
            ) from None

    def _broken_off(self, at: int, event_next: int) -> str:
        return (
            f"{self.path} breaks off at byte {at}, after event {event_next - 1}: it was cut, or "
            "the daemon was killed"
        )

    def _damaged(self, at: int, event_next: int) -> str:
        return (
            f"{self.path} is damaged at byte {at}, after event {event_next - 1}: the checksum of "
            "the next batch differs; copy the file again"
        )


def _unpacked(packed: bytes) -> bytes:
    """What a batch's events take is bounded: a few bytes can stand for gigabytes of zeros."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(packed, _BATCH_BYTES_MAX)
    if not unpacker.eof:
        raise ValueError("they are cut, or too many for one batch")
    return data


def _recorded(decoder: Decoder) -> Recorded:
    now = decoder.get_float()
    found = decoder.get()
    refused = decoder.get()
    is_number = isinstance(found, int)
    return Recorded(
        now,
        None if is_number else found,
        found if is_number else None,
        refused,
        decoder.take(MARK_BYTES),
    )


def _manager_config(values: Mapping[str, Any]) -> ManagerConfig:
    rest = dict(values)
    lower = {
        TierName(name): LowerSettings(**_typed(LowerSettings, one))
        for name, one in rest.pop("lower").items()
    }
    tenants = {name: TenantBudget(**one) for name, one in rest.pop("tenants").items()}
    rest["key_salt"] = b""
    return ManagerConfig(**_typed(ManagerConfig, rest), lower=lower, tenants=tenants)


def _typed(kind: type[LowerSettings | ManagerConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no enums: those are of the kind that the field's default is of."""
    enums = {one.name: type(one.default) for one in fields(kind) if isinstance(one.default, Enum)}
    return {name: enums[name](one) if name in enums else one for name, one in values.items()}
