"""The room for slabs is the smallest that anybody names: machine, own group, groups above."""

from __future__ import annotations

from pathlib import Path

from kvtier.io.budget import available_bytes

MIB = 1 << 20


class Machine:
    """A /proc and a /sys/fs/cgroup made of files."""

    def __init__(self, root: Path, *, available: int | None, cgroup: str) -> None:
        self.proc, self.cgroup_root = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup_root.mkdir()
        self.write(self.proc / "self" / "cgroup", cgroup)
        if available is not None:
            self.write(
                self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB"
            )

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def group_v2(self, path: str, *, limit: str, usage: int, idle: int = 0) -> None:
        group = self.cgroup_root / path
        self.write(group / "memory.max", limit)
        self.write(group / "memory.current", str(usage))
        self.write(group / "memory.stat", f"anon 5\ninactive_file {idle}")

    def group_v1(self, path: str, *, limit: int, usage: int, idle: int = 0) -> None:
        group = self.cgroup_root / "memory" / path
        self.write(group / "memory.limit_in_bytes", str(limit))
        self.write(group / "memory.usage_in_bytes", str(usage))
        self.write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {idle}")

    def room(self) -> int | None:
        return available_bytes(self.proc, self.cgroup_root)


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/pod")
    machine.group_v2("pod", limit="max", usage=5 * MIB)
    assert machine.room() == 900 * MIB


def test_the_own_group_limits_less_what_it_uses(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/pod")
    machine.group_v2("pod", limit=str(100 * MIB), usage=60 * MIB)
    assert machine.room() == 40 * MIB


def test_a_group_above_limits_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/node/pod")
    machine.group_v2("node", limit=str(70 * MIB), usage=60 * MIB)
    machine.group_v2("node/pod", limit=str(100 * MIB), usage=10 * MIB)
    assert machine.room() == 10 * MIB


def test_idle_file_pages_are_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/pod")
    machine.group_v2("pod", limit=str(100 * MIB), usage=99 * MIB, idle=30 * MIB)
    assert machine.room() == 31 * MIB


def test_version_1_groups_limit_as_well(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/x\n3:memory:/pod\n0::/"
    machine = Machine(tmp_path, available=900 * MIB, cgroup=lines)
    machine.group_v1("", limit=(1 << 63) - 4096, usage=5)
    machine.group_v1("pod", limit=50 * MIB, usage=45 * MIB, idle=2 * MIB)
    assert machine.room() == 7 * MIB


def test_in_a_container_the_mount_is_the_own_group(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/../../outside")
    machine.group_v2("", limit=str(64 * MIB), usage=0)
    assert machine.room() == 64 * MIB


def test_usage_above_the_limit_is_no_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=900 * MIB, cgroup="0::/")
    machine.group_v2("", limit=str(MIB), usage=2 * MIB)
    assert machine.room() == 0


def test_when_nobody_tells_nothing_is_claimed(tmp_path: Path) -> None:
    assert Machine(tmp_path, available=None, cgroup="").room() is None
