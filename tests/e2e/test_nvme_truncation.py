"""A lease on more of NVMe than memory has room for is truncated at once; nobody waits for room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.client import Client, Namespace
from kvtier.client.values import Lease
from kvtier.types import Cut, TierName
from tests.e2e.client.conftest import eventually
from tests.support.daemon import RunningDaemon
from tests.support.faulty_daemon import PROGRAM, VARIABLE
from tests.support.known_blocks import (
    chain_hashes,
    check_payload,
    offload,
    read_leased,
    spec_of,
)
from tests.support.nvme_daemon import (
    client_of,
    make_pool,
    put_all,
    running_nvme_daemon,
    wait_below,
    wait_state,
)

SLOT_COUNT = 128  # Of the memory; leases may pin half of them.
PIN_COUNT_MAX = SLOT_COUNT // 2
PREFIX_BLOCKS = 200
WAIT_SECONDS = 60.0  # What waiting for room would take.
AT_ONCE_SECONDS = 10.0  # Promotion of half the memory included, on a busy machine.
OPTIONS = {"lease.wait_seconds_max": "60", "lease.seconds_max": "120"}

pytestmark = pytest.mark.slow


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: what is written into it is what the disk does from then on."""
    path = tmp_path / "fault"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def daemon(tmp_path: Path, fault: Path) -> Iterator[RunningDaemon]:
    """Restarted: what was put before is on NVMe only."""
    path = tmp_path / "pool"
    make_pool(path)
    with running_nvme_daemon(path, dram_bytes="16MiB", options=OPTIONS, program=PROGRAM) as running:
        with client_of(running) as client:
            namespace = client.open_namespace(spec_of())
            assert client.wait_namespace(namespace, 10)
            put_below(running, client, namespace, "long", PREFIX_BLOCKS, before=0)
            put_below(running, client, namespace, "other", PIN_COUNT_MAX, before=PREFIX_BLOCKS)
        running.restart()
        wait_state(running, "on")
        yield running


def put_below(
    daemon: RunningDaemon,
    client: Client,
    namespace: Namespace,
    label: str,
    count: int,
    *,
    before: int,
) -> None:
    """A part at a time, so that memory has room for the next."""
    hashes = chain_hashes(label, count)
    for first in range(0, count, 100):
        part = hashes[first : first + 100]
        put_all(client, namespace, part, hashes[first - 1] if first else None)
        wait_below(daemon, before + first + len(part))


@dataclass
class Engine:
    """A client with all of memory mapped."""

    client: Client
    namespace: Namespace
    seconds: float = 0.0  # Of the last acquire.
    answers: list[Lease] = field(default_factory=list)

    def acquire(self, label: str, count: int) -> Lease:
        began_at = time.monotonic()
        lease = self.client.acquire(
            self.namespace,
            chain_hashes(label, count),
            wait_seconds=WAIT_SECONDS,
            lease_seconds=100.0,
        )
        self.seconds = time.monotonic() - began_at
        self.answers.append(lease)
        return lease

    def assert_right(self, label: str, lease: Lease) -> None:
        found = read_leased(self.client, self.namespace, lease)
        assert found is not None
        for one, data in zip(chain_hashes(label, lease.leased_count), found, strict=True):
            check_payload(one, data, "onboarded from NVMe")


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[Engine]:
    with client_of(daemon) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_namespace(namespace, 10)
        eventually(lambda: client.arena(namespace).mapped_slot_count > 0)
        yield Engine(client, namespace)


def map_all(daemon: RunningDaemon, engine: Engine) -> None:
    """Fill the memory, so that all its slabs are mapped; what is in it then may go."""
    offload(engine.client, engine.namespace, chain_hashes("fill", SLOT_COUNT))
    arena = engine.client.arena(engine.namespace)
    eventually(lambda: arena.mapped_slot_count == SLOT_COUNT)
    [dram, _] = engine.client.stats().tiers
    wait_below(daemon, PREFIX_BLOCKS + PIN_COUNT_MAX + dram.ready_count)


def test_prefix_larger_than_memory_is_truncated_at_once(
    daemon: RunningDaemon, engine: Engine
) -> None:
    assert engine.client.match(engine.namespace, chain_hashes("long", PREFIX_BLOCKS)).tiers == (
        (TierName.NVME, PREFIX_BLOCKS),
    )
    for is_mapped in (False, True):
        if is_mapped:
            map_all(daemon, engine)
        lease = engine.acquire("long", PREFIX_BLOCKS)
        assert engine.seconds < AT_ONCE_SECONDS
        assert 0 < lease.leased_count <= PIN_COUNT_MAX
        assert lease.cut in (Cut.NO_SPACE, Cut.PIN_LIMIT)
        engine.assert_right("long", lease)
        engine.client.release([lease])
    assert (lease.leased_count, lease.cut) == (PIN_COUNT_MAX, Cut.PIN_LIMIT)
    assert not engine.client.check().violations


def test_second_of_two_acquires_that_exceed_memory_is_truncated_while_the_first_waits(
    daemon: RunningDaemon, engine: Engine, fault: Path
) -> None:
    map_all(daemon, engine)
    fault.write_text("stall")
    first = threading.Thread(target=engine.acquire, args=("long", PREFIX_BLOCKS))
    first.start()
    pinned = 'kvtier_transfer_blocks{direction="promote"}'
    eventually(lambda: daemon.metrics()[pinned] == PIN_COUNT_MAX)
    with client_of(daemon) as client:
        namespace = client.open_namespace(spec_of())
        assert client.wait_namespace(namespace, 10)
        second = Engine(client, namespace)
        lease = second.acquire("other", PIN_COUNT_MAX)
        assert second.seconds < AT_ONCE_SECONDS
        assert (lease.leased_count, lease.cut) == (0, Cut.PIN_LIMIT)
        assert not engine.answers, "the disk hangs: the first one waits"
        fault.unlink()
        first.join(WAIT_SECONDS)
        [held] = engine.answers
        assert (held.leased_count, held.cut) == (PIN_COUNT_MAX, Cut.PIN_LIMIT)
        engine.assert_right("long", held)
        assert second.acquire("other", PIN_COUNT_MAX).cut is Cut.PIN_LIMIT
        assert second.seconds < AT_ONCE_SECONDS, "the first one holds its lease"
        engine.client.release([held])
        again = engine.acquire("other", PIN_COUNT_MAX)
        assert (again.leased_count, again.cut) == (PIN_COUNT_MAX, Cut.NONE)
        engine.assert_right("other", again)
        assert not client.check().violations
