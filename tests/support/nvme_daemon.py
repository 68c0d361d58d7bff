"""A private daemon with an NVMe pool of small segments, and what its tests ask of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvtier.client import Client, ClientSettings, Namespace
from kvtier.pools.nvme_paths import format_paths
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.known_blocks import check_payload, payload_of

SEGMENT_BYTES = 4 << 20
POOL_BYTES = 64 << 20
SECONDS_MAX = 20.0
# A machine that is busy with other tests is no matter here.
PATIENT = ClientSettings(timeout_seconds=5.0)


def make_pool(
    *paths: Path, pool_bytes: int = POOL_BYTES, segment_bytes: int = SEGMENT_BYTES
) -> None:
    format_paths(paths, pool_bytes, pool_id=b"p" * 16, generation=11, segment_bytes=segment_bytes)


@contextlib.contextmanager
def running_nvme_daemon(
    *paths: Path,
    dram_bytes: str = "32MiB",
    options: Mapping[str, str] | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[RunningDaemon]:
    """On a pool that exists; memory for few blocks, so that it is soon needed."""
    settings = {
        "nvme.paths": ",".join(map(str, paths)),
        "nvme.write_bytes_per_hour": "1TiB",
        "nvme.table_seconds": "0.05",
        "lease.grace_seconds": "0.1",
        **(options or {}),
    }
    with running_daemon(
        dram_bytes=dram_bytes, slab_bytes="4MiB", options=settings, program=program
    ) as daemon:
        wait_state(daemon, "on")
        daemon.wait_populated()
        yield daemon


def client_of(daemon: RunningDaemon) -> Client:
    return Client(daemon.socket, settings=PATIENT)


def wait_state(daemon: RunningDaemon, state: str) -> None:
    wait_metric(daemon, f'kvtier_nvme_state{{state="{state}"}}', 1)


def wait_metric(daemon: RunningDaemon, name: str, least: float) -> None:
    """Until the metric is at least that."""
    deadline = time.monotonic() + SECONDS_MAX
    while daemon.metrics().get(name, 0) < least:
        if time.monotonic() > deadline:
            found = {one: value for one, value in daemon.metrics().items() if value}
            raise TimeoutError(f"{name} is not {least} after {SECONDS_MAX} s: {found}")
        time.sleep(0.02)


def wait_below(daemon: RunningDaemon, count: int) -> None:
    """Until so many blocks are on NVMe, and the slot table says so."""
    wait_metric(daemon, 'kvtier_tier_blocks{tier="nvme"}', count)
    time.sleep(0.3)  # Several turns of the table's timer.


def put_all(
    client: Client, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None = None
) -> None:
    shard_bytes = namespace.spec.shard_bytes
    done = client.put(namespace, [(one, payload_of(one, shard_bytes)) for one in hashes], parent)
    assert done.ready_count == len(hashes), done


def got_count(client: Client, namespace: Namespace, hashes: Sequence[bytes]) -> int:
    """How many leading blocks come by value; each is compared. Raises WrongBytes."""
    found = client.get(namespace, hashes)
    for one, data in zip(hashes, found, strict=False):
        check_payload(one, data, "got by value")
    return len(found)
