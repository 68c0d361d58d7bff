"""Reads traces of which requests share which blocks; the form is in benchmarks/traces/README.md."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    tenant: int = 0


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
    header, block_tokens, unit = _header(path, lines, "global")
    found = []
    for number, line in lines:
        with _named(path, number):
            chain = _expanded(line["b"])[: int(line["in"]) // block_tokens]
            at = float(line["t"]) * unit
            found.append(TracedRequest(at, int(line["in"]), int(line["out"]), chain))
    found.sort(key=lambda one: one.at)
    return numbered(str(header.get("name", path.stem)), block_tokens, found)


def read_sessions(
    path: Path, block_tokens: int, span_seconds: float, *, seed: int, every: int = 1
) -> Trace:
    """Sessions that have no common clock, laid on one: each begins at a drawn time of the span.

    `block_tokens`: a multiple of the file's own. `every`: only each n-th session. Raises
    BadRequest like `read_trace`.
    """
    lines = _lines(path)
    header, own_tokens, unit = _header(path, lines, "session")
    if block_tokens % own_tokens:
        raise BadRequest(
            f"blocks of {block_tokens} tokens: {path} needs a multiple of {own_tokens}"
        )
    step = block_tokens // own_tokens
    chance = np.random.default_rng(seed)
    found, first = [], 0
    for number, line in lines:
        if number % every:
            continue
        with _named(path, number):
            begin = float(chance.uniform(0.0, span_seconds))
            last = first
            for at, tokens_in, tokens_out, *_, runs in line["r"]:
                # A larger block is known by the hash that it ends with.
                chain = _expanded(runs)[: int(tokens_in) // own_tokens][step - 1 :: step] + first
                last = max(last, int(chain.max(initial=0)))
                one = TracedRequest(begin + at * unit, int(tokens_in), int(tokens_out), chain)
                found.append(one)
            first = last + 1
    found.sort(key=lambda one: one.at)
    return numbered(str(header.get("name", path.stem)), block_tokens, found)


def scope_of(path: Path) -> str:
    """`global`, or `session`; what else its header says is not looked at."""
    try:
        _, header = next(_lines(path))
    except StopIteration:
        raise BadRequest(f"{path} is empty: a trace begins with its header") from None
    return str(header.get("scope"))


def between(trace: Trace, begin: float, end: float) -> Trace:
    """The requests of some seconds, from second 0 on."""
    mine = [replace(one, at=one.at - begin) for one in trace.requests if begin <= one.at < end]
    return numbered(trace.name, trace.block_tokens, mine)


def mixed(name: str, traces: Sequence[Trace]) -> Trace:
    """Several tenants that share no block."""
    if len({one.block_tokens for one in traces}) != 1:
        raise BadRequest("traces with blocks of different sizes cannot share a cache")
    found, first = [], 0
    for tenant, trace in enumerate(traces):
        shift = np.int32(first)
        found += [replace(one, blocks=one.blocks + shift, tenant=tenant) for one in trace.requests]
        first += trace.unique_count
    found.sort(key=lambda one: one.at)
    return numbered(name, traces[0].block_tokens, found)


def _header(
    path: Path, lines: Iterator[tuple[int, dict[str, Any]]], scope: str
) -> tuple[dict[str, Any], int, float]:
    """The header, how many tokens a block has, and how many seconds a unit of time."""
    try:
        number, header = next(lines)
    except StopIteration:
        raise BadRequest(f"{path} is empty: a trace begins with its header") from None
    with _named(path, number):
        if header["kvtrace"] != FORMAT:
            raise BadRequest(f"a trace of form {header['kvtrace']}: this reads form {FORMAT}")
        if header.get("scope") != scope:
            raise BadRequest(f"its blocks are numbered by {header.get('scope')}, not by {scope}")
        block_tokens, unit = int(header["block_tokens"]), _SECONDS_IN[header["time_unit"]]
        if block_tokens < 1:
            raise BadRequest(f"blocks of {block_tokens} tokens")
    return header, block_tokens, unit


def numbered(name: str, block_tokens: int, requests: list[TracedRequest]) -> Trace:
    """A trace of these, with blocks numbered anew. Raises BadRequest where one has two parents."""
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
        renumbered.append(replace(one, blocks=mine))
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
        if isinstance(error, RecursionError):
            raise BadRequest(f"{self._where}: its values are nested too deep") from None
        if isinstance(error, BadRequest | TypeError | ValueError | OverflowError):
            raise BadRequest(f"{self._where}: {error}") from None
