"""Slabs of a dax device: each in a place of its own, and nobody else's bytes are touched."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, Forbidden
from kvtier.io.dax import DaxDevice
from kvtier.memory import Mapping
from kvtier.pools.dax import DaxSource, format_device
from kvtier.pools.dax_superblock import SUPERBLOCK_BYTES, DaxSuperblock, parse_dax_superblock
from kvtier.pools.slabs import POPULATE_STEP_BYTES, PageKind, PopulateCancelled, Slab
from kvtier.types import SlabId
from tests.support.dax_files import dax_file

MIB = 1 << 20
SLAB_BYTES = 4 * MIB
PLACES = 3


@pytest.fixture
def device(tmp_path: Path) -> DaxDevice:
    """2 MiB of head, three places, and what is too little for a fourth."""
    return dax_file(tmp_path / "dax0.0", 2 * MIB + PLACES * SLAB_BYTES + 2 * MIB)


@pytest.fixture
def source(device: DaxDevice) -> Iterator[DaxSource]:
    source = DaxSource(device, slab_bytes=SLAB_BYTES, generation=5)
    yield source
    assert source.check_invariants() == []
    source.close()


def slab_of(source: DaxSource, number: int) -> Slab:
    return source.populate(
        SlabId(number), SLAB_BYTES, clock=SystemClock(), is_cancelled=lambda: False
    )


def test_slabs_share_no_byte_and_lie_where_the_source_says(
    source: DaxSource, device: DaxDevice
) -> None:
    slabs = [slab_of(source, number) for number in range(1, PLACES + 1)]
    for slab in slabs:
        assert (slab.page_kind, slab.length_bytes) == (PageKind.DEVICE, SLAB_BYTES)
        slab.mapping.array[:] = slab.id
    for slab in slabs:
        assert (slab.mapping.array == slab.id).all()
        with device.path.open("rb") as file:
            file.seek(source.offset_of(slab))
            assert file.read(SLAB_BYTES) == bytes([slab.id]) * SLAB_BYTES
    assert parse_dax_superblock(device.path.read_bytes()[:SUPERBLOCK_BYTES]) == DaxSuperblock(
        5, device.size_bytes, device.align_bytes, SLAB_BYTES
    )


def test_a_device_that_is_full_refuses_and_a_place_comes_back(source: DaxSource) -> None:
    slabs = [slab_of(source, number) for number in range(1, PLACES + 1)]
    assert (source.slab_count_max, source.free_bytes()) == (PLACES, 0)
    with pytest.raises(OSError, match="no place for another slab"):
        slab_of(source, 9)
    source.end(slabs[1])
    assert source.free_bytes() == SLAB_BYTES
    assert slab_of(source, 10).length_bytes == SLAB_BYTES


def test_a_slab_reads_zeros_whoever_had_its_place_before(source: DaxSource) -> None:
    for number in range(1, 2 * PLACES):
        slab = slab_of(source, number)
        assert not slab.mapping.array.any()
        slab.mapping.array[:] = 0xFF
        source.end(slab)


def test_a_place_that_somebody_still_looks_at_is_given_to_nobody(source: DaxSource) -> None:
    slabs = [slab_of(source, number) for number in range(1, PLACES + 1)]
    view = slabs[0].mapping.array
    view[:] = 1
    source.end(slabs[0])
    assert source.free_bytes() == 0
    with pytest.raises(OSError, match="no place"):
        slab_of(source, 9)
    assert (view == 1).all()
    del view
    assert source.free_bytes() == SLAB_BYTES
    assert not slab_of(source, 10).mapping.array.any()


def test_populating_can_be_given_up_and_the_place_comes_back(tmp_path: Path) -> None:
    slab_bytes = 2 * POPULATE_STEP_BYTES
    device = dax_file(tmp_path / "dax1.0", 2 * MIB + slab_bytes)
    source = DaxSource(device, slab_bytes=slab_bytes, generation=1)
    asked = iter([False, True])
    with pytest.raises(PopulateCancelled):
        source.populate(
            SlabId(1), slab_bytes, clock=SystemClock(), is_cancelled=lambda: next(asked)
        )
    gc.collect()  # The exception held a view.
    assert source.free_bytes() == slab_bytes
    assert source.check_invariants() == []
    source.close()


def test_a_device_is_refused_until_its_last_slab_is_unmapped(device: DaxDevice) -> None:
    first = DaxSource(device, slab_bytes=SLAB_BYTES, generation=1)
    slab = slab_of(first, 1)
    with pytest.raises(ConfigError, match=r"dax0\.0 is in use by another process"):
        DaxSource(device, slab_bytes=SLAB_BYTES, generation=2)
    first.close()
    os.close(slab.fd)
    with pytest.raises(ConfigError, match="in use"):
        DaxSource(device, slab_bytes=SLAB_BYTES, generation=2)
    assert slab.mapping.close()
    DaxSource(device, slab_bytes=SLAB_BYTES, generation=2).close()


def test_a_device_is_waited_for_that_is_lent_for_a_moment_more(device: DaxDevice) -> None:
    first = DaxSource(device, slab_bytes=SLAB_BYTES, generation=1)
    end = threading.Timer(0.1, first.close)
    end.start()
    DaxSource(device, slab_bytes=SLAB_BYTES, generation=2, wait_seconds=10.0).close()
    end.join()


@pytest.mark.parametrize("place", [0, 100, 4096, (2 << 20) - 1])
def test_somebody_elses_bytes_are_refused_and_stay(device: DaxDevice, place: int) -> None:
    with device.path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xee")
    before = device.path.read_bytes()
    with pytest.raises(ConfigError, match="holds something that is not kvtier's"):
        DaxSource(device, slab_bytes=SLAB_BYTES, generation=1)
    assert device.path.read_bytes() == before
    DaxSource(device, slab_bytes=SLAB_BYTES, generation=1, force=True).close()
    DaxSource(device, slab_bytes=2 * MIB, generation=2).close()


def test_formatting_makes_a_device_ours_and_refuses_as_the_pool_does(device: DaxDevice) -> None:
    device.path.write_bytes(b"x" * device.size_bytes)
    with pytest.raises(ConfigError, match="not kvtier's"):
        format_device(device, generation=1)
    assert device.path.read_bytes() == b"x" * device.size_bytes
    format_device(device, generation=1, force=True)
    source = DaxSource(device, slab_bytes=SLAB_BYTES, generation=2)
    with pytest.raises(ConfigError, match="in use"):
        format_device(device, generation=3, force=True)
    source.close()


def test_a_refused_device_is_not_left_locked(device: DaxDevice) -> None:
    device.path.write_bytes(b"x" * device.size_bytes)
    with pytest.raises(ConfigError):
        DaxSource(device, slab_bytes=SLAB_BYTES, generation=1)
    with device.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("slab_bytes", "message"),
    [
        (3 * MIB, "multiple of the device's alignment, 2097152 bytes"),
        (2 << 30, "at most 1073741824"),
        (64 * MIB, "too few for a slab"),
    ],
)
def test_slabs_that_do_not_fit_the_device_are_one_clear_line(
    device: DaxDevice, slab_bytes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DaxSource(device, slab_bytes=slab_bytes, generation=1)


def test_clients_get_the_device_only_where_all_are_one_tenant(device: DaxDevice) -> None:
    source = DaxSource(device, slab_bytes=SLAB_BYTES, generation=1)
    with pytest.raises(Forbidden, match="several tenants"):
        source.open_for_client()
    source.close()
    source = DaxSource(device, slab_bytes=SLAB_BYTES, generation=1, is_single_tenant=True)
    fd = source.open_for_client()
    client = Mapping(fd, SLAB_BYTES, 2 * MIB)
    source.close()
    os.close(fd)
    with pytest.raises(ConfigError, match="in use"):  # The client may still write there.
        DaxSource(device, slab_bytes=SLAB_BYTES, generation=2)
    client.close()
    DaxSource(device, slab_bytes=SLAB_BYTES, generation=2).close()


def test_a_torn_superblock_is_none() -> None:
    raw = DaxSuperblock(1, 2, 3, 4).pack()
    assert parse_dax_superblock(raw) == DaxSuperblock(1, 2, 3, 4)
    for place in (0, 9, 40, SUPERBLOCK_BYTES - 1):
        torn = bytearray(raw)
        torn[place] ^= 1
        assert parse_dax_superblock(bytes(torn)) is None
    assert parse_dax_superblock(raw[:-1]) is None
