"""`make test-cxl`: the tests of tests/cxl in a throw-away virtual machine that has CXL memory.

    numa    a second NUMA node without processors, and an NVDIMM made into a dax device
    cxl     a CXL type-3 device behind a host bridge, made into a region and a dax device

QEMU in software (no KVM), Debian's own kernel, an initial RAM disk made here, and this machine's
root shared read-only, so that the guest runs this checkout with its .venv. Nothing is left behind
but .kvtier/cxl_vm. Emulated memory is slow: what is tested is what works, not how fast.

Exit codes: 0 passed, or skipped with the reason; 1 failed, or skipped with --required.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".kvtier" / "cxl_vm"
# What must be on the path, and the Debian package that brings it.
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "ndctl": "ndctl",
    "cxl": "ndctl",
    "daxctl": "daxctl",
}
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p"),
    *("nfit", "nd_pmem", "dax_pmem", "device_dax", "kmem", "dax_hmem"),
    *("cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem"),
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GUEST_TMP = "/mnt"  # Of this machine's root, hidden in the guest by a file system in memory.
EXIT_MARK = "KVTIER-GUEST-EXIT"
MIB = 1 << 20


class Impossible(Exception):
    """The virtual machine cannot be had here; the message says why."""


@dataclass(frozen=True)
class Mode:
    """One kind of machine."""

    images: dict[str, int]  # File -> bytes; made anew each time: old labels confuse the tools.
    qemu: tuple[str, ...]
    setup: tuple[str, ...]  # Shell, before the tests.
    environment: dict[str, str]
    tests: tuple[str, ...]  # In this order: at the end a device becomes system memory.


DAX = "/dev/dax0.0"
MAKE_DEVDAX = "ndctl create-namespace -f -m devdax -a 2M"
MODES = {
    "numa": Mode(
        # 16 MiB of labels behind 256 MiB: the region must begin and end at multiples of 16 MiB.
        images={"nvdimm.img": 272 * MIB},
        qemu=(
            *("-M", "q35,nvdimm=on", "-m", "1536M,slots=4,maxmem=8G"),
            *("-object", "memory-backend-ram,id=m0,size=1024M"),
            *("-object", "memory-backend-ram,id=m1,size=512M"),
            *("-numa", "node,nodeid=0,cpus=0-1,memdev=m0", "-numa", "node,nodeid=1,memdev=m1"),
            *("-numa", "dist,src=0,dst=1,val=30", "-numa", "dist,src=1,dst=0,val=30"),
            "-object",
            f"memory-backend-file,id=nv0,share=on,mem-path=nvdimm.img,size={272 * MIB}",
            *("-device", f"nvdimm,id=nvd0,memdev=nv0,node=1,label-size={16 * MIB}"),
        ),
        # The NVDIMM's room may be one namespace already, which is then made over.
        setup=(f"{MAKE_DEVDAX} -e namespace0.0 > /dev/null || {MAKE_DEVDAX} > /dev/null",),
        environment={"KVTIER_CXL_NODE": "1", "KVTIER_CXL_DAX": DAX},
        tests=(
            *("tests/cxl/test_node.py", "tests/cxl/test_pools.py", "tests/cxl/test_daemon.py"),
            "tests/cxl/test_device.py",
        ),
    ),
    "cxl": Mode(
        images={"cxl.img": 256 * MIB, "labels.img": MIB},
        qemu=(
            "-M",
            "q35,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G",
            *("-m", "1024M,slots=4,maxmem=8G"),
            "-object",
            f"memory-backend-file,id=mem0,share=on,mem-path=cxl.img,size={256 * MIB}",
            "-object",
            f"memory-backend-file,id=lsa0,share=on,mem-path=labels.img,size={MIB}",
            *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"),
            *("-device", "cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2"),
            # Below a bridge with one port the kernel programs no decoder, since hardware passes all
            # through there. QEMU 7.2 does not: every write would be lost.
            *("-device", "cxl-rp,port=1,bus=cxl.1,id=rp1,chassis=0,slot=3"),
            *("-device", "cxl-type3,bus=rp0,memdev=mem0,lsa=lsa0,id=type3"),
        ),
        setup=(
            "cxl create-region -m -d decoder0.0 -w 1 mem0 > /dev/null",
            f"{MAKE_DEVDAX} > /dev/null",
        ),
        environment={"KVTIER_CXL_DAX": DAX},
        tests=("tests/cxl/test_device.py",),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help="numa, cxl; both when left out")
    parser.add_argument("--timeout", type=int, default=290, help="seconds for each machine")
    parser.add_argument("--required", action="store_true", help="fail where it cannot be had")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    try:
        kernel = prepare()
    except Impossible as reason:
        print(f"make test-cxl: {'FAILED' if arguments.required else 'skipped'}: {reason}")
        return 1 if arguments.required else 0
    failed: list[str] = []
    for name in arguments.modes or MODES:
        began = time.monotonic()
        passed = run_machine(name, kernel, arguments.timeout)
        word = "passed" if passed else "FAILED"
        print(f"make test-cxl: {name} {word} in {time.monotonic() - began:.0f} s", flush=True)
        failed += [] if passed else [name]
    return 1 if failed else 0


# ------------------------------------------------------------------------------------- preparing


def prepare() -> Path:
    """Tools installed, the kernel unpacked: its folder. Raises Impossible."""
    if platform.machine() != "x86_64" or not Path("/etc/debian_version").exists():
        raise Impossible("it needs Debian on x86-64, for its kernel and packages")
    if os.geteuid() != 0:
        raise Impossible("it needs root, to install packages and to read all of this machine's /")
    if ROOT.is_relative_to(GUEST_TMP):
        raise Impossible(f"the guest hides {GUEST_TMP}, where this checkout lies")
    WORK.mkdir(parents=True, exist_ok=True)
    missing = {package for tool, package in TOOLS.items() if not which(tool)}
    if missing:
        print(f"make test-cxl: installing {' '.join(sorted(missing))}", flush=True)
        if apt("install", "-y", "-qq", "--no-install-recommends", *sorted(missing)):
            apt("update", "-qq")
            if apt("install", "-y", "-qq", "--no-install-recommends", *sorted(missing)):
                raise Impossible(f"apt-get could not install {' '.join(sorted(missing))}")
    return unpacked_kernel()


def unpacked_kernel() -> Path:
    """The folder of the newest kernel of this Debian; without apt, of an earlier run's."""
    told = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False
    )
    found = re.search(r"linux-image-(\d[\w.+-]*-amd64)", told.stdout)
    if found is None:
        kept = sorted(WORK.glob("kernel-*"))
        if kept:
            return kept[-1]
        raise Impossible("apt does not know linux-image-amd64: run `apt-get update`")
    release = found[1]
    folder = WORK / f"kernel-{release}"
    if folder.exists():
        return folder
    unfinished = WORK / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    print(f"make test-cxl: taking kernel {release}", flush=True)
    # The package without signatures depends on nothing that is signed elsewhere; either will do.
    names = (f"linux-image-{release}-unsigned", f"linux-image-{release}")
    if all(apt("download", "-qq", name, folder=unfinished) for name in names):
        raise Impossible(f"apt-get could not get linux-image-{release}")
    for package in unfinished.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, unfinished], check=True)
        package.unlink()
    subprocess.run(["depmod", "-b", unfinished, release], check=True, env=with_path())
    unfinished.rename(folder)
    return folder


