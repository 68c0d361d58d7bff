"""A daemon with a CXL tier between memory and NVMe; the memory is ordinary, slowed down."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, offload, onboard, spec_of
from tests.support.nvme_daemon import client_of, make_pool, wait_below, wait_metric
from tests.support.processes import eventually

CHAIN = 8
DRAM_BYTES = 8 << 20
CXL_BYTES = 32 << 20
IN_DRAM = DRAM_BYTES // SHARD_BYTES
CXL_BLOCKS = 'kvtier_tier_blocks{tier="cxl"}'
CXL_HITS = 'kvtier_hit_blocks_total{call="acquire",tier="cxl"}'


@contextlib.contextmanager
def running_cxl_daemon(options: Mapping[str, str] | None = None) -> Iterator[RunningDaemon]:
    settings = {
        "cxl.emulate": "4GB/s,400ns",
        "cxl.bytes": str(CXL_BYTES),
        "cxl.slab_bytes": "2MiB",
        "lease.grace_seconds": "0.1",
        **(options or {}),
    }
    with running_daemon(dram_bytes=str(DRAM_BYTES), slab_bytes="2MiB", options=settings) as daemon:
        daemon.wait_populated()
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        assert daemon.metrics()['kvtier_tier_populated_bytes{tier="cxl"}'] == CXL_BYTES
        yield daemon


def chain(number: int) -> list[bytes]:
    return chain_hashes(f"chain {number}", CHAIN)


def test_what_memory_gave_up_comes_back_from_cxl_byte_for_byte() -> None:
    with running_cxl_daemon() as daemon, client_of(daemon) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_connected(10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
        count = 3 * IN_DRAM // CHAIN  # Three times what memory holds, and less than the tier does.
        for number in range(count):
            assert offload(client, namespace, chain(number)) == CHAIN
            wait_metric(daemon, CXL_BLOCKS, (number + 1) * CHAIN)
        hits = [
            onboard(client, namespace, chain(number), wait_seconds=5.0) for number in range(count)
        ]
        assert hits == [CHAIN] * count
        metrics = daemon.metrics()
        assert metrics[CXL_HITS] >= (count * CHAIN) - IN_DRAM
        asked = metrics['kvtier_asked_blocks_total{call="acquire"}']
        answered = sum(
            value
            for name, value in metrics.items()
            if name.startswith("kvtier_hit_blocks_total") and "acquire" in name
        )
        assert answered + metrics['kvtier_miss_blocks_total{call="acquire"}'] == asked
        assert metrics["kvtier_cxl_emulated_info"] == 1
        check_daemon(daemon)


def test_tier_that_overflows_forgets_its_oldest_and_never_gives_wrong_bytes() -> None:
    with running_cxl_daemon() as daemon, client_of(daemon) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_connected(10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
        count = 2 * CXL_BYTES // SHARD_BYTES // CHAIN
        for number in range(count):
            assert offload(client, namespace, chain(number)) == CHAIN
        found = [
            onboard(client, namespace, chain(number), wait_seconds=5.0)
            for number in reversed(range(count))
        ]
        kept = sum(found)
        assert kept >= CXL_BYTES // SHARD_BYTES // 2, f"{kept} blocks of {count * CHAIN}"
        assert found[0] == CHAIN, "the newest"
        assert found[-1] == 0, "the oldest"
        check_daemon(daemon)


def test_each_tier_of_three_serves_and_a_restart_keeps_what_is_on_nvme(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool", pool_bytes=128 << 20)
    options = {
        "nvme.paths": str(tmp_path / "pool"),
        "nvme.write_bytes_per_hour": "1TiB",
        "nvme.table_seconds": "0.05",
    }
    with running_cxl_daemon(options) as daemon:
        count = 3 * CXL_BYTES // 2 // SHARD_BYTES // CHAIN  # More than the CXL tier holds.
        with client_of(daemon) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_connected(10)
            eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
            for number in range(count):
                assert offload(client, namespace, chain(number)) == CHAIN
                wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', (number + 1) * CHAIN)
            wait_below(daemon, count * CHAIN)
            newest_first = reversed(range(count))
            hits = [onboard(client, namespace, chain(n), wait_seconds=5.0) for n in newest_first]
            assert hits == [CHAIN] * count
            metrics = daemon.metrics()
            served = {
                tier: metrics[f'kvtier_hit_blocks_total{{call="acquire",tier="{tier}"}}']
                for tier in ("dram", "cxl", "nvme")
            }
            assert all(value >= 0.05 * count * CHAIN for value in served.values()), served
            check_daemon(daemon)
        daemon.kill()
        daemon.start()
        wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', 0)
        with client_of(daemon) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_connected(10)
            eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
            eventually(
                lambda: client.match(namespace, chain(0)).matched_count == CHAIN, "recovered"
            )
            hits = [onboard(client, namespace, chain(n), wait_seconds=5.0) for n in range(count)]
            assert sum(hits) >= 0.95 * count * CHAIN


def test_tier_is_called_emulated_where_people_look() -> None:
    with running_cxl_daemon() as daemon:
        told = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvtier.cli.main",
                "stats",
                "--json",
                "--socket",
                str(daemon.socket),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        [tier] = [one for one in json.loads(told.stdout)["tiers"] if one["tier"] == "cxl"]
        assert tier["memory"] == "emulated: 4 GB/s, 400 ns"
        [opened] = [line for line in daemon.log_text.splitlines() if "cxl tier opened" in line]
        told_speed = re.search(r"read=\"([\d.]+) GB/s\"", opened)
        assert told_speed is not None, opened
        assert 0 < float(told_speed[1]) < 4.8, "measured, and slowed down"


def check_daemon(daemon: RunningDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "check", "--socket", str(daemon.socket)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
