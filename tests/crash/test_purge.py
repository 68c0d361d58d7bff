"""A purge that kill -9 cuts off, again and again: it completes, and nothing of the tenant is left.

Searched for by content: in the pool's file or device, in the daemon's slabs and those that a holder
keeps for it, in the remote folder, and in all that a Redis would write down of itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.errors import KVTierError
from kvtier.pools.remote.files import prepare_root
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.hot_restart import running_holder
from tests.support.marked_blocks import hit_count, mark_of, places_with, put
from tests.support.nvme_daemon import make_pool, wait_metric
from tests.support.processes import eventually
from tests.support.purging_daemon import PROGRAM, VARIABLE
from tests.support.redis_server import needs_redis, redis_server
from tests.support.tenant_daemon import Tenants, running_tenants

POINTS = [
    *("begin counting", "begin voiding", "begin dram", "add dram", "begin cxl", "add cxl"),
    *("begin nvme", "add nvme", "term nvme", "begin remote", "add remote"),
    *("begin books", "begin report"),
]
# One after the other, in one purge: each life gets a little further than the one before.
SHORT = [["add dram", "add nvme", "add remote"]]
CHAIN = 40
PATIENT = ClientSettings(
    timeout_seconds=10.0, stream_timeout_seconds=120.0, admin_timeout_seconds=30.0
)
REMOTE = 'kvtier_tier_blocks{tier="remote"}'
NVME = 'kvtier_tier_blocks{tier="nvme"}'

pytestmark = [pytest.mark.slow, pytest.mark.full_form, pytest.mark.timeout(600)]


@dataclass
class Story:
    tenants: Tenants
    deaths: Path
    paths: list[Path]  # Where blocks lie, each by itself …
    holders: list[int] = field(default_factory=list)  # … and who keeps memory besides.
    write_down: Callable[[], object] = lambda: None

    def client(self, owner: str) -> Client:
        return Client(self.tenants.socket(owner), settings=PATIENT)

    def found(self, owner: str) -> list[str]:
        self.write_down()
        mark = mark_of(owner)
        found = places_with(mark, self.tenants.daemon.process.pid, self.paths)
        return found + [
            f"holder {place}" for pid in self.holders for place in places_with(mark, pid, [])
        ]

    def purge(self, request: pb.PurgeRequest) -> pb.PurgeResponse:
        """Begun, or asked for, by the operator."""
        with Client(self.tenants.daemon.socket, settings=PATIENT) as client:
            assert client.wait_connected(10)
            return client.purge(request)

    def report(self, purge: str) -> dict[str, object]:
        state: list[pb.PurgeResponse] = []

        def is_over() -> bool:
            state[:] = [self.purge(pb.PurgeRequest(purge=purge))]
            return bool(state[0].report)

        eventually(is_over, "the purge ends", 30.0)
        report: dict[str, object] = json.loads(state[0].report)
        return report


@contextmanager
def running_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> Iterator[Story]:
    """`place`: files beside a daemon whose memory ends with it, or a Redis beside a holder."""
    pool, deaths = tmp_path / "pool", tmp_path / "deaths"
    make_pool(pool, pool_bytes=rounds(short=64, full=256) << 20)
    deaths.touch()
    monkeypatch.setenv(VARIABLE, str(deaths))
    options = {
        "nvme.paths": str(pool),
        "nvme.write_bytes_per_hour": "1TiB",
        "nvme.table_seconds": "0.05",
        "remote.engine": place,
        "remote.codec": "none",
        "cxl.emulate": "8GB/s,400ns",
        "cxl.bytes": "16MiB",
        "cxl.slab_bytes": "2MiB",
        "lease.grace_seconds": "0.1",
    }
    with ExitStack() as running:
        remote = tmp_path / place
        holders, write_down = [], lambda: None
        if place == "files":
            prepare_root(remote)
            options |= {"remote.path": str(remote), "remote.capacity_bytes": "4GiB"}
        else:
            server = running.enter_context(redis_server(remote, ["--rdbcompression", "no"]))
            holder = running.enter_context(running_holder())
            # Nothing that it has taken over is evicted before leases of the life before have ended.
            options |= {"lease.seconds_max": "1", "lease.margin_seconds": "0.2"}
            options |= {"remote.addresses": f"127.0.0.1:{server.port}"}
            options |= {"restart.holder": str(holder.path)}
            holders, write_down = [holder.process.pid], lambda: server.ask("save")
        dram = f"{rounds(short=32, full=160)}MiB"
        named = {"a": {}, "b": {}}
        tenants = running.enter_context(
            running_tenants(named, options, dram_bytes=dram, program=PROGRAM)
        )
        yield Story(tenants, deaths, [pool, remote], holders, write_down)


def fill(story: Story) -> tuple[list[bytes], list[list[bytes]]]:
    """Blocks of both tenants, everywhere: of the one a chain, of the other as many as it takes."""
    daemon = story.tenants.daemon
    daemon.wait_populated()
    wait_metric(daemon, 'kvtier_nvme_state{state="on"}', 1)
    chain_count = rounds(short=1, full=25)
    count = CHAIN * chain_count
    with story.client("a") as one, story.client("b") as other:
        mine = put(one, "a", CHAIN)
        others = [put(other, "b", CHAIN, str(number)) for number in range(chain_count)]
        # Twice used, so that every tier keeps them.
        assert hit_count(one, "a", mine) == CHAIN
        assert sum(hit_count(other, "b", chain) for chain in others) == count
        for tier in (NVME, REMOTE):
            wait_metric(daemon, tier, CHAIN + count)
    time.sleep(0.3)  # Several turns of the slot table's timer.
    return mine, others


@pytest.mark.parametrize("place", ["files", pytest.param("redis", marks=needs_redis)])
@pytest.mark.parametrize("deaths", [[one] for one in POINTS] if is_torture() else SHORT)
def test_a_purge_completes_whatever_kills_the_daemon_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str], place: str
) -> None:
    with running_story(tmp_path, monkeypatch, place) as story:
        mine, others = fill(story)
        for owner in ("a", "b"):  # Else the search would prove nothing.
            kinds = story.found(owner)
            assert any(one.startswith("holder") for one in kinds) == bool(story.holders)
            for wanted in (*map(str, story.paths), "memfd"):
                assert any(wanted in one for one in kinds), (wanted, kinds)
        daemon = story.tenants.daemon
        story.deaths.write_text("\n".join(deaths))
        with suppress(KVTierError):  # It may end before it answers.
            story.purge(pb.PurgeRequest(tenant="a"))
        eventually(lambda: daemon.process.poll() is not None, "it dies for the first time")
        [record] = (daemon.state_dir / "purges").glob("*.json")
        for _ in deaths:
            daemon.process.wait(20)
            daemon.kill()
            daemon.start()
        report = story.report(record.stem)
        assert (report["state"], report["not_done"]) == ("done", [])
        assert report["begun_count"] == len(deaths) + 1
        assert story.found("a") == []
        assert not list((daemon.state_dir / "owners").glob("*")) or story.found("b")
        with story.client("a") as one, story.client("b") as other:
            assert hit_count(one, "a", mine) == 0
            found = sum(hit_count(other, "b", chain) for chain in others)
            assert found >= 0.95 * CHAIN * len(others)
            if is_torture():
                state_finding(f"purge killed at {deaths}, {place}: {found} hits of another tenant")
            put(one, "a", 8, "again")  # It may begin anew.
        with Client(daemon.socket, settings=PATIENT) as client:
            assert client.wait_connected(10)
            assert not client.check().violations
