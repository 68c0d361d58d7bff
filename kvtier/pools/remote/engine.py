"""RemoteEngine: what kvtier asks of a store that other nodes use too; it knows keys and values.

What a value means, to which namespace it belongs and whether its bytes are right is decided above
(`blocks.py`): an engine may lose a value at any time, and one that returns another is found out.
Whatever the world does to a call is a value, a `RemoteOutcome`, one for each member of a batch;
nothing is raised but for our own mistakes. Each call ends within its `timeout_seconds` (law 2). A
call that timed out may still take effect; but its arguments are not read any more, or they are
still held by whoever reads them: a value once given to `put` is not changed by anybody. Where
`Pace.reads_in_place` says so they are not read any more, and may be memory that changes afterwards.

A *record* is a small value that several daemons change by turns: `replace_record` compares and
sets, and of all that compare with the same value exactly one is told DONE. Records live under keys
of their own, and may be lost like any other value.

Calls belong to one event loop. What blocks does so in threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from kvtier.memory import Bytes

RemoteKey = NewType("RemoteKey", str)
"""Printable ASCII without spaces; folders, as it were, end in a slash."""

Value = Sequence[Bytes]
"""To be put: the parts of one value, in order. One part only, unless `Pace.reads_in_place`."""

# A record holds an epoch and the daemons that follow it.
RECORD_BYTES_MAX = 64 << 10


class RemoteOutcome(StrEnum):
    """How one member of a batch ended."""

    DONE = "done"  # For `exists`: it is there.
    ABSENT = "absent"
    LOST = "lost"  # Another one changed the record first; nothing was done.
    TIMED_OUT = "timed_out"  # The wait is over; what was asked for may still happen.
    UNREACHABLE = "unreachable"  # No engine answers at its address.
    FULL = "full"  # The value was not taken for want of room.
    REFUSED = "refused"  # No access, or read only: asking again does not help.
    BUSY = "busy"  # A limit of our own; never begun.
    OFF = "off"  # The breaker is open; never begun.
    FAILED = "failed"  # Any other trouble.


TROUBLES = frozenset(
    {
        RemoteOutcome.TIMED_OUT,
        RemoteOutcome.UNREACHABLE,
        RemoteOutcome.FULL,
        RemoteOutcome.REFUSED,
        RemoteOutcome.BUSY,
        RemoteOutcome.FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class Reply:
    """`value` is there if and only if the outcome is DONE; it is the caller's own."""

    outcome: RemoteOutcome
    value: Bytes | None = None

    def __post_init__(self) -> None:
        assert (self.value is not None) == (self.outcome is RemoteOutcome.DONE)


@dataclass(frozen=True, slots=True)
class Emptied:
    """How a `delete_under` ended; `count` values are gone because of it, as far as is known."""

    outcome: RemoteOutcome
    count: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """`detail` is for people. Sizes are those of the whole engine, None where it does not tell."""

    outcome: RemoteOutcome
    detail: str = ""
    used_bytes: int | None = None
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine is kept busy: what a call should carry, and how many calls at once help.

    `reads_in_place`: `put` takes values in parts, however many, and has ended reading them when it
    returns, however it ends: so it may be given the memory of blocks itself. `leaves_what_failed`:
    whatever `put` says but TIMED_OUT, it has ended reading that value.
    """

    call_bytes: int
    calls_at_once: int = 1
    reads_in_place: bool = False
    leaves_what_failed: bool = False

    def __post_init__(self) -> None:
        assert self.call_bytes > 0
        assert self.calls_at_once > 0


class RemoteEngine(Protocol):
    """One client of one remote engine."""

    @property
    def name(self) -> str:
        """For people: the kind and the address, without secrets."""
        ...

    @property
    def pace(self) -> Pace:
        """Of values; more bytes or calls are taken, but bring nothing."""
        ...

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """Keep these values; one that is there already is replaced or left, as the engine likes.

        With `reads_in_place` one may be an `InPlace` of framing.py: ask it `is_right` when it was
        read; delete it when it is not, which is ABSENT then.
        """
        ...

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        """A value longer than `value_bytes_max` is FAILED: it is none of ours."""
        ...

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """DONE or ABSENT for each, or why it is not known."""
        ...

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        """DONE, or ABSENT where nothing was."""
        ...

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        """Delete all values whose keys begin with `folder`, whoever put them; not those that begin
        with one of `kept`, which names records as well. DONE when there are none left; after
        anything else it goes on when it is asked again."""
        ...

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply: ...

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        """DONE when the record was `expected` (None: was not there) and is now `value`, else LOST.

        `value` was never a value of this record before. After TIMED_OUT, UNREACHABLE or FAILED
        either may be the case: read it again.
        """
        ...

    async def health(self, *, timeout_seconds: float) -> Health:
        """A question that goes all the way to the engine and back."""
        ...

    async def close(self) -> None:
        """Give back connections and threads. What hangs is left behind."""
        ...
