"""Purge, as those see it who ask for it, who must wait for it, and who may not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from kvtier.errors import Forbidden, UnknownNamespace
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.known_blocks import reserve
from tests.support.marked_blocks import hit_count, mark_of, opened, payload_of, places_with, put
from tests.support.processes import eventually
from tests.support.tenant_daemon import Tenants, running_tenants

COUNT = 12
PATIENT = ClientSettings(timeout_seconds=10.0, admin_timeout_seconds=30.0)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    names = {name: {} for name in ("a", "b", "c")}
    with running_tenants(names, {"lease.grace_seconds": "0.1"}, dram_bytes="32MiB") as running:
        running.daemon.wait_populated()
        yield running


def client_of(path: Path) -> Client:
    return Client(path, settings=PATIENT)


def purge(tenants: Tenants, *words: str) -> subprocess.CompletedProcess[str]:
    """By the operator's command."""
    command = [sys.executable, "-m", "kvtier.cli.main", "purge", *words]
    socket = str(tenants.daemon.socket)
    return subprocess.run(
        [*command, "--socket", socket], capture_output=True, text=True, timeout=60, check=False
    )


def is_found(tenants: Tenants, owner: str) -> bool:
    return bool(places_with(mark_of(owner), tenants.daemon.process.pid, []))


def test_slots_that_an_engine_maps_are_erased_and_the_report_says_so(tenants: Tenants) -> None:
    with client_of(tenants.socket("a")) as one, client_of(tenants.socket("b")) as other:
        namespace = opened(one, "a")
        eventually(lambda: one.arena(namespace).mapped_slot_count > 0, "slots are mapped")
        mine, others = put(one, "a", COUNT), put(other, "b", COUNT)
        assert is_found(tenants, "a")
        assert is_found(tenants, "b")
        done = purge(tenants, "--tenant", "a", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["state"] == "done"
        assert report["tiers"]["dram"]["blocks"] == COUNT
        assert report["tiers"]["dram"]["bytes"] >= COUNT * len(payload_of("a", mine[0]))
        assert not is_found(tenants, "a")
        assert hit_count(one, "a", mine) == 0
        assert hit_count(other, "b", others) == COUNT
        put(one, "a", COUNT, "again")
        for client in (one, other):
            client.close()
    with client_of(tenants.daemon.socket) as operator:
        assert operator.wait_connected(10)
        assert not operator.check().violations


def test_a_purge_waits_for_a_lease_and_for_slots_being_filled(tenants: Tenants) -> None:
    with client_of(tenants.socket("c")) as client:
        namespace = opened(client, "c")
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots are mapped")
        hashes = put(client, "c", COUNT)
        lease = client.acquire(namespace, hashes)
        assert len(lease.slots) == COUNT
        given = reserve(client, namespace, 1)
        asked = client.purge(pb.PurgeRequest(tenant="c"))

        def now() -> pb.PurgeResponse:
            return client.purge(pb.PurgeRequest(purge=asked.purge))

        text = f"{COUNT} slots under a lease, {len(given.slots)} that engines fill"
        eventually(lambda: text in now().waits, "it says what it waits for")
        assert client.purge(pb.PurgeRequest(tenant="c")).purge == asked.purge, "another one"
        assert len(client.reserve(namespace, 4).slots) == 0
        assert is_found(tenants, "c")
        client.release([lease])
        client.abort(namespace, given.slots, session=given.session)
        eventually(lambda: bool(now().report), "it ends")
        assert json.loads(now().report)["not_done"] == []
        assert not is_found(tenants, "c")


def test_one_tenant_cannot_purge_another(tenants: Tenants) -> None:
    with client_of(tenants.socket("a")) as one, client_of(tenants.socket("b")) as other:
        opened(other, "b")
        [theirs] = other.stats().namespaces
        assert one.wait_connected(10)
        for request in (
            pb.PurgeRequest(tenant="b"),
            pb.PurgeRequest(fingerprint=theirs.fingerprint),
        ):
            with pytest.raises(Forbidden):
                one.purge(request)
        with pytest.raises(UnknownNamespace):
            one.purge(pb.PurgeRequest(namespace_id=theirs.namespace_id))


def test_the_command_says_what_is_wrong(tenants: Tenants) -> None:
    done = purge(tenants, "--tenant", "nobody")
    assert done.returncode == 2
    assert "nothing is known of a tenant 'nobody'" in done.stderr
    assert purge(tenants, "--namespace", "not-a-number").returncode == 2
