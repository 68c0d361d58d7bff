"""Tenants with one prompt each keep to their own bytes, over hot restarts and on NVMe."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.types import Role
from tests.support.hot_restart import OPTIONS, TAKEN_OVER, running_holder
from tests.support.known_blocks import chain_hashes, spec_of
from tests.support.nvme_daemon import PATIENT, make_pool, wait_below, wait_state
from tests.support.processes import eventually
from tests.support.tenant_daemon import Tenants, running_tenants

COUNT = 8
HASHES = chain_hashes("one prompt", COUNT)
BYTE_OF = {"red": 1, "blue": 2}

pytestmark = pytest.mark.slow


def opened(client: Client) -> Namespace:
    namespace = client.open_namespace(spec_of())
    assert client.wait_namespace(namespace, 10)
    return namespace


def client_of(tenants: Tenants, name: str) -> Client:
    return Client(tenants.socket(name), role=Role.TOOL, settings=PATIENT)


def put(tenants: Tenants, name: str) -> None:
    with client_of(tenants, name) as client:
        namespace = opened(client)
        data = bytes([BYTE_OF[name]]) * namespace.spec.shard_bytes
        assert client.put(namespace, [(one, data) for one in HASHES]).ready_count == COUNT


def check_own_bytes(tenants: Tenants, name: str) -> None:
    with client_of(tenants, name) as client:
        namespace = opened(client)
        found: list[bytes] = []

        def is_all() -> bool:
            found[:] = client.get(namespace, HASHES)
            return len(found) == COUNT

        eventually(is_all, f"all blocks of {name}")
        assert {byte for one in found for byte in set(one)} == {BYTE_OF[name]}
        assert not client.match(namespace, chain_hashes("another", COUNT)).matched_count


def test_each_tenant_finds_its_own_bytes_after_a_hot_restart_and_after_a_cold_one(
    tmp_path: Path,
) -> None:
    pool = tmp_path / "pool"
    make_pool(pool)
    with running_holder() as holder:
        options = {
            **OPTIONS,
            "restart.holder": str(holder.path),
            "nvme.paths": str(pool),
            "nvme.write_bytes_per_hour": "1TiB",
            "nvme.table_seconds": "0.05",
        }
        with running_tenants({"red": {}, "blue": {}}, options) as tenants:
            daemon = tenants.daemon
            daemon.wait_populated()
            for name in BYTE_OF:
                put(tenants, name)
            wait_below(daemon, 2 * COUNT)
            daemon.restart()
            eventually(lambda: bool(tenants.lines(TAKEN_OVER)), "memory is taken over")
            for name in reversed(BYTE_OF):
                check_own_bytes(tenants, name)
            daemon.set_option("restart.keep", "off")
            owners = daemon.state_dir / "owners"
            known = set(owners.iterdir())
            (owners / f"{bytes(16).hex()}.tenant").write_text("red")  # Of which nothing is left.
            daemon.restart()
            wait_state(daemon, "on")
            eventually(lambda: set(owners.iterdir()) == known, "it is forgotten, and no other")
            for name in BYTE_OF:
                check_own_bytes(tenants, name)


def test_the_memory_of_a_tenant_that_is_no_more_is_let_go(tmp_path: Path) -> None:
    with running_holder() as holder:
        options = {**OPTIONS, "restart.holder": str(holder.path)}
        with running_tenants({"red": {}, "blue": {}}, options) as tenants:
            daemon = tenants.daemon
            daemon.wait_populated()
            for name in BYTE_OF:
                put(tenants, name)
            daemon.kill()
            for option in list(daemon._options):
                if option.startswith("tenant.red."):
                    del daemon._options[option]
            daemon.start()
            eventually(lambda: bool(tenants.lines(TAKEN_OVER)), "memory is taken over")
            assert len(tenants.lines("'red' is no tenant of this daemon any more")) == 1
            check_own_bytes(tenants, "blue")
