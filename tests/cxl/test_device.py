"""Slabs on a real dax device: what only the device can show, and at last its life as a node."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.io.dax import find_dax_device, read_dax_devices
from kvtier.io.nodes import node_room_bytes, read_node
from kvtier.io.numa import count_pages_by_node
from kvtier.memory import Mapping
from kvtier.pools.dax import DaxSource
from kvtier.pools.slabs import PageKind, Slab, populate_slab, punch_slab
from kvtier.pools.stock import SlabStock
from kvtier.types import SlabId

MIB = 1 << 20
SLAB_BYTES = 4 * MIB  # Emulated CXL memory takes a second for it.

pytestmark = pytest.mark.cxl


def source_on(path: Path, **options: bool) -> DaxSource:
    device = find_dax_device(path)
    return DaxSource(device, slab_bytes=SLAB_BYTES, generation=1, force=True, **options)


def slab_of(source: DaxSource, number: int) -> Slab:
    return source.populate(
        SlabId(number), SLAB_BYTES, clock=SystemClock(), is_cancelled=lambda: False
    )


def ended(source: DaxSource, *slabs: Slab) -> None:
    for slab in slabs:
        source.end(slab)
    assert source.check_invariants() == []
    source.close()


def test_size_and_alignment_come_from_sysfs_since_the_file_has_no_length(device_path: Path) -> None:
    found = find_dax_device(device_path)
    assert device_path.stat().st_size == 0
    assert found.size_bytes > SLAB_BYTES
    assert found.align_bytes % (2 * MIB) == 0
    assert found.path in [device.path for device in read_dax_devices()]


def test_a_length_that_is_no_multiple_of_the_alignment_cannot_be_mapped(device_path: Path) -> None:
    """Why slabs are cut at it."""
    found = find_dax_device(device_path)
    fd = os.open(device_path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="mmap of 4096 bytes"):
            Mapping(fd, 4096)
        Mapping(fd, found.align_bytes, found.align_bytes).close()
    finally:
        os.close(fd)
    with pytest.raises(ConfigError, match="multiple of the device's alignment"):
        DaxSource(found, slab_bytes=found.align_bytes + MIB, generation=1)


def test_slabs_keep_their_bytes_and_share_none(device_path: Path) -> None:
    source = source_on(device_path)
    slabs = [slab_of(source, number) for number in (1, 2, 3)]
    for slab in slabs:
        assert slab.page_kind is PageKind.DEVICE
        assert not slab.mapping.array.any()
        slab.mapping.array[:] = slab.id
    for slab in slabs:
        assert (slab.mapping.array == slab.id).all()
    ended(source, *slabs)


def test_a_stock_takes_what_the_device_has_and_its_places_come_back(device_path: Path) -> None:
    source = source_on(device_path)
    outcomes: queue.Queue[object] = queue.Queue()
    stock = SlabStock(
        slab_bytes=SLAB_BYTES,
        slab_count_max=2,
        on_outcome=outcomes.put,
        clock=SystemClock(),
        source=source,
        reserve_bytes=0,
        parallel=1,
    )
    for _ in range(2):
        assert stock.request(3) == 2
        slabs = [outcomes.get(timeout=60) for _ in range(2)]
        assert all(isinstance(slab, Slab) for slab in slabs)
        for slab in slabs:
            assert isinstance(slab, Slab)
            stock.give_back(slab)
    stock.stop()
    ended(source)


def test_another_process_is_refused_while_the_device_is_ours(device_path: Path) -> None:
    source = source_on(device_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            source_on(device_path)
        except ConfigError as error:
            code = 0 if "in use by another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ended(source)


def test_the_lock_lives_as_long_as_a_mapping_that_a_client_made(device_path: Path) -> None:
    source = source_on(device_path, is_single_tenant=True)
    slab = slab_of(source, 1)
    slab.mapping.array[:4] = 42
    fd = source.open_for_client()
    client = Mapping(fd, SLAB_BYTES, source.offset_of(slab))
    os.close(fd)
    assert client.array[:5].tolist() == [42, 42, 42, 42, 0]
    ended(source, slab)
    with pytest.raises(ConfigError, match="in use"):
        source_on(device_path)
    client.close()
    source_on(device_path).close()


def test_a_disk_can_be_written_from_a_slab_and_read_into_it(
    device_path: Path, tmp_path: Path
) -> None:
    """Demotions from here to NVMe are plain pwritev and preadv."""
    source = source_on(device_path)
    slab = slab_of(source, 1)
    block = slab.mapping.array[: 2 * MIB]
    block[:] = 3
    fd = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    assert os.pwritev(fd, [block], 0) == 2 * MIB
    block[:] = 0
    assert os.preadv(fd, [block], 0) == 2 * MIB
    assert (block == 3).all()
    os.close(fd)
    del block
    ended(source, slab)


def test_somebody_elses_bytes_are_refused_and_stay(device_path: Path) -> None:
    fd = os.open(device_path, os.O_RDWR)
    head = Mapping(fd, 2 * MIB)
    os.close(fd)
    before = head.array[:4096].copy()
    head.array[:8] = 0xEE
    with pytest.raises(ConfigError, match="holds something that is not kvtier's"):
        DaxSource(find_dax_device(device_path), slab_bytes=SLAB_BYTES, generation=1)
    assert (head.array[:8] == 0xEE).all()
    head.array[:4096] = before
    head.close()
    source_on(device_path).close()


def test_as_system_memory_it_is_refused_as_a_device_and_works_as_a_node(device_path: Path) -> None:
    """Last in the file: afterwards there is no device."""
    daxctl = shutil.which("daxctl")
    if daxctl is None:
        pytest.skip("daxctl is not installed")
    node = find_dax_device(device_path).target_node
    assert node is not None
    words = ["reconfigure-device", "--mode=system-ram", device_path.name]
    done = subprocess.run([daxctl, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ConfigError, match=f"use NUMA node {node}"):
        find_dax_device(device_path)
    found = read_node(node)
    assert found is not None
    assert found.has_only_memory
    assert (node_room_bytes(node) or 0) > SLAB_BYTES
    slab = populate_slab(SlabId(1), SLAB_BYTES, PageKind.COLLAPSED, clock=SystemClock(), node=node)
    assert set(count_pages_by_node(slab.mapping)) == {node}
    slab.mapping.array[:] = 9
    assert (slab.mapping.array == 9).all()
    punch_slab(slab)
