"""Reads a GGUF file's metadata and tensors.

The layout is walked here because the `gguf` package's reader makes an array of every one of the
100,000 tokenizer strings, which alone takes 3 seconds; dequantisation is that package's.

    magic "GGUF" · version u32 · tensor count u64 · metadata count u64
    metadata:  name string · type u32 · value
    tensors:   name string · dimension count u32 · dimensions u64, fastest first · type u32 · offset
    padding to `general.alignment`, then the data that the offsets count from
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = "Scalar | list[Scalar]"

ALIGNMENT_DEFAULT = 32
# No model we know has more; a damaged count must not make us read for minutes.
COUNT_MAX = 10_000_000

_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = dict(
    enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d"))
)


class BadModelFile(Exception):
    """Not a GGUF file that we can read: get another one."""


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    byte_count: int


class GgufFile:
    """An open file: `metadata` is read at once, tensors when asked for."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._open()
        except (struct.error, ValueError, IndexError, KeyError, OverflowError) as error:
            raise BadModelFile(f"{path} is damaged: {error}") from error

    def __contains__(self, tensor_name: str) -> bool:
        return tensor_name in self._places

    def integer(self, name: str) -> int:
        """A whole number out of the metadata."""
        value = self._value(name)
        if not isinstance(value, int):
            raise BadModelFile(f"{name} is not a whole number")
        return value

    def number(self, name: str) -> float:
        """Any number out of the metadata."""
        value = self._value(name)
        if not isinstance(value, int | float):
            raise BadModelFile(f"{name} is not a number")
        return float(value)

    def texts(self, name: str) -> list[str]:
        """A list of texts out of the metadata."""
        return [text for text in self._list(name) if isinstance(text, str)]

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers out of the metadata."""
        return [number for number in self._list(name) if isinstance(number, int)]

    def tensor(self, name: str) -> Tensor:
        """One tensor as float32, dequantised if need be."""
        if name not in self._places:
            raise BadModelFile(f"there is no tensor {name}")
        place = self._places[name]
        raw = np.frombuffer(self._data, np.uint8, place.byte_count, place.start)
        values = dequantize(raw, place.kind).reshape(place.shape)
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))

    def _value(self, name: str) -> Value:
        if name not in self.metadata:
            raise BadModelFile(f"there is no metadata {name}")
        return self.metadata[name]

    def _list(self, name: str) -> list[Scalar]:
        value = self._value(name)
        if not isinstance(value, list):
            raise BadModelFile(f"{name} is not a list")
        return value

    def _open(self) -> None:
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        cursor.offset = 4
        version = cursor.number("<I")
        if version != 3:
            raise ValueError(f"it has version {version}, only 3 is known")
        tensor_count, metadata_count = cursor.count(), cursor.count()
        self.metadata: dict[str, Value] = {}
        for _ in range(metadata_count):
            name = cursor.text()
            self.metadata[name] = cursor.value(int(cursor.number("<I")))
        places = [cursor.tensor_place() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        data_start = -(-cursor.offset // alignment) * alignment
        self._places: dict[str, _TensorPlace] = {}
        for name, shape, kind, offset in places:
            place = _place(shape, kind, data_start + offset)
            if place.start + place.byte_count > len(self._data):
                raise ValueError(f"tensor {name} reaches past the end")
            self._places[name] = place


class _Cursor:
    """Reads one thing after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def number(self, form: str) -> int | float:
        value: int | float = struct.unpack_from(form, self._data, self.offset)[0]
        self.offset += struct.calcsize(form)
        return value

    def count(self) -> int:
        count = int(self.number("<Q"))
        if count > COUNT_MAX:
            raise ValueError(f"a count of {count} is out of reason")
        return count

    def text(self) -> str:
        length = self.count()
        self.offset += length
        return self._data[self.offset - length : self.offset].decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind == _ARRAY:
            item_kind, count = int(self.number("<I")), self.count()
            return [self._scalar(item_kind) for _ in range(count)]
        return self._scalar(kind)

    def tensor_place(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.text()
        dimension_count = int(self.number("<I"))
        dimensions = [self.count() for _ in range(dimension_count)]
        kind = GGMLQuantizationType(int(self.number("<I")))
        return name, tuple(reversed(dimensions)), kind, int(self.number("<Q"))

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.text()
        form = _SCALAR_FORMATS.get(kind)
        if not form:
            raise ValueError(f"value type {kind} is unknown")
        return self.number(form)


def _place(shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> _TensorPlace:
    element_count = math.prod(shape)
    run_elements, run_bytes = GGML_QUANT_SIZES[kind]
    if element_count < 1:
        raise ValueError("a tensor has no elements")
    if element_count % run_elements:
        raise ValueError(f"{element_count} elements do not divide into runs of {run_elements}")
    return _TensorPlace(shape, kind, start, element_count // run_elements * run_bytes)
