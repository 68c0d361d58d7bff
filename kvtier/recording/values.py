"""Events and instructions as bytes, and events back from bytes.

Each value is a byte that says what it is, then what it takes; docs/simulator.md has the table.
Nothing that is read can make anything but these values. Block hashes are salted as they are
written; in events each is written out once a file, and has a number from then on, so that a prefix
that comes again takes a few bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.salting import salted
from kvtier.errors import BadRequest
from kvtier.layout import SegmentHeader, SlotLayout
from kvtier.types import CommitOutcome, Cut, NamespaceId, PackedHashes, RemovedFor, Role, TierName

NONE, FALSE, TRUE, INTEGER, FLOAT, BYTES, TEXT, LIST, TUPLE, ARRAY = range(10)
HASH, HASH_LIST, HASHES_PACKED, ENUM, OBJECT = range(10, 15)

ENUMS: tuple[type[Enum], ...] = (
    *(TierName, Role, Cut, RemovedFor, CommitOutcome, ev.TransferOutcome),
)
EVENTS: tuple[type, ...] = (*get_args(ev.Event), SegmentHeader, SlotLayout)
INSTRUCTIONS: tuple[type, ...] = tuple(get_args(ins.Instruction))
_CLASSES = {one: number for number, one in enumerate((*EVENTS, *INSTRUCTIONS))}
_ENUMS = {one: number for number, one in enumerate(ENUMS)}
_FIELDS = {one: tuple(field.name for field in fields(one)) for one in _CLASSES}
_FLOAT = struct.Struct("<d")
# An array is longer than any event's only where the bytes are no recording.
_COUNT_MAX = 1 << 28
_NUMBER_BITS_MAX = 1024


def forms() -> list[list[Any]]:
    """What events and their enums are made of, to tell a recording of another version."""
    return [
        *([one.__name__, *_FIELDS[one]] for one in EVENTS),
        *([one.__name__, *one.__members__] for one in ENUMS),
    ]


class Names:
    """Of the hashes in one file: the number of each, and its salted form by number."""

    def __init__(self, salt: bytes = b"") -> None:
        self._salt = salt
        self._numbers: dict[bytes, int] = {}
        self.salted: list[bytes] = []

    def __len__(self) -> int:
        return len(self.salted)

    def number(self, block: bytes) -> int:
        found = self._numbers.get(block)
        if found is None:
            found = self._numbers[block] = len(self.salted)
            self.salted.append(salted(block, self._salt))
        return found

    def numbers(self, hashes: Iterable[bytes]) -> list[int]:
        blocks = list(hashes)
        found = list(map(self._numbers.get, blocks))
        if None not in found:
            return found  # type: ignore[return-value]  # As just seen.
        return [self.number(block) for block in blocks]

    def name(self, block: bytes) -> bytes:
        """Its salted form, whether or not it has a number."""
        found = self._numbers.get(block)
        return salted(block, self._salt) if found is None else self.salted[found]


class Encoder:
    """Appends values to `out`. One for the events of a file (`names_new`: hashes get numbers), and
    one for instructions, of which only a digest is kept."""

    def __init__(
        self, names: Names, hash_bytes: dict[NamespaceId, int], *, names_new: bool
    ) -> None:
        """`hash_bytes` of the namespaces opened so far; is added to."""
        self.out = bytearray()
        self._names, self._names_new, self._hash_bytes = names, names_new, hash_bytes
        self._known_count = 0  # Names that the file has.
        self._put: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self.out.append(NONE),
            bool: lambda value: self.out.append(TRUE if value else FALSE),
            int: self._put_int,
            float: self._put_float,
            bytes: lambda value: self._put_bytes(BYTES, value),
            str: lambda value: self._put_bytes(TEXT, value.encode()),
            list: lambda value: self._put_all(LIST, value),
            tuple: lambda value: self._put_all(TUPLE, value),
            np.ndarray: self._put_array,
            PackedHashes: lambda value: self._put_hashes(HASHES_PACKED, value),
        }

    def put(self, value: object) -> None:
        kind = type(value)
        put = self._put.get(kind)
        if put is None:
            put = self._put[kind] = self._put_for(kind)
        put(value)

    def put_float(self, value: float) -> None:
        """Without saying what it is."""
        self.out += _FLOAT.pack(value)

    def count(self, value: int) -> None:
        """A number from 0 on: seven bits a byte, the lowest first."""
        out = self.out
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)

    def _put_for(self, kind: type) -> Callable[[Any], None]:
        if kind in _CLASSES:
            return self._put_object
        if kind in _ENUMS:
            return self._put_enum
        for known in (np.bool_, np.integer, np.floating):
            if issubclass(kind, known):
                return lambda value: self.put(value.item())
        raise TypeError(f"a {kind.__name__} is in an event: say in recording/values.py what it is")

    def _put_int(self, value: int) -> None:
        self.out.append(INTEGER)
        self.count(2 * value if value >= 0 else -2 * value - 1)

    def _put_float(self, value: float) -> None:
        self.out.append(FLOAT)
        self.out += _FLOAT.pack(value)

    def _put_bytes(self, tag: int, value: bytes) -> None:
        self.out.append(tag)
        self.count(len(value))
        self.out += value

    def _put_all(self, tag: int, values: Sequence[object]) -> None:
        self.out.append(tag)
        self.count(len(values))
        for one in values:
            self.put(one)

    def _put_array(self, values: npt.NDArray[Any]) -> None:
        self._put_bytes(ARRAY, values.dtype.str.encode())
        self._put_bytes(BYTES, np.ascontiguousarray(values).tobytes())

    def _put_enum(self, value: Enum) -> None:
        self.out.append(ENUM)
        self.count(_ENUMS[type(value)])
        self.put(value.value)

    def _put_object(self, value: Any) -> None:
        kind = type(value)
        if kind is ev.NamespaceOpened:
            self._hash_bytes[value.namespace] = value.hash_bytes
        self.out.append(OBJECT)
        self.count(_CLASSES[kind])
        for name in _FIELDS[kind]:
            one = getattr(value, name)
            if name == "hashes":
                self._put_hashes(HASHES_PACKED if type(one) is PackedHashes else HASH_LIST, one)
            elif name == "packed":
                self._put_hashes(HASHES_PACKED, PackedHashes(one, self._size_of(value.namespace)))
            elif name == "parent" and one is not None:
                self.out.append(HASH)
                self._put_names([one])
            elif name == "parents" and type(one) is list:
                self._put_hashes(HASH_LIST, [b"" if block is None else block for block in one])
            elif name in ("work", "result"):
                self.put(None)  # What the core asked for itself; it is computed again.
            else:
                self.put(one)

    def _size_of(self, namespace: NamespaceId) -> int:
        return self._hash_bytes[namespace]

    def _put_hashes(self, tag: int, hashes: Sequence[bytes]) -> None:
        self.out.append(tag)
        self.count(len(hashes))
        if tag == HASHES_PACKED:
            self.count(len(hashes[0]) if len(hashes) else 0)
        self._put_names(hashes)

    def _put_names(self, hashes: Sequence[bytes]) -> None:
        names = self._names
        if not self._names_new:
            self.out += b"".join(map(names.name, hashes))
            return
        numbers = np.array(names.numbers(hashes), dtype=np.int64)
        starts = np.flatnonzero(np.diff(numbers, prepend=-9) != 1)
        counts = np.diff(starts, append=len(numbers))
        for first, count in zip(numbers[starts].tolist(), counts.tolist(), strict=True):
            self.count(first)
            self.count(count)
            fresh = range(max(first, self._known_count), first + count)
            for number in fresh:
                name = names.salted[number]
                self.count(len(name))
                self.out += name
            self._known_count += len(fresh)


class Decoder:
    """Reads what an Encoder has written; raises BadRequest where the bytes make no sense."""

    def __init__(self) -> None:
        self._names: list[bytes] = []
        self._data, self._at = b"", 0

    def feed(self, data: bytes) -> None:
        """The next bytes; those before were read to their end."""
        self._data, self._at = data, 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._data)

    def get(self) -> Any:
        tag = self._byte()
        if tag in (NONE, FALSE, TRUE):
            return (None, False, True)[tag]
        if tag == INTEGER:
            value = self.count()
            return -(value + 1) // 2 if value & 1 else value // 2
        if tag == FLOAT:
            return self.get_float()
        if tag == BYTES:
            return self._take(self.count())
        if tag == TEXT:
            return self._take(self.count()).decode()
        if tag in (LIST, TUPLE):
            values = [self.get() for _ in range(self._length())]
            return values if tag == LIST else tuple(values)
        return self._get_rest(tag)

    def get_float(self) -> float:
        value: float = _FLOAT.unpack(self._take(_FLOAT.size))[0]
        return value

    def count(self) -> int:
        value = shift = 0
        while True:  # Ends: the data does.
            one = self._byte()
            value |= (one & 0x7F) << shift
            if one < 0x80:
                return value
            shift += 7
            if shift > _NUMBER_BITS_MAX:
                raise BadRequest("a number without an end")

    def take(self, length_bytes: int) -> bytes:
        """So many bytes as they are."""
        return self._take(length_bytes)

    def _get_rest(self, tag: int) -> Any:
        if tag == ARRAY:
            kind = np.dtype(self._take(self.count()).decode())
            if kind.kind not in "biuf":
                raise BadRequest(f"an array of {kind}")
            data = self.get()
            if not isinstance(data, bytes):
                raise BadRequest("an array that is no bytes")
            return np.frombuffer(bytearray(data), dtype=kind)
        if tag == HASH:
            return self._get_names(1)[0]
        if tag == HASH_LIST:
            return self._get_names(self._length())
        if tag == HASHES_PACKED:
            count, hash_bytes = self._length(), self.count()
            return PackedHashes(b"".join(self._get_names(count)), max(1, hash_bytes))
        if tag == ENUM:
            return ENUMS[self._below(len(ENUMS))](self.get())
        if tag == OBJECT:
            form = EVENTS[self._below(len(EVENTS))]
            values = {name: self.get() for name in _FIELDS[form]}
            if "packed" in values:
                values["packed"] = values["packed"].packed
            return form(**values)
        raise BadRequest(f"a value of unknown kind {tag}")

    def _get_names(self, count: int) -> list[Any]:
        found: list[bytes] = []
        while len(found) < count:
            first, length = self.count(), self._length()
            while len(self._names) < first + length:
                self._names.append(self._take(self.count()))
            found += self._names[first : first + length]
        if len(found) != count:
            raise BadRequest("a list of hashes of another length than said")
        return found

    def _byte(self) -> int:
        if self._at >= len(self._data):
            raise BadRequest("a value ends too soon")
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, length_bytes: int) -> bytes:
        end = self._at + length_bytes
        if end > len(self._data):
            raise BadRequest("a value ends too soon")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _length(self) -> int:
        return self._below(_COUNT_MAX)

    def _below(self, limit: int) -> int:
        value = self.count()
        if value >= limit:
            raise BadRequest(f"{value} where less than {limit} was expected")
        return value
