"""Fuzzers: inputs that are nearly right, for as long as the form says.

Each execution has a source of chance of its own, made from the fuzzer's name, the run's seed and
the execution's number: what a failure names is found again with KVTIER_FUZZ_SEED and
KVTIER_FUZZ_FIRST.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from tests.support.forms import is_torture, state_finding

SHORT_SECONDS, FULL_SECONDS = 0.5, 300.0
SEED_VARIABLE, FIRST_VARIABLE = "KVTIER_FUZZ_SEED", "KVTIER_FUZZ_FIRST"
_INTEGERS = (0, 1, 2, 3, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_VALUES = (None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e300, float("inf"), float("nan"))
_TEXTS = ("", "a", "\0", "²", "🦑", "x" * 300, "../..", "dram", "1e9", "-1")


def fuzz(name: str, attempt: Callable[[random.Random], None]) -> None:
    """Run `attempt` again and again; what it raises is a finding."""
    seed = int(
        os.environ.get(SEED_VARIABLE)
        or (random.SystemRandom().getrandbits(32) if is_torture() else 1)
    )
    first = int(os.environ.get(FIRST_VARIABLE) or 0)
    began = time.monotonic()
    until = began + (FULL_SECONDS if is_torture() else SHORT_SECONDS)
    number = first
    while number == first or time.monotonic() < until:
        try:
            attempt(random.Random(f"{name} {seed} {number}"))
        except Exception as error:
            raise AssertionError(
                f"{name}: execution {number} of seed {seed}: {type(error).__name__}: {error}"
            ) from error
        number += 1
    state_finding(
        f"{name}: {number - first} executions in {time.monotonic() - began:.0f} s, seed {seed}"
    )


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, spliced, with telling numbers in it, or something else altogether."""
    kind = chance.randrange(8)
    if kind == 0 or not data:
        return chance.randbytes(chance.choice((0, 1, 7, 300, 5000)))
    if kind == 1:
        return data[: chance.randrange(len(data))]
    if kind == 2:
        return data + data[chance.randrange(len(data)) :]
    if kind == 3:
        at, end = chance.randrange(len(data)), chance.randrange(len(data))
        return data[:at] + data[end:]
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(changed))
        if kind < 6:
            changed[at] = chance.randrange(256)
            continue
        size = chance.choice((1, 2, 4, 8))
        number = chance.choice(_INTEGERS) & ((1 << 8 * size) - 1)
        changed[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))
    return bytes(changed)


def mutated_value(chance: random.Random, value: object) -> object:
    """A value of JSON that differs somewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        rest = {name: one for name, one in value.items() if name != key}
        kind = chance.randrange(6)
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, chance.choice(_TEXTS): value[key]}
        return {**value, key: mutated_value(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        kind = chance.randrange(6)
        if kind == 0:
            return [*value[:at], *value[at + 1 :]]
        if kind == 1:
            return [*value, value[at]]
        return [*value[:at], mutated_value(chance, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and chance.random() < 0.5:
        return value[: chance.randrange(len(value) + 1)] + chance.choice(_TEXTS)
    others: list[object] = [chance.choice(_VALUES), chance.choice(_TEXTS), [], {}, [value]]
    return chance.choice(others)


def nested(chance: random.Random) -> bytes:
    """JSON, or TOML's values, so deep that a parser that calls itself runs out of stack."""
    depth = chance.choice((10, 900, 5_000, 30_000))
    head, tail = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return head * depth + (b"1" + tail * depth if chance.random() < 0.5 else b"")
