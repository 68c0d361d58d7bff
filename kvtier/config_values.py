"""What a single option may be: one small class a kind, with its check and its words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvtier.config_address import split_address
from kvtier.errors import ConfigError

T = TypeVar("T")

AUTO = -1
"""Stands for `auto` in a size: the daemon works it out when it starts."""

ANY_NODE = -1
"""Stands for `any`, or `none`, where a NUMA node may be named."""

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_RATES = {"MB/s": 1e6, "GB/s": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
_WITH_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Kind(Protocol):
    """Checks one option's value."""

    def check(self, name: str, value: object) -> object:
        """The value as the dataclass holds it; raises ConfigError that names the option."""
        ...

    def from_text(self, text: str) -> object:
        """The TOML value that a text on the command line stands for."""
        ...

    def describe(self) -> str: ...

    def show(self, value: object) -> str: ...


def option(default: T, kind: Kind, text: str) -> T:
    """One option: its default, what it may be, and the sentence docs/configuration.md prints."""
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""

    low: int
    high: int

    def check(self, name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}: it must be a whole number")
        return _in_range(name, value, self.low, self.high)

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"-?\d+", text) else text

    def describe(self) -> str:
        return f"{self.low} to {self.high}"

    def show(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number with a fraction."""

    low: float
    high: float
    unit = ""

    def check(self, name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}: it must be a number")
        return _in_range(name, float(value), self.low, self.high)

    def from_text(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    def describe(self) -> str:
        return f"{self.low:g} to {self.high:g}{self.unit}"

    def show(self, value: object) -> str:
        return str(value)


class Seconds(Number):
    """A duration."""

    __slots__ = ()
    unit = " s"


class Fraction(Number):
    """A share."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a whole number, or a text such as "4GiB"."""

    low: int
    high: int
    auto: bool = False

    def check(self, name: str, value: object) -> object:
        if self.auto and value in ("auto", AUTO):
            return AUTO
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigError(f'{name} is {value!r}: it must be a size such as "4GiB"')
        count = value if isinstance(value, int) else _parse_size(name, value)
        if not self.low <= count <= self.high:
            raise ConfigError(f"{name} is {value}: it may be {self.describe()}")
        return count

    def from_text(self, text: str) -> object:
        return text

    def describe(self) -> str:
        bounds = f"{format_bytes(self.low)} to {format_bytes(self.high)}"
        return f"auto, or {bounds}" if self.auto else bounds

    def show(self, value: object) -> str:
        return "auto" if value == AUTO else format_bytes(int(str(value)))


@dataclass(frozen=True, slots=True)
class NodeNumbers:
    """A list of NUMA nodes; on the command line with commas between them."""

    high: int = 1023

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is {value!r}: it must be a list such as [0, 1]")
        for node in value:
            if isinstance(node, bool) or not isinstance(node, int):
                raise ConfigError(f"{name} has {node!r}: a node is a number, 0 to {self.high}")
            _in_range(name, node, 0, self.high)
        if len(set(value)) != len(value):
            raise ConfigError(f"{name} names a node twice: {list(value)}")
        return tuple(value)

    def from_text(self, text: str) -> object:
        parts = text.split(",") if text else []
        return [int(part) if part.isdecimal() else part for part in parts]

    def describe(self) -> str:
        return f"a list of nodes, 0 to {self.high}"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return str(list(value))


@dataclass(frozen=True, slots=True)
class NodeNumber:
    """The number of a NUMA node, or a word for its absence."""

    absent: str = "any"
    high: int = 1023

    def check(self, name: str, value: object) -> object:
        if value in (self.absent, ANY_NODE):
            return ANY_NODE
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}: it may be {self.describe()}")
        return _in_range(name, value, 0, self.high)

    def from_text(self, text: str) -> object:
        return int(text) if text.isdecimal() else text

    def describe(self) -> str:
        return f"{self.absent}, or 0 to {self.high}"

    def show(self, value: object) -> str:
        return self.absent if value == ANY_NODE else str(value)


