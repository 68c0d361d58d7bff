"""A container with systemd as PID 1, made of this machine's own root, in which kvtier is installed.

systemd-nspawn boots an overlay of /, so nothing has to be downloaded and nothing of this machine
changes. kvtier lies in /opt/kvtier, as docs/operations.md has it: the wheel, and beside it the
packages that it needs, lent by the environment that the tests run in.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.wheel import ROOT, build_wheel, unpack_wheel

UNITS = ROOT / "deploy" / "systemd"
DROP_INS = "etc/systemd/system/kvtier.service.d"
LENT_PYTHON = "/opt/python"
LENT_PACKAGES = "/opt/packages"
# Where the documents tell people to put each file.
PLACES = {
    "kvtier.service": "etc/systemd/system/kvtier.service",
    "kvtier@.service": "etc/systemd/system/kvtier@.service",
    "kvtier.socket": "etc/systemd/system/kvtier.socket",
    "kvtier.sysusers.conf": "usr/lib/sysusers.d/kvtier.conf",
    "kvtier.tmpfiles.conf": "usr/lib/tmpfiles.d/kvtier.conf",
    "kvtier.toml": "etc/kvtier/kvtier.toml",
}


class Impossible(Exception):
    """There can be no such machine here; the message says why."""


def check_possible() -> None:
    if os.geteuid() != 0:
        raise Impossible("it needs root, for namespaces and mounts")
    if missing := [tool for tool in ("systemd-nspawn", "nsenter") if not shutil.which(tool)]:
        needed = " and ".join(missing)
        raise Impossible(f"it needs {needed} (Debian: systemd-container, util-linux)")
    if not Path("/lib/systemd/systemd").exists():
        raise Impossible("it needs systemd's own program, to start it in the container")


class SystemdMachine:
    """One booted container."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def prepare(self) -> None:
        """The overlay, with kvtier's units and wheel in it."""
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir()
        options = f"lowerdir=/,upperdir={self.folder}/upper,workdir={self.folder}/work"
        mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(self.root)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            raise Impossible(f"no overlay of this machine's root: {done.stderr.strip()}")
        # Its own life, not this machine's.
        (self.root / "etc/machine-id").write_text("")
        shutil.rmtree(self.root / "var/log/journal", ignore_errors=True)
        for name, place in PLACES.items():
            target = self.root / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(UNITS / name, target)

    def install(self) -> None:
        """/opt/kvtier, as `python3 -m venv` and `pip install kvtier-….whl` make it."""
        version = f"python{sysconfig.get_python_version()}"
        self.run(f"{LENT_PYTHON}/bin/{version}", "-m", "venv", "--without-pip", "/opt/kvtier")
        packages = self.root / "opt/kvtier/lib" / version / "site-packages"
        (packages / "lent.pth").write_text(f"{LENT_PACKAGES}\n")
        unpack_wheel(build_wheel(self.folder), packages)
        program = self.root / "opt/kvtier/bin/kvtier"
        program.write_text(
            # Lent, so its libraries are not where it was built to look for them.
            f"#!/bin/sh\nLD_LIBRARY_PATH={LENT_PYTHON}/lib "
            'exec /opt/kvtier/bin/python -m kvtier.cli.main "$@"\n'
        )
        program.chmod(0o755)
        self.run("systemd-sysusers", "kvtier.conf")
        self.run("systemd-tmpfiles", "--create", "kvtier.conf")

    def boot(self) -> None:
        lent = {sys.base_prefix: LENT_PYTHON, sysconfig.get_path("purelib"): LENT_PACKAGES}
        self._nspawn = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", f"--directory={self.root}", "--register=no"),
                *("--keep-unit", "--private-network", f"--machine=kvtier-{os.getpid()}"),
                *("--kill-signal=SIGRTMIN+3", "--link-journal=no", "--console=pipe"),
                *(f"--bind-ro={source}:{target}" for source, target in lent.items()),
                *("/lib/systemd/systemd", "--unit=basic.target"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "console").open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "UNIFIED_CGROUP_HIERARCHY": "1"},
        )
        self.wait(self._has_booted, "the container to boot")

    def end(self) -> None:
        """Ends all that runs inside, and removes the overlay."""
        if self._nspawn is not None:
            self._nspawn.terminate()  # nspawn hands it on as the orderly kind.
            try:
                self._nspawn.wait(10)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        if self.root.is_mount():
            subprocess.run(["umount", "--recursive", str(self.root)], check=False)

    # ------------------------------------------------------------------------------------ inside

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command inside; with its output in the error, if it fails."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._leader), "--all", "--root", "--wd", *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
                f"{self.journal()}"
            )
        return done

    def renew(self) -> None:
        """Stopped units, the files as they were delivered but for a small budget, an empty log."""
        self.run("systemctl", "stop", "kvtier.socket", "kvtier.service", check=False)
        shutil.rmtree(self.root / DROP_INS, ignore_errors=True)
        for name, place in PLACES.items():
            shutil.copy(UNITS / name, self.root / place)
        self.configure("")
        self.systemctl("daemon-reload")
        self.run("systemctl", "reset-failed", "kvtier.service", "kvtier.socket", check=False)
        self.run("journalctl", "--quiet", "--rotate")
        self.run("journalctl", "--quiet", "--vacuum-time=1ms")

    def configure(self, tables: str) -> None:
        """/etc/kvtier/kvtier.toml: what is delivered, with little memory, and these tables."""
        given = tomllib.loads((UNITS / "kvtier.toml").read_text())
        given["dram"] = {"bytes": "64MiB"}
        given |= tomllib.loads(tables)
        lines = []
        for section, options in given.items():
            lines.append(f"[{section}]")
            lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        text = "\n".join(lines) + "\n"
        (self.root / PLACES["kvtier.toml"]).write_text(text)

    def drop_in(self, text: str) -> None:
        """What `systemctl edit kvtier` makes."""
        (self.root / DROP_INS).mkdir(exist_ok=True)
        (self.root / DROP_INS / "test.conf").write_text(text)
        self.systemctl("daemon-reload")

    @property
    def main_pid(self) -> int:
        return int(self.property("MainPID"))

    def systemctl(self, *words: str) -> str:
        return self.run("systemctl", *words).stdout

    def kvtier(self, *words: str, user: str = "engine") -> subprocess.CompletedProcess[str]:
        """A command of kvtier's, as an engine's user."""
        return self.run(
            *("runuser", "-u", user, "--", "env", "KVTIER_SOCKET=/run/kvtier/kvtier.sock"),
            *("/opt/kvtier/bin/kvtier", *words),
            check=False,
        )

    def property(self, name: str, unit: str = "kvtier.service") -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def journal(self, unit: str = "kvtier.service") -> str:
        words = ("journalctl", "--no-pager", "--output=cat", "--unit", unit)
        return self.run(*words, check=False).stdout if self._leader else ""

    def wait(self, is_so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                console = (self.folder / "console").read_text(errors="replace")[-2000:]
                raise AssertionError(f"waited {seconds:g} s for {what}\n{console}{self.journal()}")
            time.sleep(0.1)

    def _has_booted(self) -> bool:
        assert self._nspawn is not None, "boot starts it"
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                # PID 1 of a namespace of its own: nspawn's other child is not.
                status = Path(f"/proc/{child}/status").read_text()
                if "\nNSpid:\t" in status and status.split("\nNSpid:\t")[1].split("\n")[0].endswith(
                    "\t1"
                ):
                    self._leader = int(child)
        if not self._leader:
            return False
        return "active" in self.run("systemctl", "is-active", "basic.target", check=False).stdout


@contextlib.contextmanager
def systemd_machine() -> Iterator[SystemdMachine]:
    """A container with kvtier installed and not started, and a user `engine` of its group.

    Raises Impossible.
    """
    check_possible()
    (ROOT / ".kvtier").mkdir(exist_ok=True)
    # On a disk, not in memory: a pool's files are read and written past the page cache.
    folder = Path(tempfile.mkdtemp(prefix="systemd-", dir=ROOT / ".kvtier"))
    machine = SystemdMachine(folder)
    try:
        machine.prepare()
        machine.boot()
        machine.install()
        machine.run("useradd", "--system", "--groups", "kvtier", "engine")
        machine.run("install", "--directory", "--owner=engine", "/var/tmp/engine")
        machine.run("useradd", "--system", "stranger")
        yield machine
    finally:
        machine.end()
        shutil.rmtree(folder, ignore_errors=True)
