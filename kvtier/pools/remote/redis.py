"""Valkey or Redis (7 or newer) as a remote engine: one server or a cluster, with TLS and users.

Blocks are plain strings. They go as runs of SET and GET, not by MSET and MGET: so each member has
an outcome of its own (a server that becomes full takes some), may have a lifetime, and in a cluster
goes to its own node. Runs are bounded in bytes, for a server answers nobody else while it copies
one. They go through lanes (redis_lane.py), all that is small through the package's asyncio client.
A record is changed by a script, which may run even when the server is full.

What the server evicts is a miss; that holds for records as well. With replicas a failover may bring
an old record back: see epochs.py for what is done then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtier.clock import Clock, SystemClock
from kvtier.errors import ConfigError
from kvtier.io.threads import IoThreads
from kvtier.pools.remote.buffers import Buffers
from kvtier.pools.remote.calls import Borrowed, Calls, ended_in_time
from kvtier.pools.remote.engine import (
    Emptied,
    Health,
    Pace,
    RemoteKey,
    RemoteOutcome,
    Reply,
    Value,
)
from kvtier.pools.remote.redis_emptying import SCANNED_KEYS, Emptying
from kvtier.pools.remote.redis_lane import Address, RedisLane, RedisLanes, outcome_of_text

# A pipeline of so much is a call of some ten milliseconds. One larger block is one call.
PIPELINE_BYTES_MAX = 16 << 20
PIPELINE_COMMANDS_MAX = 256
_FRAMES_BYTES = 1 << 20  # What is left of them for frames.
# Enough to fill a link beside a server that has one thread; more would only queue there.
CONNECTIONS_MAX = 4

_REPLACE_RECORD = """#!lua flags=allow-oom
local present = redis.call('GET', KEYS[1])
local same = present == ARGV[2]
if ARGV[1] == 'none' then same = present == false end
if not same then return 0 end
redis.call('SET', KEYS[1], ARGV[3])
return 1
"""

# How often a cluster's client asks who has which slots, while a node is lost.
LEARN_SECONDS = 1.0

T = TypeVar("T")
Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RedisTls:
    """Paths of PEM files. With `certificate` and `private_key` the server can know us by them."""

    authorities: str
    certificate: str | None = None
    private_key: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`addresses`: of a cluster some nodes, from which the others are learned."""

    addresses: tuple[tuple[str, int], ...]
    is_cluster: bool = False
    username: str | None = None
    password: str | None = None
    tls: RedisTls | None = None
    lifetime_seconds: float | None = None  # Of a value since it was put; None: until evicted.

    def __repr__(self) -> str:
        return f"RedisSettings({self.addresses}, is_cluster={self.is_cluster})"  # No secrets.


