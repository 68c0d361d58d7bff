"""A dax device is what sysfs says it is; anything else is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io.dax import device_numbered, find_dax_device, read_dax_devices
from tests.support.machine_trees import GIB, MIB, write_dax, write_tree


def test_devices_are_read_with_size_alignment_and_nodes(tmp_path: Path) -> None:
    write_dax(tmp_path, "dax0.0", gib=128)
    write_dax(tmp_path, "dax1.0", gib=64, driver="kmem")
    first, second = read_dax_devices(tmp_path / "sys")
    assert first.path == Path("/dev/dax0.0")
    assert (first.size_bytes, first.align_bytes) == (128 * GIB, 2 * MIB)
    assert (first.target_node, first.near_node) == (2, 0)
    assert [first.is_mappable, second.is_mappable] == [True, False]
    assert read_dax_devices(tmp_path / "none") == []


def test_a_device_is_known_by_its_number_whatever_its_path(tmp_path: Path) -> None:
    write_dax(tmp_path, "dax0.0", gib=1)
    found = device_numbered("252:0", Path("/dev/disk/cxl"), tmp_path / "sys")
    assert (found.path, found.size_bytes) == (Path("/dev/disk/cxl"), GIB)
    with pytest.raises(ConfigError, match="is no dax device: none of"):
        device_numbered("252:1", Path("/dev/dax0.1"), tmp_path / "sys")


def test_a_device_that_is_system_memory_is_refused_and_its_node_named(tmp_path: Path) -> None:
    write_dax(tmp_path, "dax0.0", gib=1, driver="kmem")
    with pytest.raises(ConfigError, match=r"use NUMA node 2, or take it back with `daxctl"):
        device_numbered("252:0", Path("/dev/dax0.0"), tmp_path / "sys")


@pytest.mark.parametrize("broken", ["size", "align"])
def test_a_device_without_size_or_alignment_cannot_be_mapped(tmp_path: Path, broken: str) -> None:
    write_dax(tmp_path, "dax0.0", gib=1)
    write_tree(tmp_path, {f"sys/bus/dax/devices/dax0.0/{broken}": "0"})
    with pytest.raises(ConfigError, match="cannot be mapped"):
        device_numbered("252:0", Path("/dev/dax0.0"), tmp_path / "sys")


def test_a_path_that_is_no_device_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no device such as"):
        find_dax_device(tmp_path / "file")
    with pytest.raises(ConfigError, match="No such file"):
        find_dax_device(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"null is no dax device"):
        find_dax_device(Path("/dev/null"))
