"""Mooncake Store as a remote engine: a master that knows where values are, clients that have them.

The daemon is a client: it lends `segment_bytes` of its memory to the store (0 where a
mooncake_client of its own does that), and moves bytes by TCP or RDMA. The library has no deadlines:
a call to a master that stands still takes 30 s. So calls go through threads; the wait ends at its
deadline, the thread is back later.

Values go straight between the library and the buffers of `Buffers`, each registered once. Those of
a call that nobody waits for any more are held by that call: it can write into no memory that
somebody else has. Small values, and memory that is not from there, go through one registered
buffer a thread.

A value that is there already is left as it is. There is no compare-and-set, only a put that takes
nothing when the key exists, and says neither. A record is therefore a run of keys KEY@NUMBER:

    read      the highest number that exists
    replace   put the next number, pinned, and read it back: who finds his own value there and no
              higher number has won, and removes the lower ones

who finds a higher number was late by more than one change, and removes his own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.alignment import aligned_buffer
from kvtier.io.giving_way import GivingWay
from kvtier.io.threads import IoThreads
from kvtier.memory import Bytes
from kvtier.pools.remote.buffers import Buffers, whole_of
from kvtier.pools.remote.calls import Calls
from kvtier.pools.remote.engine import (
    RECORD_BYTES_MAX,
    Emptied,
    Health,
    Pace,
    RemoteKey,
    RemoteOutcome,
    Reply,
    Value,
)
from kvtier.pools.remote.mooncake_groups import (
    CALL_BYTES,
    DIRECT_BYTES_MIN,
    LANDING_BYTES,
    flattened,
    groups_of,
)

# A record may be changed so many times (a daemon that joins or leaves is a change, too): with a
# hundred a day that is two years. Looking for all of them at once takes a master 40 ms.
RECORD_NUMBERS_MAX = 65_536
# A record that was read before is looked for among so many numbers first.
_RECORD_WINDOW = 256
_RECORD_READS_MAX = 8
_KEYS_A_CALL = 4096
# After a call that failed the library may still read or write its memory for a moment (its own
# time-out is a minute): the buffers of the last such calls stay registered. An open breaker lets
# few calls through in that time.
_DOUBTFUL_COUNT = 64

# The library's error codes, as they come back from it.
_OUTCOMES = {
    0: RemoteOutcome.DONE,
    -10: RemoteOutcome.FULL,  # No room in the client's own buffer.
    -200: RemoteOutcome.FULL,  # No segment has room, even after evicting.
    -703: RemoteOutcome.ABSENT,  # Somebody is still putting it.
    -704: RemoteOutcome.ABSENT,
    -800: RemoteOutcome.UNREACHABLE,  # The client that has the value did not send it.
    -900: RemoteOutcome.UNREACHABLE,  # The master.
    -901: RemoteOutcome.TIMED_OUT,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`metadata`: P2PHANDSHAKE needs no metadata server. `devices`: of RDMA; empty: all."""

    master: str  # HOST:PORT
    host: str  # Of this node, as the others reach it.
    segment_bytes: int = 0
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    thread_count: int = 4


