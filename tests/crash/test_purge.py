"""A purge that kill -9 cuts off, again and again: it completes, and nothing of the tenant is left.

Searched for by content: in the pool's file, in the daemon's slabs, in the remote folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.errors import KVTierError
from kvtier.pools.remote.files import prepare_root
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.forms import is_torture, rounds, state_finding
from tests.support.marked_blocks import hit_count, mark_of, places_with, put
from tests.support.nvme_daemon import make_pool, wait_metric
from tests.support.processes import eventually
from tests.support.purging_daemon import PROGRAM, VARIABLE
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
    pool: Path
    share: Path
    deaths: Path

    def client(self, owner: str) -> Client:
        return Client(self.tenants.socket(owner), settings=PATIENT)

    def found(self, owner: str) -> list[str]:
        pid = self.tenants.daemon.process.pid
        return places_with(mark_of(owner), pid, [self.pool, self.share])

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
def running_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    pool, share, deaths = tmp_path / "pool", tmp_path / "share", tmp_path / "deaths"
    make_pool(pool, pool_bytes=rounds(short=64, full=256) << 20)
    prepare_root(share)
    deaths.touch()
    monkeypatch.setenv(VARIABLE, str(deaths))
    options = {
        "nvme.paths": str(pool),
        "nvme.write_bytes_per_hour": "1TiB",
        "nvme.table_seconds": "0.05",
        "remote.engine": "files",
        "remote.path": str(share),
        "remote.capacity_bytes": "4GiB",
        "remote.codec": "none",
        "cxl.emulate": "8GB/s,400ns",
        "cxl.bytes": "16MiB",
        "cxl.slab_bytes": "2MiB",
        "lease.grace_seconds": "0.1",
    }
    dram = f"{rounds(short=32, full=160)}MiB"
    with running_tenants({"a": {}, "b": {}}, options, dram_bytes=dram, program=PROGRAM) as tenants:
        yield Story(tenants, pool, share, deaths)


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


@pytest.mark.parametrize("deaths", [[one] for one in POINTS] if is_torture() else SHORT)
def test_a_purge_completes_whatever_kills_the_daemon_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str]
) -> None:
    with running_story(tmp_path, monkeypatch) as story:
        mine, others = fill(story)
        for owner in ("a", "b"):  # Else the search would prove nothing.
            kinds = story.found(owner)
            assert str(story.pool) in kinds
            assert any("memfd" in one for one in kinds)
            assert any(str(story.share) in one for one in kinds)
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
                state_finding(f"purge killed at {deaths}: {found} hits of another tenant")
            put(one, "a", 8, "again")  # It may begin anew.
        with Client(daemon.socket, settings=PATIENT) as client:
            assert client.wait_connected(10)
            assert not client.check().violations
