"""What `make test-cxl` does before QEMU starts, and that it never passes for the wrong reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import cxl_vm
from scripts.cxl_vm import (
    MODES,
    Impossible,
    cpio_entry,
    guest_script,
    needed_modules,
    run_machine,
)


def kernel_with(folder: Path, dependencies: str) -> Path:
    modules = folder / "kernel-6.1/lib/modules/6.1"
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text(dependencies)
    for line in dependencies.splitlines():
        (modules / line.partition(":")[0]).write_bytes(b"module")
    return folder / "kernel-6.1"


def test_modules_come_after_what_they_need_and_built_in_ones_not_at_all(tmp_path: Path) -> None:
    kernel = kernel_with(
        tmp_path,
        "kmem.ko: dax.ko\ndax.ko:\n9p.ko: 9pnet.ko\n9pnet.ko:\ncxl_pci.ko: core.ko\ncore.ko:",
    )
    names = [path.name for path in needed_modules(kernel / "lib/modules/6.1")]
    assert sorted(names) == ["9p.ko", "9pnet.ko", "core.ko", "cxl_pci.ko", "dax.ko", "kmem.ko"]
    for needed, user in (("dax", "kmem"), ("9pnet", "9p"), ("core", "cxl_pci")):
        assert names.index(f"{needed}.ko") < names.index(f"{user}.ko")


def test_an_archive_entry_is_a_header_a_name_and_content_each_padded() -> None:
    raw = cpio_entry(3, "init", 0o100755, b"12345")
    assert raw[:6] == b"070701"
    fields = [int(raw[6 + 8 * index : 14 + 8 * index], 16) for index in range(13)]
    number, mode, _, _, links, _, length, *_, name_length, _ = fields
    assert (number, mode, links, length, name_length) == (3, 0o100755, 1, 5, 5)
    assert raw[110:115] == b"init\0"
    assert raw[116:124] == b"12345\0\0\0"
    assert len(raw) % 4 == 0


@pytest.mark.parametrize("name", MODES)
def test_the_guest_runs_tests_that_exist_and_tells_how_they_ended(name: str) -> None:
    script = guest_script(MODES[name])
    assert script.splitlines()[-1] == "echo KVTIER-GUEST-EXIT:$?"
    assert "-m pytest -m cxl" in script.splitlines()[-2]
    for test in MODES[name].tests:
        path, _, function = test.partition("::")
        assert f"def {function}" in (cxl_vm.ROOT / path).read_text()
        assert test in script


@pytest.mark.parametrize(
    ("said", "has_passed"),
    [
        ("3 passed\nKVTIER-GUEST-EXIT:0\n", True),
        ("3 passed\n\x1bcKVTIER-GUEST-EXIT:0\n", True),
        ("1 failed\nKVTIER-GUEST-EXIT:1\n", False),
        ("SKIPPED [1] no device\n2 passed\nKVTIER-GUEST-EXIT:0\n", False),
        ("Kernel panic\n", False),
    ],
)
def test_a_machine_that_ends_early_or_skips_has_not_passed(
    said: str, has_passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for QEMU says what a guest might."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "said").write_text(said)
    for tool, body in {
        "qemu-system-x86_64": f"cat {tmp_path / 'said'}",
        "busybox": "true",
        "timeout": 'shift; exec "$@"',
    }.items():
        (tools / tool).write_text(f"#!/bin/sh\n{body}\n")
        (tools / tool).chmod(0o755)
    monkeypatch.setattr(cxl_vm, "SYSTEM_PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(cxl_vm, "WORK", tmp_path)
    kernel = kernel_with(tmp_path, "9p.ko:")
    assert run_machine("cxl", kernel, 5) is has_passed
    assert not list(tmp_path.glob("*.img")), "an image was left behind"


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--required"], 1)])
def test_where_there_can_be_no_machine_the_reason_is_said(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impossible() -> Path:
        raise Impossible("it needs Debian")

    monkeypatch.setattr(cxl_vm, "prepare", impossible)
    assert cxl_vm.main(words) == code
    said = capsys.readouterr().out
    assert said == f"make test-cxl: {'FAILED' if code else 'skipped'}: it needs Debian\n"


def test_other_machines_and_other_users_are_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cxl_vm.platform, "machine", lambda: "aarch64")
    with pytest.raises(Impossible, match="Debian on x86-64"):
        cxl_vm.prepare()
    monkeypatch.undo()
    if cxl_vm.platform.machine() == "x86_64" and Path("/etc/debian_version").exists():
        monkeypatch.setattr(cxl_vm.os, "geteuid", lambda: 1000)
        with pytest.raises(Impossible, match="needs root"):
            cxl_vm.prepare()