class MooncakeEngine:
    """Implements `RemoteEngine`. Connects with the first call; a failed attempt is an outcome."""

    def __init__(
        self, settings: MooncakeSettings, *, store: Any = None, buffers: Buffers | None = None
    ) -> None:
        """Raises ConfigError when the library is not installed. `store`: a client of the library
        that is connected already, and stays so. `buffers`: where values are taken from."""
        self._buffers = buffers or Buffers()
        # The library tells standard error of everything it does.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(f"a Mooncake tier needs kvtier[mooncake] ({error})") from None
        self._make_store: Callable[[], Any] = MooncakeDistributedStore
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._settings = settings
        self._store: Any = store
        self._is_lent = store is not None
        self._connecting = threading.Lock()
        self._way = GivingWay()
        self._landings = threading.local()
        # Reentrant: a buffer may end, and be unregistered, wherever memory is collected.
        self._registering = threading.RLock()
        self._registered: dict[int, Bytes | None] = {}  # By address; those held for good with it.
        self._doubtful: deque[Bytes] = deque(maxlen=_DOUBTFUL_COUNT)
        self._threads = IoThreads("kvtier-mooncake", count=settings.thread_count)
        self._calls = Calls(settings.thread_count)
        self._numbers: dict[RemoteKey, int] = {}  # Where a record was found last.

    @property
    def name(self) -> str:
        return f"mooncake:{self._settings.master}"

    @property
    def pace(self) -> Pace:
        return Pace(CALL_BYTES)

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        whole = [(key, value) for key, [value] in values]
        groups = [whole[start:end] for start, end in groups_of([one.nbytes for _, one in whole])]
        works = [partial(self._put_group, group) for group in groups]
        found = await self._run(works, timeout_seconds)
        return flattened(found, [len(group) for group in groups])

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        groups = [keys[start:end] for start, end in groups_of([value_bytes_max] * len(keys))]
        works = [partial(self._get_group, group, value_bytes_max) for group in groups]
        found = await self._run(works, timeout_seconds)
        return [
            one if isinstance(one, Reply) else Reply(one)
            for one in flattened(found, [len(group) for group in groups])
        ]

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._by_keys(self._exists_group, keys, timeout_seconds)

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        return await self._by_keys(self._delete_group, keys, timeout_seconds)

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        """In one call, which the master answers when it is done."""
        spared = "|".join(one.removeprefix(folder) for one in kept if one.startswith(folder))
        pattern = f"^{folder}(?!{spared}).*" if spared else f"^{folder}.*"
        work = partial(self._empty, pattern)
        [found] = await self._run([work], timeout_seconds)
        return found if isinstance(found, Emptied) else Emptied(found)

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply:
        [found] = await self._run([partial(self._read_record, key)], timeout_seconds)
        return found if isinstance(found, Reply) else Reply(found)

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        work = partial(self._replace_record, key, expected, value)
        [outcome] = await self._run([work], timeout_seconds)
        return RemoteOutcome(outcome)

    async def health(self, *, timeout_seconds: float) -> Health:
        """By a question: the library's own check calls a master healthy that is dead."""
        [outcome] = await self.exists(
            [RemoteKey("kvtier1/health")], timeout_seconds=timeout_seconds
        )
        is_well = outcome in (RemoteOutcome.DONE, RemoteOutcome.ABSENT)
        return Health(RemoteOutcome.DONE if is_well else outcome, "" if is_well else self.name)

    async def close(self) -> None:
        if self._store is not None and await self._calls.close(timeout_seconds=1.0):
            await self._calls.run([partial(self._in_thread, self._close_store)], 5.0, None)
        self._threads.shutdown(wait=False)

    async def _by_keys(
        self,
        work: Callable[[Sequence[RemoteKey]], list[RemoteOutcome]],
        keys: Sequence[RemoteKey],
        timeout_seconds: float,
    ) -> list[RemoteOutcome]:
        starts = range(0, len(keys), _KEYS_A_CALL)
        groups = [keys[start : start + _KEYS_A_CALL] for start in starts]
        found = await self._run([partial(work, group) for group in groups], timeout_seconds)
        return flattened(found, [len(group) for group in groups])

    async def _run(self, works: Sequence[Callable[[], Any]], timeout_seconds: float) -> list[Any]:
        """What each returned, or an outcome for all of it."""
        calls = [partial(self._in_thread, partial(self._guarded, work)) for work in works]
        return await self._calls.run(calls, timeout_seconds, RemoteOutcome.TIMED_OUT)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:
            return RemoteOutcome.BUSY

    # What follows runs in threads.

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            self._connect()
            return work()
        except _Trouble as trouble:
            return trouble.outcome

    def _connect(self) -> None:
        with self._connecting:
            if self._store is not None:
                return
            settings, store = self._settings, self._make_store()
            self._need_master()
            code = store.setup(
                settings.host,
                settings.metadata,
                settings.segment_bytes,
                LANDING_BYTES,
                settings.protocol,
                settings.devices,
                settings.master,
            )
            if code != 0:
                raise _Trouble(RemoteOutcome.UNREACHABLE)
            self._store = store

    def _need_master(self) -> None:
        """The library tries for 100 s to find one."""
        host, _, port = self._settings.master.rpartition(":")
        if "://" in host or not port.isdigit():
            return  # Found by way of etcd or the like.
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            raise _Trouble(RemoteOutcome.UNREACHABLE) from None

    def _close_store(self) -> None:
        with self._connecting:
            store = self._store
            if store is None:
                return
            # As one: a buffer may end meanwhile, and be unregistered too.
            with self._registering:
                while self._registered:
                    store.unregister_buffer(self._registered.popitem()[0])
                self._store = None
            if not self._is_lent:
                store.close()

    def _landing(self, count_bytes: int) -> Bytes:
        """This thread's registered buffer, at least so long."""
        held: Bytes | None = getattr(self._landings, "buffer", None)
        if held is not None and held.nbytes >= count_bytes:
            return held
        buffer = aligned_buffer(max(count_bytes, LANDING_BYTES))
        with self._registering:
            if held is not None:
                self._unregister(held.ctypes.data)
            self._register(buffer)
            self._registered[buffer.ctypes.data] = buffer  # A call may hang in it.
        self._landings.buffer = buffer
        return buffer

    def _register(self, whole: Bytes) -> None:
        """Let the library read and write this, until it is unregistered or collected."""
        address = whole.ctypes.data
        with self._registering:
            if address in self._registered:
                return
            if self._store is None:  # Closed meanwhile.
                raise _Trouble(RemoteOutcome.UNREACHABLE)
            if self._store.register_buffer(address, whole.nbytes) != 0:
                raise _Trouble(RemoteOutcome.FAILED)
            self._registered[address] = None

    def _unregister(self, address: int) -> None:
        with self._registering:
            if address in self._registered:
                del self._registered[address]
                self._store.unregister_buffer(address)

    def _register_buffer(self, whole: Bytes) -> None:
        """One of `Buffers`, which ends when nobody has it any more."""
        with self._registering:
            if whole.ctypes.data not in self._registered:
                self._register(whole)
                weakref.finalize(whole, self._unregister, whole.ctypes.data).atexit = False

    def _put_group(self, group: Sequence[tuple[RemoteKey, Bytes]]) -> list[RemoteOutcome]:
        values = [value for _, value in group]
        arguments = ([key for key, _ in group], self._places_of(values))
        with self._way.given():
            codes = self._store.batch_put_from(*arguments, [value.nbytes for value in values])
        outcomes = [outcome_of(code) for code in codes]
        self._doubt(values, outcomes)
        return outcomes

    def _places_of(self, values: Sequence[Bytes]) -> list[int]:
        """Addresses where the library may read these: their own, or those of copies."""
        wholes = [whole_of(value) for value in values]
        if all(whole is not None and whole.nbytes >= DIRECT_BYTES_MIN for whole in wholes):
            for whole in wholes:
                assert whole is not None
                self._register_buffer(whole)
            return [value.ctypes.data for value in values]
        landing, places = self._places([value.nbytes for value in values])
        for value, place in zip(values, places, strict=True):
            np.copyto(landing[place : place + value.nbytes], value)
        return [landing.ctypes.data + place for place in places]

    def _get_group(
        self, keys: Sequence[RemoteKey], value_bytes_max: int
    ) -> list[Reply | RemoteOutcome]:
        if value_bytes_max < DIRECT_BYTES_MIN:
            return self._get_small(keys, value_bytes_max)
        values = [self._buffers.take(value_bytes_max) for _ in keys]
        for value in values:
            whole = whole_of(value)
            assert whole is not None, "no buffer of Buffers"
            self._register_buffer(whole)
        addresses = [value.ctypes.data for value in values]
        with self._way.given():
            counts = self._store.batch_get_into(
                list(keys), addresses, [value_bytes_max] * len(keys)
            )
        outcomes = [RemoteOutcome.DONE if count > 0 else outcome_of(count) for count in counts]
        self._doubt(values, outcomes)
        replies: list[Reply | RemoteOutcome] = []
        for value, count, outcome in zip(values, counts, outcomes, strict=True):
            if outcome is RemoteOutcome.DONE:
                replies.append(Reply(outcome, value[:count]))
                continue
            replies.append(outcome)
            if outcome is RemoteOutcome.ABSENT:
                self._buffers.give_back(value)
        return replies

    def _doubt(self, values: Sequence[Bytes], outcomes: Sequence[RemoteOutcome]) -> None:
        """Hold on to what the library may still touch."""
        for value, outcome in zip(values, outcomes, strict=True):
            if outcome not in (RemoteOutcome.DONE, RemoteOutcome.ABSENT):
                self._doubtful.append(value)

    def _get_small(
        self, keys: Sequence[RemoteKey], value_bytes_max: int
    ) -> list[Reply | RemoteOutcome]:
        landing, places = self._places([value_bytes_max] * len(keys))
        address = landing.ctypes.data
        counts = self._store.batch_get_into(
            list(keys), [address + place for place in places], [value_bytes_max] * len(keys)
        )
        replies: list[Reply | RemoteOutcome] = []
        for place, count in zip(places, counts, strict=True):
            if count <= 0:
                replies.append(outcome_of(count))
                continue
            value = self._buffers.take(count)
            np.copyto(value, landing[place : place + count])
            replies.append(Reply(RemoteOutcome.DONE, value))
        return replies

    def _places(self, sizes: Sequence[int]) -> tuple[Bytes, list[int]]:
        """The landing buffer, and where in it each of these begins."""
        ends = np.cumsum(sizes).tolist()
        return self._landing(ends[-1]), [0, *ends[:-1]]

    def _exists_group(self, keys: Sequence[RemoteKey]) -> list[RemoteOutcome]:
        found = self._store.batch_is_exist(list(keys))
        outcomes = {1: RemoteOutcome.DONE, 0: RemoteOutcome.ABSENT}
        return [outcomes.get(one) or outcome_of(one) for one in found]

    def _delete_group(self, keys: Sequence[RemoteKey]) -> list[RemoteOutcome]:
        # By force: who has just read a value holds a lease of ten seconds on it. A reader that is
        # overtaken finds the checksum wrong.
        return [outcome_of(code) for code in self._store.batch_remove(list(keys), True)]

    def _empty(self, pattern: str) -> Emptied:
        count = self._store.remove_by_regex(pattern, True)  # By force, as above.
        return Emptied(RemoteOutcome.DONE, count) if count >= 0 else Emptied(outcome_of(count))

    def _read_record(self, key: RemoteKey) -> Reply:
        found = self._newest(key)
        if found is None:
            return Reply(RemoteOutcome.ABSENT)
        return Reply(RemoteOutcome.DONE, found[1])

    def _replace_record(
        self, key: RemoteKey, expected: bytes | None, value: bytes
    ) -> RemoteOutcome:
        found = self._newest(key)
        number = found[0] if found else -1
        if (None if found is None else found[1].data) != expected:
            return RemoteOutcome.LOST
        if number + 1 >= RECORD_NUMBERS_MAX:
            return RemoteOutcome.FAILED
        mine = _numbered(key, number + 1)
        outcome = outcome_of(self._store.put(mine, value, self._pinned))
        if outcome is not RemoteOutcome.DONE:
            return outcome
        [reply] = self._get_group([mine], RECORD_BYTES_MAX)
        if not isinstance(reply, Reply):
            # Not there yet: somebody else is putting it. Ours would be there.
            return RemoteOutcome.LOST if reply is RemoteOutcome.ABSENT else reply
        if reply.value is None or reply.value.data != value:
            return RemoteOutcome.LOST
        if self._numbers_from(key, number + 2):
            self._delete_group([mine])
            return RemoteOutcome.LOST
        self._numbers[key] = number + 1
        if number >= 0:
            self._delete_group([_numbered(key, number)])
        return RemoteOutcome.DONE

    def _newest(self, key: RemoteKey) -> tuple[int, Bytes] | None:
        """Number and value of the record as it is now."""
        for _ in range(_RECORD_READS_MAX):
            numbers = self._numbers_from(key, self._numbers.get(key, 0))
            if not numbers:
                numbers = self._numbers_from(key, 0, RECORD_NUMBERS_MAX)
            if not numbers:
                self._numbers.pop(key, None)
                return None
            [reply] = self._get_group([_numbered(key, numbers[-1])], RECORD_BYTES_MAX)
            if isinstance(reply, Reply) and reply.value is not None:
                self._numbers[key] = numbers[-1]
                # What a daemon that died between its two steps has left.
                self._delete_group([_numbered(key, number) for number in numbers[:-1]])
                return numbers[-1], reply.value
            if reply is not RemoteOutcome.ABSENT:
                raise _Trouble(reply if isinstance(reply, RemoteOutcome) else reply.outcome)
        raise _Trouble(RemoteOutcome.FAILED)

    def _numbers_from(self, key: RemoteKey, first: int, count: int = _RECORD_WINDOW) -> list[int]:
        """Those of the next `count` that exist, ascending."""
        numbers = range(first, min(first + count, RECORD_NUMBERS_MAX))
        outcomes = self._exists_group([_numbered(key, number) for number in numbers])
        bad = set(outcomes) - {RemoteOutcome.DONE, RemoteOutcome.ABSENT}
        if bad:
            raise _Trouble(bad.pop())
        return [
            number
            for number, outcome in zip(numbers, outcomes, strict=True)
            if outcome is RemoteOutcome.DONE
        ]


class _Trouble(Exception):
    def __init__(self, outcome: RemoteOutcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


def outcome_of(code: int) -> RemoteOutcome:
    """What a code of the library means to whoever asked."""
    return _OUTCOMES.get(code, RemoteOutcome.FAILED)


def _numbered(key: RemoteKey, number: int) -> RemoteKey:
    return RemoteKey(f"{key}@{number}")
