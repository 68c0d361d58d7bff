"""What a probe finds on machines of several shapes, and that what it proposes can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier import config
from kvtier.cli.machine import Machine, read_machine
from kvtier.cli.machine_disks import DiskKind
from kvtier.cli.machine_proposal import propose
from kvtier.cli.main import main
from tests.support.machine_trees import (
    GIB,
    MIB,
    SHAPES,
    NodeTree,
    cxl_device,
    cxl_node,
    laptop,
    two_sockets_with_gpus,
    write_gpu,
    write_memory,
    write_nodes,
    write_nvme,
    write_tree,
)


def configured(machine: Machine, folder: Path) -> config.Config:
    """What `kvtier serve --config` would make of the proposal."""
    file = folder / "kvtier.toml"
    file.write_text(propose(machine).toml())
    return config.load(file)


def reason_of(machine: Machine, name: str) -> str:
    [option] = [one for one in propose(machine).options if one.name == name]
    return option.reason


def comments_of(machine: Machine) -> list[str]:
    return [one.removeprefix("# ") for one in propose(machine).toml().splitlines() if "#" in one]


def probed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["probe", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_proposal_is_a_configuration_that_the_daemon_takes(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = SHAPES[shape](tmp_path / "root")
    file = tmp_path / "kvtier.toml"
    document = probed(capsys, "--root", str(root), "--write", str(file))
    assert file.read_text() == document["proposal"]["toml"]
    loaded = config.load(file)
    machine = read_machine(root)
    assert 0 < loaded.dram.bytes <= (machine.available_bytes or 0) // 2
    assert all(option["reason"] for option in document["proposal"]["options"])


def test_a_laptop_keeps_three_quarters_of_its_memory(tmp_path: Path) -> None:
    machine = read_machine(laptop(tmp_path))
    assert configured(machine, tmp_path).dram.bytes == 2432 * MIB
    assert "a quarter of it" in reason_of(machine, "bytes")
    [disk] = machine.disks
    assert (disk.name, disk.kind, disk.used_by) == ("nvme0n1", DiskKind.NVME, "partitions")
    assert any("Every NVMe disk is in use" in note for note in propose(machine).notes)
    assert machine.gpus == (), "what drives the screen runs no engine"


def test_two_sockets_bind_the_tier_to_the_node_of_all_gpus(tmp_path: Path) -> None:
    machine = read_machine(two_sockets_with_gpus(tmp_path))
    loaded = configured(machine, tmp_path)
    assert loaded.dram.nodes == (1,)
    assert loaded.dram.bytes == 234 * GIB
    assert "half of it" in reason_of(machine, "bytes")
    assert "All GPUs hang on this node" in reason_of(machine, "nodes")
    assert [gpu.model for gpu in machine.gpus] == ["NVIDIA H200"] * 4
    assert [node.index for node in machine.nearest_nodes(machine.gpus[0])] == [1, 0]
    assert machine.huge_pages.free_count == 2000


def test_gpus_on_both_sockets_spread_the_tier_over_both(tmp_path: Path) -> None:
    root = two_sockets_with_gpus(tmp_path)
    write_gpu(root, "0000:01:00.0", node=0)
    machine = read_machine(root)
    assert configured(machine, tmp_path).dram.nodes == (0, 1)
    assert "GPUs hang on each of these" in reason_of(machine, "nodes")


def test_a_gpu_that_nobody_can_place_binds_the_tier_to_no_node(tmp_path: Path) -> None:
    root = two_sockets_with_gpus(tmp_path)
    write_gpu(root, "0000:01:00.0", node=-1)
    assert configured(read_machine(root), tmp_path).dram.nodes == ()


def test_disks_that_nobody_uses_are_proposed_behind_a_format(tmp_path: Path) -> None:
    machine = read_machine(two_sockets_with_gpus(tmp_path))
    used = {disk.name: disk.used_by for disk in machine.disks}
    assert used == {"nvme0n1": "mounted at /data", "nvme1n1": "", "nvme2n1": ""}
    assert configured(machine, tmp_path).nvme.paths == (), "a disk may hold something all the same"
    comments = comments_of(machine)
    assert 'paths = ["/dev/nvme1n1", "/dev/nvme2n1"]' in comments
    assert any("kvtier format /dev/nvme1n1 /dev/nvme2n1" in comment for comment in comments)
    assert machine.disks[1].link_bytes_per_second == 7_876_000_000


def test_cxl_memory_beside_one_socket_keeps_the_dram_tier_off_it(tmp_path: Path) -> None:
    machine = read_machine(cxl_node(tmp_path))
    loaded = configured(machine, tmp_path)
    assert loaded.dram.nodes == (0,)
    assert loaded.dram.bytes == 57 * GIB, "a quarter of what is beside processors"
    reason = reason_of(read_machine(tmp_path), "bytes")
    assert "230.0 GiB are available beside processors on node 0" in reason
    [node] = machine.memory_only_nodes
    assert (node.index, machine.has_demotion) == (1, True)
    assert loaded.cxl.node == 1
    comments = comments_of(machine)
    assert any("Node 1 has 128.0 GiB and no processors, at distance 20" in one for one in comments)
    assert any("29.4 GB/s as its firmware says" in one for one in comments)
    assert any("demotion_enabled is on" in one for one in comments)


def test_a_dax_device_is_named_unless_it_is_system_memory(tmp_path: Path) -> None:
    machine = read_machine(cxl_device(tmp_path))
    comments = comments_of(machine)
    assert 'dax = "/dev/dax0.0"' in comments
    assert not [one for one in comments if "dax1.0" in one]


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    machine = read_machine(cxl_device(tmp_path))
    assert machine.group_limit_bytes == 32 * GIB
    assert machine.available_bytes == 32 * GIB - 64 * MIB
    assert configured(machine, tmp_path).dram.bytes == 7 * GIB
    assert machine.memlock_bytes == 8 * MIB


def test_a_machine_that_tells_nothing_gets_notes_and_no_sizes(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    proposal = propose(machine)
    assert proposal.options == ()
    assert "Nobody tells how much memory" in proposal.notes[0]
    assert configured(machine, tmp_path) == config.Config()


def test_swap_and_stacked_disks_are_in_use(tmp_path: Path) -> None:
    write_memory(tmp_path, total_gib=8, available_gib=4)
    write_nodes(tmp_path, {0: NodeTree("0-3", 8, 4, "10")})
    for number in range(2):
        write_nvme(tmp_path, f"nvme{number}n1", gib=100, number=f"259:{number}")
    write_tree(
        tmp_path,
        {
            "proc/swaps": "Filename Type\n/dev/nvme0n1 partition",
            "sys/block/nvme1n1/holders/md0/size": "1",
            "sys/block/sda/size": "1000",
            "sys/block/sda/queue/rotational": "1",
            "sys/block/vda/size": "1000",
            "sys/block/vda/queue/rotational": "1",
        },
    )
    found = {disk.name: (disk.kind, disk.used_by) for disk in read_machine(tmp_path).disks}
    assert found == {
        "nvme0n1": (DiskKind.NVME, "swap"),
        "nvme1n1": (DiskKind.NVME, "md0"),
        "sda": (DiskKind.ROTATING, ""),
        "vda": (DiskKind.VIRTUAL, ""),
    }


def test_json_has_what_the_text_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = two_sockets_with_gpus(tmp_path)
    document = probed(capsys, "--root", str(root))
    machine = document["machine"]
    assert machine["nodes"][1]["distances"] == {"0": 21, "1": 10}
    assert machine["gpus"][0]["nearest_nodes"] == [1, 0]
    assert machine["disks"][0]["path"] == "/dev/nvme0n1"
    assert main(["probe", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    for word in ("NVIDIA H200", "/dev/nvme2n1", "mounted at /data", "7.9 GB/s", 'bytes = "234GiB"'):
        assert word in text


def test_this_machine_can_be_probed(capsys: pytest.CaptureFixture[str]) -> None:
    assert probed(capsys)["machine"]["memory_bytes"] > 0


def test_a_file_that_exists_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("# mine\n")
    root = str(laptop(tmp_path / "root"))
    assert main(["probe", "--root", root, "--write", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "# mine\n"
    assert main(["probe", "--root", root, "--write", str(tmp_path / "no" / "file")]) == 2
    assert main(["probe", "--root", root, "--measure"]) == 2


@pytest.mark.slow
def test_measuring_gives_a_rate_for_each_node_or_says_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = probed(capsys, "--measure")
    nodes = [node for node in document["machine"]["nodes"] if node["memory_bytes"]]
    copies = [name for name in document["measured"] if name.startswith("copy")]
    reads = [name for name in document["measured"] if name.startswith("read")]
    assert len(copies) >= len(nodes)
    assert len(reads) == len(document["machine"]["disks"])
    for name, value in document["measured"].items():
        assert value > 0 if isinstance(value, float) else value, name
