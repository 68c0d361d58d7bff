"""What tests of all four tiers share: emulated CXL, a file as pool, a folder as remote engine."""

from __future__ import annotations

from pathlib import Path

from kvtier.pools.remote.files import prepare_root
from tests.support.daemon import RunningDaemon
from tests.support.nvme_daemon import SEGMENT_BYTES, make_pool, wait_metric, wait_state


def four_tier_options(
    folder: Path,
    *,
    cxl_bytes: int,
    nvme_bytes: int,
    remote_bytes: int = 4 << 30,
    segment_bytes: int = SEGMENT_BYTES,
) -> dict[str, str]:
    """Makes the pool and the folder; the daemon's options."""
    make_pool(folder / "pool", pool_bytes=nvme_bytes, segment_bytes=segment_bytes)
    prepare_root(folder / "share")
    return {
        "cxl.emulate": "4GB/s,400ns",
        "cxl.bytes": str(cxl_bytes),
        "cxl.slab_bytes": "2MiB",
        "nvme.paths": str(folder / "pool"),
        "nvme.write_bytes_per_hour": "1TiB",
        "remote.engine": "files",
        "remote.path": str(folder / "share"),
        "remote.capacity_bytes": str(remote_bytes),
        "remote.timeout_seconds": "5",
    }


def wait_four_tiers(daemon: RunningDaemon) -> None:
    wait_state(daemon, "on")
    wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
    daemon.wait_populated()
