"""`[cxl]` becomes memory, or one clear line; and no daemon pretends to use it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.io.nodes import read_nodes
from kvtier.pools.cxl import CxlMemory, DaxMemory, EmulatedMemory, NodeMemory
from kvtier.server import cxl
from kvtier.server.cxl import open_cxl
from tests.support.dax_files import dax_file

MIB = 1 << 20


def opened(**options: str) -> CxlMemory | None:
    loaded = load(None, {f"cxl.{name}": value for name, value in options.items()})
    return open_cxl(loaded.cxl, SystemClock(), generation=1)


def test_without_the_section_there_is_no_memory() -> None:
    assert opened() is None


def test_emulated_memory_is_called_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        memory = opened(emulate="4GB/s,400ns", bytes="64MiB")
    assert isinstance(memory, EmulatedMemory)
    assert memory.label == "emulated: 4 GB/s, 400 ns"
    assert (memory.slab_bytes, memory.slab_count_max) == (16 * MIB, 4)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "emulated" in caplog.records[1].message


def test_a_node_gives_what_it_has_or_what_was_asked() -> None:
    node = next((one.index for one in read_nodes() if one.memory_bytes), None)
    if node is None:
        pytest.skip("the kernel tells nothing of NUMA nodes")
    memory = opened(node=str(node), bytes="64MiB", slab_bytes="8MiB")
    assert isinstance(memory, NodeMemory)
    assert (memory.label, memory.slab_bytes, memory.slab_count_max) == (f"node {node}", 8 * MIB, 8)
    everything = opened(node=str(node))
    assert everything is not None
    assert everything.slab_count_max > 1
    with pytest.raises(ConfigError, match="node 1000 is not online"):
        opened(node="1000")


def test_a_device_gives_slabs_at_its_alignment(tmp_path: Path, monkeypatch) -> None:
    device = dax_file(tmp_path / "dax0.0", 96 * MIB, align_bytes=16 * MIB)
    monkeypatch.setattr(cxl, "find_dax_device", lambda path: device)
    memory = opened(dax=str(device.path), single_tenant="true")
    assert isinstance(memory, DaxMemory)
    assert (memory.slab_bytes, memory.slab_count_max) == (16 * MIB, 5)
    memory.close()
    with pytest.raises(ConfigError, match="multiple of the device's alignment"):
        opened(dax=str(device.path), slab_bytes="8MiB")


def test_a_path_that_is_no_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        opened(dax=str(tmp_path / "dax0.0"))
