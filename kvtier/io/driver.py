"""Driver: how bytes get onto one file or device and back; it knows offsets, not blocks.

A `Batch` is what its maker waits for; drivers finish its members one by one, in any order and from
any thread, and several drivers may share one. Each member ends as a value, an `Outcome`: what a
disk does to us is no exception. A batch ends once in each of two senses:

  ended     every member has an outcome, by itself or because `give_up` was called
  returned  no call is under way any more: the memory of all its members is the maker's again

A deadline ends the wait only. A call that hangs in the kernel cannot be taken back, so what
`give_up` does is to say TIMED_OUT for the members that are still out; their buffers, and the places
on the disk that they are written to, stay taken until the batch has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtier.memory import Bytes


class Outcome(StrEnum):
    """How one member of a batch ended."""

    DONE = "done"
    CORRUPT = "corrupt"  # The maker's check refused the bytes.
    EIO = "eio"  # The disk reported an error.
    SHORT = "short"  # Fewer bytes than asked for, twice.
    NO_SPACE = "no_space"
    GONE = "gone"  # The disk is not there any more.
    TIMED_OUT = "timed_out"  # The wait was given up; the call may still be under way.
    REFUSED = "refused"  # Never begun: the queue was full, or the driver stops.


@dataclass(frozen=True, slots=True)
class Access:
    """One member of a batch: these views, one after the other, lie at `offset`."""

    member: int  # Its number in the batch.
    offset: int
    views: tuple[Bytes, ...]
    length_bytes: int = field(init=False)  # Asked for several times on its way.

    def __post_init__(self) -> None:
        object.__setattr__(self, "length_bytes", sum([view.nbytes for view in self.views]))


class Stage(Protocol):
    """Where the disk holds other bytes than the maker's memory does, sealed ones: what goes there
    and comes from there instead. Asked in a driver's thread, like the check."""

    def before_write(self, access: Access) -> Access:
        """As long, at the same offset: what is written in its place."""
        ...

    def before_read(self, access: Access) -> Access:
        """As long, at the same offset: where the bytes go; the check makes the maker's of them."""
        ...

    def release(self, member: int) -> None:
        """No call uses this member's memory any more."""
        ...


# Whether member i's bytes are right; asked in a driver's thread, before a write or after a read.
Check = Callable[[int], bool]


class Batch:
    """Members under way together. `on_ended` and `on_returned` are called once each, from whichever
    thread brings it about and without a lock held; they must not block.
    """

    def __init__(
        self,
        count: int,
        *,
        check: Check | None = None,
        stage: Stage | None = None,
        on_ended: Callable[[Batch], None] | None = None,
        on_returned: Callable[[Batch], None] | None = None,
    ) -> None:
        self.count = count
        self._check = check
        self._stage = stage
        self._on_ended = on_ended
        self._on_returned = on_returned
        self._changed = threading.Condition()  # Guards the rest.
        self._outcomes: list[Outcome | None] = [None] * count
        self._out_count = count  # Members that no driver has given back.
        self._given_up = False
        if count == 0:
            self._tell(ended=True, returned=True)

    @property
    def is_given_up(self) -> bool:
        """Drivers ask before they begin a member: what nobody waits for need not be done."""
        return self._given_up

    @property
    def is_returned(self) -> bool:
        return self._out_count == 0

    @property
    def is_ended(self) -> bool:
        return self._given_up or self._out_count == 0

    @property
    def outcomes(self) -> list[Outcome]:
        """One a member; only once the batch has ended."""
        found = [outcome for outcome in self._outcomes if outcome is not None]
        assert len(found) == self.count, "the batch has not ended"
        return found

    def is_sound(self, member: int) -> bool:
        """The maker's check of one member's bytes; without a check all bytes are right."""
        return self._check is None or self._check(member)

    def to_write(self, accesses: Sequence[Access]) -> Sequence[Access]:
        """What a driver writes for these."""
        stage = self._stage
        return accesses if stage is None else [stage.before_write(access) for access in accesses]

    def to_read(self, accesses: Sequence[Access]) -> Sequence[Access]:
        """What a driver reads for these."""
        stage = self._stage
        return accesses if stage is None else [stage.before_read(access) for access in accesses]

    def finish(self, member: int, outcome: Outcome) -> None:
        """A driver gives this member back; if it was given up its outcome stays TIMED_OUT."""
        if self._stage is not None:
            self._stage.release(member)
        with self._changed:
            assert self._out_count > 0, "a member was given back twice"
            self._out_count -= 1
            if self._outcomes[member] is None:
                self._outcomes[member] = outcome
            else:
                assert self._given_up, f"member {member} was given back twice"
            returned = self._out_count == 0
            ended = returned and not self._given_up
            if returned:
                self._changed.notify_all()
        self._tell(ended=ended, returned=returned)

    def give_up(self) -> None:
        """End the wait now; nothing happens when the batch has ended."""
        with self._changed:
            if self.is_ended:
                return
            self._given_up = True
            self._outcomes = [outcome or Outcome.TIMED_OUT for outcome in self._outcomes]
            self._changed.notify_all()
        self._tell(ended=True, returned=False)

    def wait(self, timeout_seconds: float | None = None) -> list[Outcome]:
        """Wait until the batch has ended; when the time is over, give it up."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ended, timeout_seconds)
        self.give_up()
        return self.outcomes

    def wait_returned(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the buffers are free again; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_returned, timeout_seconds)

    def _tell(self, *, ended: bool, returned: bool) -> None:
        if ended and self._on_ended is not None:
            self._on_ended(self)
        if returned and self._on_returned is not None:
            self._on_returned(self)


class Driver(Protocol):
    """One file or device. Offsets, addresses and lengths are multiples of `alignment`."""

    @property
    def name(self) -> str:
        """For people: the path."""
        ...

    @property
    def alignment(self) -> int: ...

    @property
    def length_bytes(self) -> int:
        """The capacity; nothing is ever read or written beyond it."""
        ...

    def read(self, accesses: Sequence[Access], batch: Batch) -> None:
        """Begin these reads; each ends in `batch.finish`. Reads overtake waiting writes."""
        ...

    def write(self, accesses: Sequence[Access], batch: Batch) -> None:
        """Begin these writes; each ends in `batch.finish`. No order among them is promised."""
        ...

    def sync(self) -> Outcome:
        """What was written before survives a power cut from now on. Blocks."""
        ...

    def punch(self, first: int, length_bytes: int) -> bool:
        """Have the device itself drop these bytes, so that they read as zeros; False where it
        cannot, and nothing was done. Blocks."""
        ...

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Refuse what has not begun and wait for the rest; False when a call still hangs."""
        ...
