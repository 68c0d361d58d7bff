"""What may happen to a Redis: users, certificates, kill -9, SIGSTOP, no room, lies, a lost node."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.codec.codecs import CodecId
from kvtier.pools.remote.breaker import BreakerState
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome
from kvtier.pools.remote.epochs import EpochTimes, EpochWatch
from kvtier.pools.remote.frame import FrameFault
from kvtier.pools.remote.redis import RedisEngine, RedisSettings, RedisTls
from tests.support.forms import rounds, state_finding
from tests.support.redis_server import RedisServer, needs_redis, redis_cluster, redis_server
from tests.support.remote_rig import FINGERPRINT, RemoteRig
from tests.support.remote_traffic import SLACK_SECONDS, Traffic

pytestmark = [needs_redis, pytest.mark.slow]

DONE, ABSENT = RemoteOutcome.DONE, RemoteOutcome.ABSENT


Cluster = tuple[list[RedisServer], RedisSettings]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all; each test leaves its nodes running."""
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        addresses = tuple(("127.0.0.1", server.port) for server in servers)
        yield servers, RedisSettings(addresses, is_cluster=True)


def settings_of(server: RedisServer, **more: Any) -> RedisSettings:
    return RedisSettings((("127.0.0.1", server.port),), **more)


def play(
    settings: RedisSettings, work: Callable[[RemoteRig], Awaitable[None]], **more: Any
) -> None:
    async def main() -> None:
        rig = RemoteRig(RedisEngine(settings), **more)
        try:
            await work(rig)
        finally:
            await rig.close()

    asyncio.run(main())


def test_a_password_is_given_and_a_wrong_one_refused(tmp_path: Path) -> None:
    acl = ["--user", "kvtier", "on", ">secret", "~kvtier1/*", "+@all", "-@dangerous", "+info"]
    acl += ["--user", "default", "off"]

    async def right(rig: RemoteRig) -> None:
        assert await rig.put([1, 2]) == [DONE, DONE]
        assert await rig.get([1, 2]) == [DONE, DONE]
        replaced = await rig.engine.replace_record(
            RemoteKey("kvtier1/r"), expected=None, value=b"1", timeout_seconds=5.0
        )
        assert replaced is DONE
        outcome = await rig.engine.exists([RemoteKey("another/user")], timeout_seconds=5.0)
        assert outcome == [RemoteOutcome.REFUSED], "the server keeps us to our own keys"

    async def wrong(rig: RemoteRig) -> None:
        assert await rig.put([3]) == [RemoteOutcome.REFUSED]
        assert await rig.get([1]) == [RemoteOutcome.REFUSED]

    with redis_server(tmp_path, acl) as server:
        play(settings_of(server, username="kvtier", password="secret"), right)
        play(settings_of(server, username="kvtier", password="wrong"), wrong)
        play(settings_of(server), wrong)


def make_certificates(folder: Path) -> None:
    """An authority, a server and a client certificate by it, and another authority."""
    script = """
    set -e
    new="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    ca() { openssl req -x509 $new -days 2 -subj "/CN=$1" \
        -keyout "$1.key" -out "$1.crt"; }
    by_ca() { openssl req $new -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
        printf 'subjectAltName=IP:127.0.0.1' > "$1.ext"
        openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
            -extfile "$1.ext" -out "$1.crt"; }
    ca ca; ca other; by_ca server; by_ca client
    """
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_needs_the_right_authority_and_our_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    arguments = ["--tls-cert-file", str(tmp_path / "server.crt")]
    arguments += ["--tls-key-file", str(tmp_path / "server.key")]
    arguments += ["--tls-ca-cert-file", str(tmp_path / "ca.crt"), "--tls-auth-clients", "yes"]

    def tls(authority: str, *, known: bool = True) -> RedisTls:
        own = (str(tmp_path / "client.crt"), str(tmp_path / "client.key")) if known else (None,) * 2
        return RedisTls(str(tmp_path / f"{authority}.crt"), *own)

    async def right(rig: RemoteRig) -> None:
        assert await rig.put(range(5)) == [DONE] * 5
        assert await rig.get(range(5)) == [DONE] * 5

    async def wrong(rig: RemoteRig) -> None:
        assert await rig.put([9], timeout_seconds=5.0) == [RemoteOutcome.UNREACHABLE]

    with redis_server(tmp_path / "server", arguments, tls=True) as server:
        play(settings_of(server, tls=tls("ca")), right)
        play(settings_of(server, tls=tls("other")), wrong)
        play(settings_of(server, tls=tls("ca", known=False)), wrong)
        play(settings_of(server), wrong)


