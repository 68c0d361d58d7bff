"""The epoch of a namespace among the nodes: one record in the remote engine, followed by all.

    offset  size  field
         0     4  magic, b"KVN1"
         4    16  namespace fingerprint
        20     8  life of the record: random, drawn when there was none
        28     4  number of the change; goes up by one with each
        32     4  epoch, random and never 0
        36     4  count of members
        40  16*n  members: the daemons that may use this epoch
    40+16n     4  CRC-32 of all that precedes

Law 1 rests on a *view*: what a daemon read of the record is good for `view_seconds` from before
the read began, by its own clock, and only while the record names it a member. Without a view the
tier is off for the namespace. So `view_seconds` after `clear` has changed the record, at the
latest, nobody uses the old epoch: no daemon that died, none that was stopped, none cut off.

To answer sooner `clear` looks for an acknowledgement by each member, a key of its own with the
number that it has seen. That is believed only by who has followed the record for `view_seconds`:
an engine may have lost the record, and members of the lost one may still have a view of it.
A record that is lost, or whose number has gone back (an engine that failed over to an old copy),
is replaced: epochs are drawn at random, so that nothing written before counts any more.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvtier.clock import Clock
from kvtier.pools.remote.engine import RemoteEngine, RemoteKey, RemoteOutcome
from kvtier.pools.remote.keys import acknowledgement_key, epoch_key

MAGIC = b"KVN1"
_HEAD = struct.Struct("<4s16sQIII")
_CRC = struct.Struct("<I")
MEMBER_BYTES = 16
# 1,000 nodes share one namespace; the record is then 16 KiB, read by each every few seconds.
MEMBERS_MAX = 1000
# Others change the record as well when many daemons start; the attempts are a call apart.
_ATTEMPTS_MAX = 64
_ACK_POLL_SECONDS = 0.1
_CLOCK_MARGIN = 1.05  # No two nodes' clocks run at the same rate.


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What the engine keeps for one namespace."""

    life: int
    number: int
    epoch: int
    members: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """`view_seconds` is what a `clear` takes at most beyond its calls; a view that is not read
    again for so long ends the tier. `refresh_seconds` leaves room for two failures in a row."""

    view_seconds: float = 10.0
    refresh_seconds: float = 3.0
    call_seconds: float = 2.0

    def __post_init__(self) -> None:
        assert 2 * self.refresh_seconds + self.call_seconds < self.view_seconds


@dataclass(frozen=True, slots=True)
class Cleared:
    """How a clear ended: DONE, or why the record could not be changed (nothing is promised then).

    `is_acknowledged`: every member has said so; else the time of its view has passed.
    """

    outcome: RemoteOutcome
    epoch: int = 0
    is_acknowledged: bool = False
    silent_members: int = 0


@dataclass(frozen=True, slots=True)
class _View:
    record: EpochRecord
    until: float


