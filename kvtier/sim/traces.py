"""Reads traces of which requests share which blocks; the form is in benchmarks/traces/README.md."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import BadRequest

FORMAT = 1
BLOCK_NUMBER_MAX = 1 << 31
CHAIN_BLOCKS_MAX = 1 << 20  # Longer than any context window.
_SECONDS_IN = {"ms": 1e-3, "s": 1.0}

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request; `blocks` is its chain, whole blocks only, in chain order."""

    at: float  # Seconds.
    input_tokens: int
    output_tokens: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. Blocks are numbered from 0 without gaps."""

    name: str
    block_tokens: int
    requests: tuple[TracedRequest, ...]
    parent: Blocks  # By block; -1 for the first one of a chain.

    @property
    def unique_count(self) -> int:
        return len(self.parent)

    @property
    def access_count(self) -> int:
        return sum(len(one.blocks) for one in self.requests)


def read_trace(path: Path) -> Trace:
    """Raises BadRequest that names the line and what is wrong with it."""
    lines = _lines(path)
    try:
        number, header = next(lines)
    except StopIteration:
        raise BadRequest(f"{path} is empty: a trace begins with its header") from None
    with _named(path, number):
        if header["kvtrace"] != FORMAT:
            raise BadRequest(f"a trace of form {header['kvtrace']}: this reads form {FORMAT}")
        if header.get("scope") != "global":
            raise BadRequest(f"its blocks are numbered by {header.get('scope')}, not globally")
        block_tokens, unit = int(header["block_tokens"]), _SECONDS_IN[header["time_unit"]]
        if block_tokens < 1:
            raise BadRequest(f"blocks of {block_tokens} tokens")
    found = []
    for number, line in lines:
        with _named(path, number):
            chain = _expanded(line["b"])[: int(line["in"]) // block_tokens]
            at = float(line["t"]) * unit
            found.append(TracedRequest(at, int(line["in"]), int(line["out"]), chain))
    found.sort(key=lambda one: one.at)
    return _renumbered(str(header.get("name", path.stem)), block_tokens, found)


def _renumbered(name: str, block_tokens: int, requests: list[TracedRequest]) -> Trace:
    known, numbers = np.unique(
        np.concatenate([one.blocks for one in requests] or [np.zeros(0, np.int32)]),
        return_inverse=True,
    )
    parent = np.full(len(known), -1, dtype=np.int32)
    seen = np.zeros(len(known), dtype=np.bool_)
    renumbered, start = [], 0
    for one in requests:
        mine = numbers[start : start + len(one.blocks)].astype(np.int32)
        start += len(one.blocks)
        before = np.concatenate([np.full(1, -1, np.int32), mine[:-1]])[: len(mine)]
        strangers = seen[mine] & (parent[mine] != before)
        if strangers.any():
            block = int(known[mine[int(np.flatnonzero(strangers)[0])]])
            raise BadRequest(f"{name}: block {block} has two parents: it cannot stand for a prefix")
        parent[mine], seen[mine] = before, True
        renumbered.append(TracedRequest(one.at, one.input_tokens, one.output_tokens, mine))
    return Trace(name, block_tokens, tuple(renumbered), parent)


def _expanded(runs: list[int]) -> Blocks:
    counts = runs[1::2]
    if len(runs) % 2 or sum(counts) > CHAIN_BLOCKS_MAX or any(count < 0 for count in counts):
        raise BadRequest("its runs of blocks are not pairs of a first number and a count")
    if any(not 0 <= first <= BLOCK_NUMBER_MAX - CHAIN_BLOCKS_MAX for first in runs[::2]):
        raise BadRequest(f"block numbers may be 0 to {BLOCK_NUMBER_MAX - CHAIN_BLOCKS_MAX}")
    pairs = zip(runs[::2], counts, strict=True)
    parts = [np.arange(first, first + count, dtype=np.int32) for first, count in pairs]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number and its object."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                with _named(path, number):
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise BadRequest("it is no JSON object")
                    yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}") from None


class _named:  # noqa: N801  # Used as a function.
    """Whatever is wrong inside is said of this line."""

    def __init__(self, path: Path, number: int) -> None:
        self._where = f"{path}, line {number}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError):
            raise BadRequest(f"{self._where}: {error} is missing or unknown") from None
        if isinstance(error, BadRequest | TypeError | ValueError):
            raise BadRequest(f"{self._where}: {error}") from None