class RedisEngine:
    """Implements `RemoteEngine`. Made in a running loop, to which it belongs."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        buffers: Buffers | None = None,
        clock: Clock = SystemClock(),
    ) -> None:
        """Connects with the first call. Raises ConfigError when `redis` is not installed.
        `buffers`: where values are taken from."""
        self._buffers = buffers or Buffers()
        self._clock = clock
        assert settings.addresses, "no address to connect to"
        self._settings = settings
        self._client = _cluster_of(settings) if settings.is_cluster else _server_of(settings)
        self._lanes = RedisLanes(partial(_connected, settings), outcome_of, clock)
        self._threads = IoThreads("kvtier-redis", count=CONNECTIONS_MAX)
        self._calls = Calls(CONNECTIONS_MAX)
        # A cluster's client has as many connections to each node as there are calls.
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._learn_at = 0.0

    @property
    def name(self) -> str:
        host, port = self._settings.addresses[0]
        return f"redis:{host}:{port}"

    @property
    def pace(self) -> Pace:
        """Of gets: a second call is received while the blocks of the first are copied out."""
        return Pace(PIPELINE_BYTES_MAX - _FRAMES_BYTES, calls_at_once=2, reads_in_place=True)

    async def put(
        self, values: Sequence[tuple[RemoteKey, Value]], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        seconds = self._settings.lifetime_seconds
        more = (b"PX", b"%d" % round(seconds * 1000)) if seconds is not None else ()
        memory = Borrowed()

        def work(places: Sequence[int], deadline: float, lane: RedisLane) -> list[RemoteOutcome]:
            with memory.in_use():
                return lane.put([values[place] for place in places], more, deadline=deadline)

        sizes = [0] * len(values)  # They are sent one after the other, from where they are.
        try:
            return await self._run_lanes([key for key, _ in values], sizes, work, timeout_seconds)
        finally:
            await memory.give_back()  # No wait but for threads that end at the deadline themselves.

    async def get(
        self, keys: Sequence[RemoteKey], *, value_bytes_max: int, timeout_seconds: float
    ) -> list[Reply]:
        def work(places: Sequence[int], deadline: float, lane: RedisLane) -> list[Reply]:
            return lane.get(
                [keys[place] for place in places],
                value_bytes_max=value_bytes_max,
                take=self._buffers.take,
                deadline=deadline,
            )

        sizes = [value_bytes_max] * len(keys)
        found = await self._run_lanes(keys, sizes, work, timeout_seconds)
        return [one if isinstance(one, Reply) else Reply(one) for one in found]

    async def exists(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        found = await self._run([("EXISTS", key) for key in keys], [0] * len(keys), timeout_seconds)
        return [_counted(one) for one in found]

    async def delete(
        self, keys: Sequence[RemoteKey], *, timeout_seconds: float
    ) -> list[RemoteOutcome]:
        found = await self._run([("UNLINK", key) for key in keys], [0] * len(keys), timeout_seconds)
        return [_counted(one) for one in found]

    async def delete_under(
        self, folder: RemoteKey, *, kept: Sequence[RemoteKey], timeout_seconds: float
    ) -> Emptied:
        deadline = self._clock.now() + timeout_seconds
        more = {"target_nodes": "primaries"} if self._settings.is_cluster else {}

        async def delete(keys: Sequence[RemoteKey]) -> Sequence[RemoteOutcome]:
            left = max(0.0, deadline - self._clock.now())
            return await self.delete(keys, timeout_seconds=left)

        found = self._client.scan_iter(f"{folder}*", count=SCANNED_KEYS, **more)
        emptying = Emptying(found, tuple(kept), delete)
        outcome = await self._in_time(emptying.run, timeout_seconds)
        return Emptied(outcome, emptying.count)

    async def read_record(self, key: RemoteKey, *, timeout_seconds: float) -> Reply:
        [found] = await self._run([("GET", key)], [0], timeout_seconds)
        return _reply(found, None)

    async def replace_record(
        self, key: RemoteKey, *, expected: bytes | None, value: bytes, timeout_seconds: float
    ) -> RemoteOutcome:
        which = "none" if expected is None else "same"
        command = ("EVAL", _REPLACE_RECORD, 1, key, which, expected or b"", value)
        [found] = await self._run([command], [0], timeout_seconds)
        if isinstance(found, RemoteOutcome):
            return found
        return RemoteOutcome.DONE if found == 1 else RemoteOutcome.LOST

    async def health(self, *, timeout_seconds: float) -> Health:
        call = self._memory_of_cluster if self._settings.is_cluster else self._memory
        found = await self._in_time(call, timeout_seconds)
        if isinstance(found, RemoteOutcome):
            return Health(found, self.name)
        used, capacity = found
        return Health(RemoteOutcome.DONE, "", used, capacity or None)

    async def close(self) -> None:
        await self._calls.close(timeout_seconds=1.0)
        self._lanes.close()
        self._threads.shutdown(wait=False)
        await ended_in_time([self._client.aclose()], 1.0, None)

    async def _run_lanes(
        self,
        keys: Sequence[RemoteKey],
        sizes: Sequence[int],
        work: Callable[[Sequence[int], float, RedisLane], list[Any]],
        timeout_seconds: float,
    ) -> list[Any]:
        """What became of each key; its outcome where that is all there is to say."""
        deadline = self._clock.now() + timeout_seconds
        if self._settings.is_cluster and keys:
            known = await self._in_time(self._know_cluster, timeout_seconds)
            if isinstance(known, RemoteOutcome):
                return [known] * len(keys)
        groups = self._groups(keys, sizes)
        calls = [
            partial(self._run_lane, self._node_of(keys[group[0]]), group, deadline, work)
            for group in groups
        ]
        left = max(0.0, deadline - self._clock.now())
        late: list[Any] | RemoteOutcome = RemoteOutcome.TIMED_OUT
        found = await self._calls.run(calls, left, late)
        answers: list[Any] = [RemoteOutcome.TIMED_OUT] * len(keys)
        for group, these in zip(groups, found, strict=True):
            for number, place in enumerate(group):
                answers[place] = these if isinstance(these, RemoteOutcome) else these[number]
        outcomes = {one.outcome if isinstance(one, Reply) else one for one in answers}
        if self._settings.is_cluster and RemoteOutcome.UNREACHABLE in outcomes:
            left = max(0.0, deadline - self._clock.now())
            await ended_in_time([self._learn_nodes()], left, None)
        return answers

    async def _run_lane(
        self,
        address: Address | None,
        places: Sequence[int],
        deadline: float,
        work: Callable[[Sequence[int], float, RedisLane], list[Any]],
    ) -> list[Any] | RemoteOutcome:
        if address is None:
            return RemoteOutcome.UNREACHABLE  # No node is known to have these keys.
        run = partial(self._lanes.run, address, deadline, partial(work, places, deadline))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except RuntimeError:
            return RemoteOutcome.BUSY

    async def _run(
        self, commands: Sequence[Command], sizes: Sequence[int], timeout_seconds: float
    ) -> list[Any]:
        """What each command was answered, or its outcome when that is trouble."""
        began = time_of_loop()
        if self._settings.is_cluster and commands:
            known = await self._in_time(self._know_cluster, timeout_seconds)
            if isinstance(known, RemoteOutcome):
                return [known] * len(commands)
        groups = self._groups([_key_in(command) for command in commands], sizes)
        left = max(0.0, began + timeout_seconds - time_of_loop())
        found = await ended_in_time(
            [self._run_group([commands[place] for place in group]) for group in groups], left, None
        )
        answers: list[Any] = [RemoteOutcome.TIMED_OUT] * len(commands)
        for group, these in zip(groups, found, strict=True):
            for place, answer in zip(group, these or (), strict=False):
                answers[place] = answer
        return answers

    async def _run_group(self, commands: Sequence[Command]) -> list[Any]:
        """In a pipeline even if it is one: the cluster's client would otherwise answer a lost
        connection by closing those of all other calls."""
        async with self._places:
            try:
                pipeline = _pipeline_of(self._client, is_cluster=self._settings.is_cluster)
                for command in commands:
                    pipeline.execute_command(*command)
                answers = await pipeline.execute(raise_on_error=False)
            except Exception as error:  # noqa: BLE001  # Whatever the client raises is an outcome.
                outcome = outcome_of(error)
                if self._settings.is_cluster and outcome is RemoteOutcome.UNREACHABLE:
                    await self._learn_nodes()
                return [outcome] * len(commands)
        return [outcome_of(one) if isinstance(one, Exception) else one for one in answers]

    def _groups(self, keys: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
        """The places of keys that go together: to one node, and bounded."""
        groups: list[list[int]] = []
        open_groups: dict[Address | None, tuple[list[int], int]] = {}
        for place, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            node = self._node_of(key)
            group, group_bytes = open_groups.get(node, ([], 0))
            if (
                not group
                or len(group) >= PIPELINE_COMMANDS_MAX
                or (group_bytes + size > PIPELINE_BYTES_MAX)
            ):
                group, group_bytes = [], 0
                groups.append(group)
            group.append(place)
            open_groups[node] = (group, group_bytes + size)
        return groups

    def _node_of(self, key: str) -> Address | None:
        """Where the key's values are; None where no node is known to have them."""
        if not self._settings.is_cluster:
            return self._settings.addresses[0]
        known = self._client.nodes_manager.slots_cache.get(self._client.keyslot(key))
        return (str(known[0].host), int(known[0].port)) if known else None

    async def _know_cluster(self) -> None:
        await self._client.initialize()  # Nothing happens once that is done.

    async def _learn_nodes(self) -> None:
        """After a node was lost: another one may have its slots by now."""
        now = time_of_loop()
        if now < self._learn_at:
            return
        self._learn_at = now + LEARN_SECONDS
        with suppress(Exception):  # Then what is known stays.
            await self._client.nodes_manager.initialize()

    async def _in_time(
        self, call: Callable[[], Awaitable[T]], timeout_seconds: float
    ) -> T | RemoteOutcome:
        async def work() -> T | RemoteOutcome:
            async with self._places:
                try:
                    return await call()
                except Exception as error:  # noqa: BLE001  # As above.
                    return outcome_of(error)

        late: T | RemoteOutcome = RemoteOutcome.TIMED_OUT
        [found] = await ended_in_time([work()], timeout_seconds, late)
        return found

    async def _memory(self) -> tuple[int, int]:
        """Used and most; 0 where there is no limit."""
        facts = await self._client.info("memory")
        return int(facts["used_memory"]), int(facts.get("maxmemory", 0))

    async def _memory_of_cluster(self) -> tuple[int, int]:
        facts = await self._client.info("memory", target_nodes="primaries")
        nodes = [facts] if "used_memory" in facts else list(facts.values())
        used = sum(int(node["used_memory"]) for node in nodes)
        return used, sum(int(node.get("maxmemory", 0)) for node in nodes)