@dataclass(frozen=True, slots=True)
class Switch:
    """true or false."""

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: it may be true or false")
        return value

    def from_text(self, text: str) -> object:
        return {"true": True, "false": False}.get(text, text)

    def describe(self) -> str:
        return "true, false"

    def show(self, value: object) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Emulation:
    """How fast a tier is to seem."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class EmulationValue:
    """A bandwidth and a latency, as a table; on the command line with a comma between them."""

    def check(self, name: str, value: object) -> object:
        if value is None or value == "off":
            return None
        if not isinstance(value, dict) or not {"bandwidth"} <= set(value) <= {
            "bandwidth",
            "latency",
        }:
            raise ConfigError(f"{name} is {value!r}: it may be {self.describe()}")
        rate = _with_unit(f"{name}.bandwidth", value["bandwidth"], _RATES)
        latency = _with_unit(f"{name}.latency", value.get("latency", "0ns"), _TIMES)
        _in_range(f"{name}.bandwidth", rate, 1e6, 1e12)
        _in_range(f"{name}.latency", latency, 0.0, 1.0)
        return Emulation(rate, latency)

    def from_text(self, text: str) -> object:
        rate, comma, latency = text.partition(",")
        if text == "off":
            return text
        return {"bandwidth": rate, "latency": latency} if comma else {"bandwidth": rate}

    def describe(self) -> str:
        return 'off, or a table such as { bandwidth = "4GB/s", latency = "400ns" }'

    def show(self, value: object) -> str:
        if not isinstance(value, Emulation):
            return "off"
        return f"{value.bytes_per_second / 1e9:g}GB/s, {value.latency_seconds * 1e9:g}ns"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)

    def check(self, name: str, value: object) -> object:
        if value not in self.words:
            raise ConfigError(f"{name} is {value!r}: it may be {self.describe()}")
        return value

    def from_text(self, text: str) -> object:
        return text

    def describe(self) -> str:
        return ", ".join(self.words)

    def show(self, value: object) -> str:
        return str(value)


class AdmissionRule(Choice):
    """How blocks are chosen that may be written down."""

    def __init__(self) -> None:
        super().__init__("forecast", "all", "reused")

    def check(self, name: str, value: object) -> object:
        if value in self.words:
            return value
        raise ConfigError(
            f"{name} is {value!r}: it may be {self.describe()}. None draws lots for each block: "
            "behind a hole a chain is of no use"
        )


@dataclass(frozen=True, slots=True)
class Text:
    """A text of bounded length."""

    chars_max: int

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}: it must be a text in quotes")
        if len(value) > self.chars_max:
            raise ConfigError(
                f"{name} has {len(value)} characters: it may have at most {self.chars_max}"
            )
        return value

    def from_text(self, text: str) -> object:
        return text

    def describe(self) -> str:
        return f"up to {self.chars_max} characters"

    def show(self, value: object) -> str:
        return f'"{value}"'


class PathValue(Text):
    """A path; a leading ~ is the user's home."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(4096)

    def describe(self) -> str:
        return "a path"


@dataclass(frozen=True, slots=True)
class Paths:
    """A list of paths; on the command line with commas between them."""

    count_max: int

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f'{name} is {value!r}: it must be a list such as ["/dev/nvme1n1"]')
        if len(value) > self.count_max:
            raise ConfigError(
                f"{name} has {len(value)} paths: it may have at most {self.count_max}"
            )
        kind = PathValue()
        for path in value:
            if kind.check(name, path) == "":
                raise ConfigError(f"{name} has an empty path: leave it out")
        return tuple(value)

    def from_text(self, text: str) -> object:
        return text.split(",") if text else []

    def describe(self) -> str:
        return f"a list of up to {self.count_max} paths"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return f"[{', '.join(repr(path) for path in value)}]"


@dataclass(frozen=True, slots=True)
class Names:
    """A list of names; on the command line with commas between them."""

    what: str
    count_max: int = 256

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ConfigError(f'{name} is {value!r}: it must be a list such as ["one", "other"]')
        if not all(isinstance(one, str) and 1 <= len(one) <= 256 for one in value):
            raise ConfigError(f"{name} has a name that is empty, too long, or no text")
        if len(value) > self.count_max:
            raise ConfigError(
                f"{name} has {len(value)} names: it may have at most {self.count_max}"
            )
        return tuple(value)

    def from_text(self, text: str) -> object:
        return text.split(",") if text else []

    def describe(self) -> str:
        return f"a list of {self.what}"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return str(list(value))


@dataclass(frozen=True, slots=True)
class Addresses:
    """A list of other machines' addresses; on the command line with commas between them."""

    count_max: int

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, list | tuple):  # Not shown: it may hold a password.
            raise ConfigError(f'{name} must be a list such as ["10.0.0.1:6379"]')
        if len(value) > self.count_max:
            raise ConfigError(
                f"{name} has {len(value)} addresses: it may have at most {self.count_max}"
            )
        for address in value:
            split_remote_address(name, address)
        if len(set(value)) != len(value):
            raise ConfigError(f"{name} names an address twice: {', '.join(value)}")
        return tuple(value)

    def from_text(self, text: str) -> object:
        return text.split(",") if text else []

    def describe(self) -> str:
        return f"a list of up to {self.count_max} addresses with ports"

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return f"[{', '.join(repr(address) for address in value)}]"


def split_remote_address(name: str, value: object) -> tuple[str, int]:
    """Host and port of "10.0.0.1:6379" or "[fd00::1]:6379": of one that we connect to."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} has {value!r}: write HOST:PORT in quotes")
    if "@" in value or "://" in value:  # Not shown: it may hold a password.
        raise ConfigError(f"{name} has an address with a scheme or a user: write HOST:PORT alone")
    host, port = split_address(name, value)
    if not host or not 1 <= port <= 65535:
        raise ConfigError(f"{name} has {value!r}: write HOST:PORT, the port 1 to 65535")
    return host, port


def format_bytes(count: int) -> str:
    """The largest unit that divides it: 64MiB, 1GiB, 4095B."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return f"{count}B"


def _parse_size(name: str, text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(
            f"{name} is {text!r}: it must be a size such as 4GiB (units: KiB, MiB, GiB, TiB)"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def _with_unit(name: str, value: object, units: Mapping[str, float]) -> float:
    """ "4GB/s" or "400ns"; whole and broken numbers."""
    found = _WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in units:
        raise ConfigError(f"{name} is {value!r}: write a number with its unit ({', '.join(units)})")
    return float(found[1]) * units[found[2]]


def _in_range(name: str, value: int | float, low: float, high: float) -> int | float:
    # Written so that NaN fails too.
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: it may be {low:g} to {high:g}")
    return value
