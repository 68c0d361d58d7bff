"""One daemon with all four tiers, under a working set twenty times as large as its memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.client import Client, ClientSettings
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.forms import rounds, state_finding
from tests.support.four_tiers import four_tier_options, wait_four_tiers
from tests.support.known_blocks import SHARD_BYTES, chain_hashes, offload, onboard, spec_of
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import eventually

TIERS = ("dram", "cxl", "nvme", "remote")
CHAIN = 8
DRAM_BYTES, CXL_BYTES, NVME_BYTES = 4 << 20, 16 << 20, 32 << 20
CHAINS = 20 * DRAM_BYTES // SHARD_BYTES // CHAIN
PATIENT = ClientSettings(timeout_seconds=10.0)


@pytest.mark.slow
@pytest.mark.full_form
def test_each_tier_serves_its_part_with_right_bytes(tmp_path: Path) -> None:
    chance = random.Random(6)
    chains = [chain_hashes(f"chain {number}", CHAIN) for number in range(CHAINS)]
    options = four_tier_options(tmp_path, cxl_bytes=CXL_BYTES, nvme_bytes=NVME_BYTES)
    with running_daemon(dram_bytes=str(DRAM_BYTES), slab_bytes="2MiB", options=options) as daemon:
        wait_four_tiers(daemon)
        with Client(daemon.socket, settings=PATIENT) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_connected(10)
            eventually(lambda: client.arena(namespace).mapped_slot_count > 0, "slots")
            for number, hashes in enumerate(chains):
                assert offload(client, namespace, hashes) == CHAIN
                assert onboard(client, namespace, hashes) == CHAIN  # Used twice: for all tiers.
                wait_metric(daemon, 'kvtier_tier_blocks{tier="remote"}', (number + 1) * CHAIN)
            before = hits(daemon)
            recent = chains[-4:]
            got_count = 0
            asked_count = rounds(full=2700, short=150)
            for _ in range(asked_count):
                # Most of what is asked for was not long ago, as users do.
                hashes = chance.choice(recent if chance.random() < 0.2 else chains)
                recent = [*recent[1:], hashes]
                got_count += onboard(client, namespace, hashes, wait_seconds=10.0)
            assert got_count >= 0.95 * asked_count * CHAIN
            after = hits(daemon)
        served = {tier: after[tier] - before[tier] for tier in TIERS}
        assert all(count >= 0.05 * sum(served.values()) for count in served.values()), served
        state_finding(f"{got_count} blocks of {asked_count * CHAIN} onboarded, by tier: {served}")
        metrics = daemon.metrics()
        asked = metrics['kvtier_asked_blocks_total{call="acquire"}']
        assert sum(after.values()) + metrics['kvtier_miss_blocks_total{call="acquire"}'] == asked
        checked = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "check", "--socket", str(daemon.socket)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def hits(daemon: RunningDaemon) -> dict[str, float]:
    metrics = daemon.metrics()
    return {
        tier: metrics[f'kvtier_hit_blocks_total{{call="acquire",tier="{tier}"}}'] for tier in TIERS
    }