def time_of_loop() -> float:
    return asyncio.get_running_loop().time()


def outcome_of(error: Exception) -> RemoteOutcome:
    """What an error of the client means to whoever asked."""
    from redis import exceptions

    if isinstance(error, exceptions.OutOfMemoryError):
        return RemoteOutcome.FULL
    refused = (
        exceptions.AuthenticationError,
        exceptions.AuthorizationError,
        exceptions.NoPermissionError,
        exceptions.ReadOnlyError,
    )
    if isinstance(error, refused):
        return RemoteOutcome.REFUSED
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return RemoteOutcome.TIMED_OUT
    gone = (
        exceptions.ConnectionError,
        exceptions.ClusterDownError,
        exceptions.MasterDownError,
        exceptions.RedisClusterException,
        OSError,
    )
    return RemoteOutcome.UNREACHABLE if isinstance(error, gone) else outcome_of_text(str(error))


def _key_in(command: Command) -> str:
    return str(command[3] if command[0] == "EVAL" else command[1])


def _reply(found: Any, value_bytes_max: int | None) -> Reply:
    if isinstance(found, RemoteOutcome):
        return Reply(found)
    if found is None:
        return Reply(RemoteOutcome.ABSENT)
    if not isinstance(found, bytes) or (
        value_bytes_max is not None and len(found) > value_bytes_max
    ):
        return Reply(RemoteOutcome.FAILED)
    return Reply(RemoteOutcome.DONE, np.frombuffer(found, np.uint8))


