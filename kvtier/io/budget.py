"""How much memory we may still take: the machine's word and our control group's, the smaller one.

Asked before a slab is populated, because the kernel's own refusal is no refusal: a control group
that runs over its limit has a process killed, and that would be the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 1 << 62  # cgroup v1 says "no limit" with a number near 2^63.
_LIMIT_V1 = "memory.limit_in_bytes"


def available_bytes(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can be taken without swapping or being killed; None when nobody tells."""
    answers = [_machine_bytes(proc), *_group_bytes(proc, cgroup_root)]
    known = [answer for answer in answers if answer is not None]
    return min(known) if known else None


def group_limit_bytes(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The lowest limit of the memory groups that we are in; None without one."""
    limits = [_read_number(group / name) for group, name in _groups(proc, cgroup_root)]
    return min((one for one in limits if one is not None and one < _UNLIMITED_BYTES), default=None)


def _machine_bytes(proc: Path) -> int | None:
    found = _read_fields(proc / "meminfo").get("MemAvailable:")
    return None if found is None else found << 10


def _group_bytes(proc: Path, cgroup_root: Path) -> Iterator[int | None]:
    """The room in each memory group that we are in, from ours up to the root, v1 and v2."""
    for group, limit_name in _groups(proc, cgroup_root):
        if limit_name == _LIMIT_V1:
            yield _room(group, limit_name, "memory.usage_in_bytes", "total_")
        else:
            yield _room(group, limit_name, "memory.current", "")


def _groups(proc: Path, cgroup_root: Path) -> Iterator[tuple[Path, str]]:
    """Each memory group that we are in, and the name of the file that has its limit."""
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            for group in _groups_upward(cgroup_root / "memory", path):
                yield group, _LIMIT_V1
        elif controllers == "":
            for group in _groups_upward(cgroup_root, path):
                yield group, "memory.max"


def _groups_upward(mount: Path, path: str) -> Iterator[Path]:
    """From our group to the mount. In a container the path may lie outside: then the mount only."""
    group = mount / path.strip("/")
    if ".." in group.parts or not group.is_dir():
        group = mount
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _room(group: Path, limit_name: str, usage_name: str, stat_prefix: str) -> int | None:
    limit, usage = _read_number(group / limit_name), _read_number(group / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    # File pages that nobody uses count as used but go at the first need.
    idle = _read_fields(group / "memory.stat").get(stat_prefix + "inactive_file", 0)
    return max(0, limit - usage + idle)


def _read_fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