class EpochWatch:
    """One daemon's view of one namespace's epoch. All methods belong to one event loop."""

    def __init__(
        self,
        engine: RemoteEngine,
        fingerprint: bytes,
        member: bytes,
        *,
        clock: Clock,
        draw: Callable[[int], int],
        times: EpochTimes = EpochTimes(),
    ) -> None:
        """`member`: 16 random bytes of this life of the daemon. `draw(bits)`: a random number."""
        assert len(fingerprint) == 16
        assert len(member) == MEMBER_BYTES
        self._engine = engine
        self._fingerprint = fingerprint
        self._member = member
        self._clock = clock
        self._draw = draw
        self._times = times
        self._key = epoch_key(fingerprint)
        self._view: _View | None = None
        self._followed_since = 0.0  # When this life of the record was first seen.
        self._followed_life: int | None = None
        self._number_seen = 0
        self._acknowledged_epoch = 0
        self._raw: bytes | None = None  # The record as it was read last, sound or not.
        self.trouble = ""  # Why there is no view; for people.

    def current_epoch(self) -> int | None:
        """The epoch to write with and to believe; None: the tier is off for this namespace."""
        view = self._view
        if view is None or self._clock.now() >= view.until:
            return None
        return view.record.epoch

    async def follow(self) -> None:
        """Refresh for ever, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._times.refresh_seconds)

    async def refresh(self) -> RemoteOutcome:
        """Read the record, join it where we are no member, and acknowledge what is new."""
        for _ in range(_ATTEMPTS_MAX):
            began = self._clock.now()
            outcome, record = await self._read()
            if outcome not in (RemoteOutcome.DONE, RemoteOutcome.ABSENT):
                return self._off(outcome)
            wanted = self._wanted(record)
            if record is not None and wanted == record:
                return await self._accept(record, began)
            changed = await self._replace(record, wanted)
            if changed is RemoteOutcome.DONE:
                self._acknowledged_epoch = (
                    wanted.epoch
                )  # Who has just joined is waited for by none.
                return await self._accept(wanted, began)
            if changed is not RemoteOutcome.LOST:
                return self._off(changed)
        return self._off(RemoteOutcome.BUSY)

    async def clear(self) -> Cleared:
        """A new epoch; when this returns DONE no daemon uses the old one any more."""
        for _ in range(_ATTEMPTS_MAX):
            outcome = await self.refresh()
            view = self._view
            if outcome is not RemoteOutcome.DONE or view is None:
                return Cleared(outcome)
            before = view.record
            is_known = self._has_followed()
            after = replace(before, number=before.number + 1, epoch=self._new_epoch(before.epoch))
            began = self._clock.now()
            changed = await self._replace(before, after)
            if changed is RemoteOutcome.DONE:
                await self._accept(after, began)
                return await self._wait_seen(after, is_known=is_known)
            if changed is not RemoteOutcome.LOST:
                self._off(changed)
                return Cleared(changed)
        return Cleared(RemoteOutcome.BUSY)

    async def leave(self) -> None:
        """This daemon uses the epoch no more; a clear need not wait for it."""
        view, self._view = self._view, None
        if view is None:
            return
        for _ in range(_ATTEMPTS_MAX):
            _, record = await self._read()
            if record is None or self._member not in record.members:
                return
            staying = tuple(one for one in record.members if one != self._member)
            after = replace(record, number=record.number + 1, members=staying)
            if await self._replace(record, after) is not RemoteOutcome.LOST:
                return

    def _wanted(self, record: EpochRecord | None) -> EpochRecord:
        """The record as it must be before this daemon may use it."""
        number_seen = self._number_seen
        if record is None or record.number < number_seen:
            # Lost, or an old copy: what was cleared since must not come back.
            epoch = self._new_epoch(record.epoch if record else 0)
            life = self._draw(64)
            return EpochRecord(life, max(number_seen, 0) + 1, epoch, (self._member,))
        if self._member in record.members:
            return record
        joined = replace(record, number=record.number + 1, members=(*record.members, self._member))
        if len(joined.members) <= MEMBERS_MAX:
            return joined
        return self._without(joined, set(joined.members[:-MEMBERS_MAX]))

    async def _read(self) -> tuple[RemoteOutcome, EpochRecord | None]:
        """DONE and the record; ABSENT for one that is not there or is damaged."""
        reply = await self._engine.read_record(self._key, timeout_seconds=self._times.call_seconds)
        self._raw = None if reply.value is None else reply.value.data.tobytes()  # gil-ok: 16 KiB
        if self._raw is None:
            return reply.outcome, None
        record = decode_record(self._raw, self._fingerprint)
        return (RemoteOutcome.ABSENT if record is None else RemoteOutcome.DONE), record

    async def _replace(self, before: EpochRecord | None, after: EpochRecord) -> RemoteOutcome:
        expected = self._raw if before is None else encode_record(before, self._fingerprint)
        return await self._engine.replace_record(
            self._key,
            expected=expected,
            value=encode_record(after, self._fingerprint),
            timeout_seconds=self._times.call_seconds,
        )

    async def _accept(self, record: EpochRecord, began: float) -> RemoteOutcome:
        if record.life != self._followed_life:
            self._followed_life, self._followed_since = record.life, began
        self._number_seen = record.number
        self._view = _View(record, began + self._times.view_seconds)
        self.trouble = ""
        await self._acknowledge(record)
        return RemoteOutcome.DONE

    async def _acknowledge(self, record: EpochRecord) -> None:
        """Say that the epoch is seen; when that fails a clear waits a little longer."""
        if self._acknowledged_epoch == record.epoch:
            return
        key = self._ack_key(record, self._member)
        value = np.frombuffer(b"seen", np.uint8)
        [outcome] = await self._engine.put([(key, [value])], timeout_seconds=self._call_seconds)
        if outcome is RemoteOutcome.DONE:
            self._acknowledged_epoch = record.epoch

    async def _wait_seen(self, record: EpochRecord, *, is_known: bool) -> Cleared:
        """Until every member has acknowledged, or no older view can be left."""
        until = self._clock.now() + _CLOCK_MARGIN * self._times.view_seconds
        missing = [one for one in record.members if one != self._member]
        while self._clock.now() < until:
            if missing:
                missing = await self._unacknowledged(record, missing)
            if not missing and is_known:
                await self._forget_acknowledgements(record)
                return Cleared(RemoteOutcome.DONE, record.epoch, is_acknowledged=True)
            await asyncio.sleep(min(_ACK_POLL_SECONDS, self._times.refresh_seconds / 4))
        await self._expel(record, missing)
        return Cleared(RemoteOutcome.DONE, record.epoch, silent_members=len(missing))

    async def _unacknowledged(self, record: EpochRecord, members: list[bytes]) -> list[bytes]:
        keys = [self._ack_key(record, one) for one in members]
        outcomes = await self._engine.exists(keys, timeout_seconds=self._call_seconds)
        return [
            one
            for one, outcome in zip(members, outcomes, strict=True)
            if outcome is not RemoteOutcome.DONE
        ]

    async def _forget_acknowledgements(self, record: EpochRecord) -> None:
        keys = [self._ack_key(record, one) for one in record.members]
        await self._engine.delete(keys, timeout_seconds=self._call_seconds)

    async def _expel(self, record: EpochRecord, silent: list[bytes]) -> None:
        """The next clear need not wait for the dead; who lives joins again by itself."""
        await self._forget_acknowledgements(record)
        _, now = await self._read()
        if not silent or now is None or now.life != record.life:
            return
        await self._replace(now, self._without(now, set(silent)))

    def _without(self, record: EpochRecord, members: set[bytes]) -> EpochRecord:
        """These are forgotten unasked, and join again if they live. They may have a view all the
        same: so the record begins another life, and nobody believes acknowledgements for a while.
        """
        staying = tuple(one for one in record.members if one not in members)
        return EpochRecord(self._draw(64), record.number + 1, record.epoch, staying)

    def _ack_key(self, record: EpochRecord, member: bytes) -> RemoteKey:
        return acknowledgement_key(self._fingerprint, record.life, record.epoch, member)

    def _has_followed(self) -> bool:
        return self._clock.now() - self._followed_since >= _CLOCK_MARGIN * self._times.view_seconds

    def _off(self, outcome: RemoteOutcome) -> RemoteOutcome:
        """What is known stays good until its time; then the tier is off."""
        self.trouble = f"the epoch cannot be read: {outcome.value}"
        return outcome

    def _new_epoch(self, before: int) -> int:
        epoch = self._draw(32)
        while epoch in (0, before):  # Ends: two of 2^32 numbers are not allowed.
            epoch = self._draw(32)
        return epoch

    @property
    def _call_seconds(self) -> float:
        return self._times.call_seconds


def encode_record(record: EpochRecord, fingerprint: bytes) -> bytes:
    count = len(record.members)
    head = _HEAD.pack(MAGIC, fingerprint, record.life, record.number, record.epoch, count)
    body = head + b"".join(record.members)
    return body + _CRC.pack(zlib.crc32(body))


def decode_record(data: bytes, fingerprint: bytes) -> EpochRecord | None:
    """None for anything that is not exactly a record of this namespace."""
    if len(data) < _HEAD.size + _CRC.size:
        return None
    magic, owner, life, number, epoch, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * MEMBER_BYTES
    if magic != MAGIC or owner != fingerprint or len(data) != end + _CRC.size or epoch == 0:
        return None
    if _CRC.unpack_from(data, end) != (zlib.crc32(data[:end]),):
        return None
    members = tuple(
        data[start : start + MEMBER_BYTES] for start in range(_HEAD.size, end, MEMBER_BYTES)
    )
    return EpochRecord(life, number, epoch, members)