def _counted(found: Any) -> RemoteOutcome:
    """Of a command that answers how many of its one key there were."""
    if isinstance(found, RemoteOutcome):
        return found
    return RemoteOutcome.DONE if found == 1 else RemoteOutcome.ABSENT


def _pipeline_of(client: Any, *, is_cluster: bool) -> Any:
    return client.pipeline() if is_cluster else client.pipeline(transaction=False)


def _connected(settings: RedisSettings, address: Address, seconds: float) -> Any:
    """One connection of the package's, for a lane. Blocks, up to `seconds` a step."""
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection
    from redis.retry import Retry

    host, port = address
    kind = Connection if settings.tls is None else SSLConnection
    connection: Any = kind(
        host=host,
        port=port,
        username=settings.username,
        password=settings.password,
        protocol=2,  # What the lanes speak.
        retry=Retry(NoBackoff(), 0),
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        **_tls_arguments(settings.tls),
    )
    connection.connect()
    return connection


def _server_of(settings: RedisSettings) -> Any:
    _need_redis()
    from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    host, port = settings.addresses[0]
    pool = BlockingConnectionPool(
        max_connections=CONNECTIONS_MAX,
        timeout=None,  # The calls' own deadlines bound the wait.
        connection_class=Connection if settings.tls is None else SSLConnection,
        host=host,
        port=port,
        username=settings.username,
        password=settings.password,
        # A record changed by a call whose answer was lost must not be tried again and told LOST.
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        **_tls_arguments(settings.tls),
    )
    return Redis.from_pool(pool)


def _cluster_of(settings: RedisSettings) -> Any:
    _need_redis()
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    more = _tls_arguments(settings.tls)
    if more:
        more["ssl"] = True
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in settings.addresses],
        username=settings.username,
        password=settings.password,
        require_full_coverage=False,  # What nodes are there serve what is theirs.
        max_connections=2 * CONNECTIONS_MAX,
        retry=Retry(NoBackoff(), 0),  # As above; slots that have moved are followed all the same.
        socket_timeout=None,
        **more,
    )


def _tls_arguments(tls: RedisTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_ca_certs": tls.authorities,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.private_key,
        "ssl_check_hostname": tls.check_hostname,
        "ssl_cert_reqs": "required",
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }


def _need_redis() -> None:
    try:
        import redis.asyncio  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a Redis tier needs kvtier[remote] ({error})") from None