@pytest.mark.full_form
def test_a_server_that_is_killed_and_comes_back_costs_misses_only(tmp_path: Path) -> None:
    kills = rounds(short=2, full=40)

    async def work(rig: RemoteRig) -> None:
        traffic = Traffic(rig, 1)
        for _ in range(kills):
            await traffic.run_until(DONE)
            await traffic.run_while(server.kill)
            await traffic.run_until(RemoteOutcome.UNREACHABLE)
            await traffic.run_until(RemoteOutcome.OFF)
            await asyncio.to_thread(server.start)
            await traffic.run_until(DONE)
        traffic.check()
        assert rig.breaking.troubles["unreachable"] >= kills
        state_finding(f"redis killed {kills} times: {dict(traffic.endings)}")

    with redis_server(tmp_path) as server:
        play(settings_of(server), work, codec=CodecId.PLANES_LZ4)


@pytest.mark.full_form
def test_a_server_that_stands_still_costs_deadlines_and_then_nothing(tmp_path: Path) -> None:
    stops = rounds(short=2, full=40)

    async def work(rig: RemoteRig) -> None:
        traffic = Traffic(rig, 2, deadline_seconds=0.25)
        for _ in range(stops):
            await traffic.run_until(DONE)
            server.stop()
            await traffic.run_until(RemoteOutcome.TIMED_OUT)
            await traffic.run_until(RemoteOutcome.OFF)
            assert await traffic.seconds_of_an_off() < 0.1, "an open breaker does not wait"
            server.resume()
            await traffic.run_until(DONE)
        traffic.check()
        state_finding(f"redis stopped {stops} times: {dict(traffic.endings)}")

    with redis_server(tmp_path) as server:
        play(settings_of(server), work)


def test_a_put_that_timed_out_sends_nothing_of_what_its_slots_hold_afterwards(
    tmp_path: Path,
) -> None:
    """Blocks are sent from their slots, which are others' when the put has returned."""

    async def work(rig: RemoteRig) -> None:
        blocks = [rig.views_of(number) for number in range(4)]
        assert await rig.put([9]) == [DONE], "connected"
        server.stop()
        endings = await rig.blocks.put(blocks, timeout_seconds=0.3)
        for one in blocks:
            for shard in one.shards:
                shard.fill(0xEE)
        server.resume()
        assert RemoteOutcome.TIMED_OUT in endings
        await asyncio.sleep(0.3)
        assert set(await rig.get(range(4))) <= {DONE, ABSENT}, "torn"

    with redis_server(tmp_path) as server:
        play(settings_of(server), work, payload_bytes=4 << 20)


def test_a_server_without_room_refuses_and_serves_what_it_has(tmp_path: Path) -> None:
    arguments = ["--maxmemory", "12mb", "--maxmemory-policy", "noeviction"]

    async def work(rig: RemoteRig) -> None:
        kept = []
        for number in range(8):
            [ending] = await rig.put([number])
            if ending is DONE:
                kept.append(number)
            else:
                assert ending in (RemoteOutcome.FULL, RemoteOutcome.OFF)
        assert 0 < len(kept) < 8
        assert rig.breaking.writing_state is BreakerState.OPEN
        assert set(await rig.get(kept)) == {DONE}
        changed = await rig.engine.replace_record(
            RemoteKey("kvtier1/r"), expected=None, value=b"1", timeout_seconds=5.0
        )
        assert changed is DONE, "a clear must be possible when nothing else is"
        health = await rig.engine.health(timeout_seconds=5.0)
        assert health.capacity_bytes == 12 << 20

    with redis_server(tmp_path, arguments) as server:
        play(settings_of(server), work, payload_bytes=2_000_000)


def test_what_a_server_evicts_is_a_miss(tmp_path: Path) -> None:
    arguments = ["--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru"]

    async def work(rig: RemoteRig) -> None:
        for number in range(20):
            assert await rig.put([number]) == [DONE]
        endings = await rig.get(range(20))
        assert set(endings) == {DONE, ABSENT}
        assert endings[19] is DONE

    with redis_server(tmp_path, arguments) as server:
        play(settings_of(server), work, payload_bytes=1_000_000)


