"""A remote engine in memory: two clients of one shelf, and whatever may be wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.pools.remote.engine import Emptied, Health, Pace, RemoteKey, RemoteOutcome, Reply, Value
from kvtier.pools.remote.framing import InPlace

PACE = Pace(call_bytes=8 << 20, calls_at_once=2, reads_in_place=True)


@dataclass(slots=True)
class Shelf:
    """What all clients share, and what goes wrong; a test changes it as it likes."""

    values: dict[RemoteKey, bytes] = field(default_factory=dict)
    records: dict[RemoteKey, bytes] = field(default_factory=dict)
    capacity_bytes: int = 1 << 40
    delay_seconds: float = 0.0
    byte_seconds: float = 0.0  # What one byte takes on the link.
    trouble: RemoteOutcome | None = None  # How every call ends.
    slow_keys: set[RemoteKey] = field(default_factory=set)  # These never end.
    call_count: int = 0
    link: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def used_bytes(self) -> int:
        return sum(len(value) for value in self.values.values())


class FakeRemote:
    """Implements `RemoteEngine`."""

    def __init__(self, shelf: Shelf, name: str = "fake:", pace: Pace = PACE) -> None:
        self._shelf = shelf
        self._name = name
        self._pace = pace

    @property
    def name(self) -> str:
        return self._name

    @property
    def pace(self) -> Pace:
        return self._pace

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        shelf = self._shelf
        deadline = self._begin(timeout_seconds)
        outcomes: list[RemoteOutcome] = []
        for key, value in values:
            count_bytes = sum(part.nbytes for part in value)
            outcome = await self._trouble(key, deadline, count_bytes)
            if outcome is None and shelf.used_bytes + count_bytes > shelf.capacity_bytes:
                outcome = RemoteOutcome.FULL
            if outcome is None:
                shelf.values[key] = b"".join(part.tobytes() for part in value)
                if isinstance(value, InPlace) and not value.is_right():
                    del shelf.values[key]
                    outcome = RemoteOutcome.ABSENT
            outcomes.append(outcome or RemoteOutcome.DONE)
        return outcomes

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        deadline = self._begin(timeout_seconds)
        replies = []
        for key in keys:
            value = self._shelf.values.get(key)
            outcome = await self._trouble(key, deadline, len(value or b""))
            if outcome is not None:
                replies.append(Reply(outcome))
            elif value is None:
                replies.append(Reply(RemoteOutcome.ABSENT))
            elif len(value) > value_bytes_max:
                replies.append(Reply(RemoteOutcome.FAILED))
            else:
                replies.append(Reply(RemoteOutcome.DONE, np.frombuffer(value, np.uint8).copy()))
        return replies

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        deadline = self._begin(timeout_seconds)
        return [
            await self._trouble(key, deadline)
            or (RemoteOutcome.DONE if key in self._shelf.values else RemoteOutcome.ABSENT)
            for key in keys
        ]

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        deadline = self._begin(timeout_seconds)
        outcomes = []
        for key in keys:
            outcome = await self._trouble(key, deadline)
            if outcome is None:
                gone = self._shelf.values.pop(key, None)
                outcome = RemoteOutcome.ABSENT if gone is None else RemoteOutcome.DONE
            outcomes.append(outcome)
        return outcomes

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        outcome = await self._trouble(folder, self._begin(timeout_seconds))
        if outcome is not None:
            return Emptied(outcome)
        values = self._shelf.values
        gone = [key for key in values if key.startswith(folder) and not key.startswith(tuple(kept))]
        for key in gone:
            del values[key]
        return Emptied(RemoteOutcome.DONE, len(gone))

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply:
        outcome = await self._trouble(key, self._begin(timeout_seconds))
        if outcome is not None:
            return Reply(outcome)
        record = self._shelf.records.get(key)
        if record is None:
            return Reply(RemoteOutcome.ABSENT)
        return Reply(RemoteOutcome.DONE, np.frombuffer(record, np.uint8))

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        outcome = await self._trouble(key, self._begin(timeout_seconds))
        if outcome is not None:
            return outcome
        if self._shelf.records.get(key) != expected:
            return RemoteOutcome.LOST
        self._shelf.records[key] = value
        return RemoteOutcome.DONE

    async def health(self, *, timeout_seconds: float) -> Health:
        outcome = await self._trouble(RemoteKey(""), self._begin(timeout_seconds))
        if outcome is not None:
            return Health(outcome, "as the test wants it")
        shelf = self._shelf
        return Health(RemoteOutcome.DONE, "", shelf.used_bytes, shelf.capacity_bytes)

    async def close(self) -> None:
        pass

    def _begin(self, timeout_seconds: float) -> float:
        self._shelf.call_count += 1
        return asyncio.get_running_loop().time() + timeout_seconds

    async def _trouble(
        self, key: RemoteKey, deadline: float, count_bytes: int = 0
    ) -> RemoteOutcome | None:
        """None when the member may go on; else how it ended. One link for all, one at a time."""
        shelf = self._shelf
        seconds = shelf.delay_seconds + count_bytes * shelf.byte_seconds
        if key in shelf.slow_keys:
            seconds = float("inf")
        if seconds:
            async with shelf.link:
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.sleep(max(0.0, min(seconds, left)))
            if seconds > left:
                return RemoteOutcome.TIMED_OUT
        else:
            await asyncio.sleep(0)
        return shelf.trouble