def apt(*words: str, folder: Path = WORK) -> int:
    environment = {**with_path(), "DEBIAN_FRONTEND": "noninteractive"}
    # As root, and not as _apt, who may not write into the checkout.
    words = ("-o", "APT::Sandbox::User=root", *words)
    return subprocess.run(
        ["apt-get", *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


def which(tool: str) -> str | None:
    return shutil.which(tool, path=SYSTEM_PATH)


def with_path() -> dict[str, str]:
    return {**os.environ, "PATH": SYSTEM_PATH}


# ------------------------------------------------------------------------- the initial RAM disk


def initial_disk(kernel: Path, script: str) -> bytes:
    """A cpio archive (newc): busybox, the modules in the order of their needs, and `init`."""
    release = kernel.name.removeprefix("kernel-")
    modules = needed_modules(kernel / "lib/modules" / release)
    loads = "\n".join(f"insmod /modules/{path.name} 2> /dev/null" for path in modules)
    init = f"""#!/busybox sh
/busybox mkdir -p /bin /proc /sys /dev /host
/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
{loads}
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /host || poweroff -f
for name in dev proc sys; do mount --bind /$name /host/$name; done
mount -t tmpfs tmp /host{GUEST_TMP}
cp /guest.sh /host{GUEST_TMP}/guest.sh
chroot /host /bin/sh {GUEST_TMP}/guest.sh
poweroff -f
"""
    entries = [("busybox", 0o100755, Path(which("busybox") or "").read_bytes())]
    entries += [("modules", 0o040755, b"")]
    entries += [(f"modules/{path.name}", 0o100644, path.read_bytes()) for path in modules]
    entries += [("init", 0o100755, init.encode()), ("guest.sh", 0o100644, script.encode())]
    # The kernel opens it before anything is mounted.
    entries += [("dev", 0o040755, b""), ("TRAILER!!!", 0, b"")]
    return b"".join(cpio_entry(number, *entry) for number, entry in enumerate(entries, start=1))


def cpio_entry(number: int, name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return padded(head) + padded(content)


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 4)


def needed_modules(folder: Path) -> list[Path]:
    """The modules and what they need, needs first."""
    needs: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}
    for name in MODULES:
        if (path := by_name.get(name)) is not None:  # Else built in.
            for one in [*reversed(needs[path]), path]:
                ordered.setdefault(one)
    return [folder / path for path in ordered]


# --------------------------------------------------------------------------------------- running


def guest_script(mode: Mode) -> str:
    """What runs inside, in this machine's own root."""
    environment = {"TMPDIR": GUEST_TMP, "PYTHONDONTWRITEBYTECODE": "1", "PATH": SYSTEM_PATH}
    exports = [
        f"export {name}={value}" for name, value in {**environment, **mode.environment}.items()
    ]
    pytest = (
        f"{ROOT}/.venv/bin/python -m pytest -m cxl -v -p no:cacheprovider -p no:hypothesispytest "
        f"--color=no --durations=5 --timeout=200 {' '.join(mode.tests)}"
    )
    lines = [*exports, "ulimit -l unlimited", f"cd {ROOT}", *mode.setup, pytest]
    return "\n".join([*lines, f"echo {EXIT_MARK}:$?"]) + "\n"


def run_machine(name: str, kernel: Path, timeout_seconds: int) -> bool:
    """Whether all tests passed inside; what the guest printed is shown as it comes."""
    mode, release = MODES[name], kernel.name.removeprefix("kernel-")
    for image, length_bytes in mode.images.items():
        (WORK / image).unlink(missing_ok=True)
        (WORK / image).touch()
        os.truncate(WORK / image, length_bytes)
    disk = WORK / f"init-{name}.gz"
    archive = initial_disk(kernel, guest_script(mode))
    disk.write_bytes(gzip.compress(archive, compresslevel=1))
    command = [
        *("timeout", str(timeout_seconds), "qemu-system-x86_64"),
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-monitor", "none", *mode.qemu),
        *("-fsdev", "local,id=fs0,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=fs0,mount_tag=root,bus=pcie.0"),
        *("-kernel", str(kernel / f"boot/vmlinuz-{release}"), "-initrd", str(disk)),
        *("-append", "console=ttyS0 quiet panic=-1 nokaslr no_timer_check"),
    ]
    exit_text = ""
    skipped = False
    with subprocess.Popen(
        command, cwd=WORK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=with_path()
    ) as machine:
        assert machine.stdout is not None
        for line in machine.stdout:
            text = line.decode(errors="replace").rstrip()
            mark, colon, rest = text.partition(":")
            if mark.endswith(EXIT_MARK) and colon:
                exit_text = rest
            else:
                print(f"{name} | {text}", flush=True)
                skipped |= text.startswith("SKIPPED")  # The machine lacks what it is for.
    for image in mode.images:
        (WORK / image).unlink(missing_ok=True)
    return exit_text == "0" and not skipped


if __name__ == "__main__":
    sys.exit(main())