def test_values_live_as_long_as_they_may(tmp_path: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        assert await rig.put([1]) == [DONE]
        assert await rig.get([1]) == [DONE]
        await asyncio.sleep(0.5)
        assert await rig.get([1]) == [ABSENT]

    with redis_server(tmp_path) as server:
        play(settings_of(server, lifetime_seconds=0.4), work)


def test_a_server_that_lies_is_a_miss(tmp_path: Path) -> None:
    async def work(rig: RemoteRig) -> None:
        assert await rig.put([1, 2, 3, 4]) == [DONE] * 4
        server.ask("copy", rig.key_of(2), rig.key_of(1), "replace")
        server.ask("setrange", rig.key_of(3), "5000", "other bytes")
        server.ask("append", rig.key_of(4), "more")
        endings = await rig.get([1, 2, 3, 4])
        assert endings == [FrameFault.HASH, DONE, FrameFault.TORN, FrameFault.LENGTH]
        server.ask("del", rig.key_of(1))
        server.ask("lpush", rig.key_of(1), "a list")
        assert await rig.get([1, 2]) == [RemoteOutcome.FAILED, DONE]

    with redis_server(tmp_path) as server:
        play(settings_of(server), work)


@pytest.mark.timeout(180)
def test_a_node_that_stands_still_takes_no_thread_from_the_others(cluster: Cluster) -> None:
    async def work(rig: RemoteRig) -> None:
        keys = [rig.key_of(number) for number in range(60)]
        assert set(await rig.put(range(60))) == {DONE}
        warming = [
            rig.engine.get([key], value_bytes_max=1 << 20, timeout_seconds=5.0) for key in keys * 3
        ]
        await asyncio.gather(*warming)  # Connections to every node, as many as there may be.
        servers[2].stop()
        for _ in range(6):
            replies = await rig.engine.get(keys, value_bytes_max=1 << 20, timeout_seconds=0.5)
            outcomes = Counter(reply.outcome for reply in replies)
            assert outcomes[DONE] >= 20, outcomes
            assert outcomes[RemoteOutcome.TIMED_OUT] >= 5, outcomes
        servers[2].resume()

    servers, settings = cluster
    play(settings, work)


def move_slots(source: RedisServer, target: RedisServer, keys: list[RemoteKey]) -> int:
    """The first three slots of these keys that the source has, and how many keys are in them."""
    slots: dict[str, list[str]] = {}
    for key in keys:
        slots.setdefault(source.ask("cluster", "keyslot", key), []).append(key)
    here = [slot for slot, (key, *_) in slots.items() if source.ask("exists", key) == "1"][:3]
    names = {server: server.ask("cluster", "myid") for server in (source, target)}
    for slot in here:
        target.ask("cluster", "setslot", slot, "importing", names[source])
        source.ask("cluster", "setslot", slot, "migrating", names[target])
        for key in slots[slot]:
            source.ask("migrate", "127.0.0.1", str(target.port), key, "0", "5000")
        for server in (target, source):
            server.ask("cluster", "setslot", slot, "node", names[target])
    return sum(len(slots[slot]) for slot in here)


@pytest.mark.timeout(180)
def test_slots_that_move_to_another_node_are_followed(cluster: Cluster) -> None:
    async def work(rig: RemoteRig) -> None:
        assert set(await rig.put(range(30))) == {DONE}
        moved = move_slots(servers[0], servers[1], [rig.key_of(number) for number in range(30)])
        assert moved > 0
        endings = await rig.get(range(30))
        assert endings.count(RemoteOutcome.UNREACHABLE) == moved, "the old place says MOVED"
        until = time.monotonic() + 10.0
        while set(await rig.get(range(30))) != {DONE}:
            assert time.monotonic() < until, "the new places are not learned"
            await asyncio.sleep(0.1)

    servers, settings = cluster
    play(settings, work)


@pytest.mark.timeout(180)
def test_a_cluster_that_loses_a_node_serves_what_the_others_have(cluster: Cluster) -> None:
    async def work(rig: RemoteRig) -> None:
        numbers = range(60)
        assert set(await rig.put(numbers)) == {DONE}
        servers[1].kill()
        seen: Counter[RemoteOutcome | FrameFault] = Counter()
        for start in range(0, 60, 20):
            began = time.monotonic()
            seen.update(await rig.get(numbers[start : start + 20], timeout_seconds=1.0))
            assert time.monotonic() - began < 1.0 + SLACK_SECONDS
        assert seen[DONE] >= 15, seen
        servers[1].start()
        until = time.monotonic() + 20.0
        while DONE not in set(await rig.put(numbers)) or set(await rig.get(numbers)) != {DONE}:
            assert time.monotonic() < until, "the node's part is not used again"
            await asyncio.sleep(0.1)

    servers, settings = cluster
    play(settings, work)


def test_two_daemons_follow_one_epoch_and_a_clear_is_acknowledged(tmp_path: Path) -> None:
    times = EpochTimes(view_seconds=1.5, refresh_seconds=0.2, call_seconds=0.8)

    def watch_of(engine: RedisEngine, seed: int) -> EpochWatch:
        chance = random.Random(seed)
        return EpochWatch(
            engine,
            FINGERPRINT,
            chance.randbytes(16),
            clock=SystemClock(),
            draw=chance.getrandbits,
            times=times,
        )

    async def main() -> None:
        engines = [RedisEngine(settings_of(server)) for _ in range(2)]
        one, other = (watch_of(engine, seed) for seed, engine in enumerate(engines))
        following = [asyncio.ensure_future(watch.follow()) for watch in (one, other)]
        await asyncio.sleep(1.7)
        old = one.current_epoch()
        assert old is not None
        assert other.current_epoch() == old
        done = await one.clear()
        assert done.is_acknowledged
        assert one.current_epoch() == other.current_epoch() == done.epoch != old
        server.kill()
        await asyncio.sleep(1.6)
        assert one.current_epoch() is other.current_epoch() is None, "unreadable: off"
        server.start()
        await asyncio.sleep(0.7)
        assert one.current_epoch() == other.current_epoch() not in (None, old, done.epoch)
        for task in following:
            task.cancel()
        for engine in engines:
            await engine.close()

    with redis_server(tmp_path) as server:
        asyncio.run(main())
