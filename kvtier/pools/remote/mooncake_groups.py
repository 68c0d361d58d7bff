"""What goes to Mooncake's library in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvtier.pools.remote.engine import RemoteOutcome

LANDING_BYTES = 16 << 20
# Smaller values are sooner copied than registered one by one.
DIRECT_BYTES_MIN = 256 << 10
# A call asks without a rest whether it is done, which takes a core, however little it carries: so
# one at a time with much, and what frames add to it; and it gives way to those who do the work.
CALL_BYTES = 64 << 20
DIRECT_BYTES_MAX = CALL_BYTES + (16 << 20)


def groups_of(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of members that go in one call, and may share the landing buffer when they are
    small; a larger one is alone."""
    is_direct = min(sizes, default=0) >= DIRECT_BYTES_MIN
    group_bytes_max = DIRECT_BYTES_MAX if is_direct else LANDING_BYTES
    start, group_bytes = 0, 0
    for place, size in enumerate(sizes):
        if place > start and group_bytes + size > group_bytes_max:
            yield start, place
            start, group_bytes = place, 0
        group_bytes += size
    if start < len(sizes):
        yield start, len(sizes)


def flattened(found: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """One a member; an outcome that stands for a whole group is that of each in it."""
    return [
        one
        for group, count in zip(found, counts, strict=True)
        for one in ([group] * count if isinstance(group, RemoteOutcome) else group)
    ]
