"""The systemd units, unstarted: their options, their exposure, and that they fit all else."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from kvtier.config import load
from kvtier.paths import SOCKET_VARIABLE, lane_socket_path
from tests.tidy.sources import ROOT

UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("kvtier.service", "kvtier@.service")
EXPOSURE_MAX = 3.0
# Known from this version of systemd on; an older one says that it ignores it.
NEWER = {"FileDescriptorStorePreserve": 254}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze (Debian: systemd)"
)


def unit_of(name: str) -> dict[str, dict[str, str]]:
    """Section -> option -> its values, one a line: an option may be given several times."""
    found: dict[str, dict[str, str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            options = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            option, _, value = line.partition("=")
            options[option] = f"{options[option]}\n{value}" if option in options else value
    return found


def systemd_version() -> int:
    told = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True)
    return int(told.stdout.split()[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of its own, with our units and what they start; systemd's own units are its."""
    for unit in (*SERVICES, "kvtier.socket"):
        target = tmp_path / "etc/systemd/system" / unit
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(UNITS / unit, target)
    (tmp_path / "usr/lib/systemd").mkdir(parents=True)
    own = next(path for path in map(Path, ("/usr/lib/systemd", "/lib/systemd")) if path.exists())
    shutil.copytree(own / "system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    for option in ("ExecStart", "ExecReload"):
        program = tmp_path / unit_of("kvtier.service")["Service"][option].split()[0].lstrip("/")
        program.parent.mkdir(parents=True)
        shutil.copy("/bin/true", program)
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("unit", ["kvtier.service", "kvtier@blue.service", "kvtier.socket"])
def test_systemd_knows_every_option(unit: str, root: Path) -> None:
    told = subprocess.run(
        ["systemd-analyze", "verify", f"--root={root}", unit], capture_output=True, text=True
    )
    too_new = {name for name, since in NEWER.items() if systemd_version() < since}
    complaints = [
        line
        for line in (told.stdout + told.stderr).splitlines()
        if not any(f"Unknown key '{name}'" in line for name in too_new)
    ]
    assert not complaints
    assert told.returncode == 0


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES)
def test_the_service_is_exposed_by_three_at_most(unit: str) -> None:
    told = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(UNITS / unit)],
        capture_output=True,
        text=True,
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", told.stdout)
    assert found, told.stdout + told.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_a_tenant_s_service_is_the_other_one_but_for_its_names() -> None:
    one, template = unit_of("kvtier.service"), unit_of("kvtier@.service")
    assert list(one) == list(template)
    differing = {
        name
        for section in one
        for name in {*one[section], *template[section]}
        if one[section].get(name) != template[section].get(name)
    }
    assert differing == {
        *("Description", "Environment", "ExecStart"),
        *("Group", "RuntimeDirectory", "StateDirectory"),
    }


def test_the_socket_unit_listens_where_the_configuration_says_as_the_daemon_would() -> None:
    config = load(UNITS / "kvtier.toml", {})
    unit, service = unit_of("kvtier.socket")["Socket"], unit_of("kvtier.service")["Service"]
    session = Path(config.server.socket)
    assert unit["ListenSequentialPacket"] == str(session)
    assert unit["ListenStream"] == str(lane_socket_path(session))
    assert (unit["SocketMode"], unit["DirectoryMode"]) == ("0660", "0755")
    assert (unit["SocketUser"], unit["SocketGroup"]) == (service["User"], service["Group"])
    assert session.parent == Path("/run", service["RuntimeDirectory"])
    assert f"{SOCKET_VARIABLE}={session}" in service["Environment"].splitlines()


def test_the_daemon_knows_of_the_store_whatever_the_version_of_systemd() -> None:
    service = unit_of("kvtier.service")["Service"]
    told = f"FDSTORE={service['FileDescriptorStoreMax']}"
    assert told in service["Environment"].splitlines()


def test_what_is_made_at_boot_belongs_to_who_runs_the_daemon() -> None:
    service = unit_of("kvtier.service")["Service"]
    user, group = service["User"], service["Group"]
    lines = [
        line.split()
        for name in ("kvtier.sysusers.conf", "kvtier.tmpfiles.conf")
        for line in (UNITS / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    [made_user, directory] = lines
    assert made_user[:2] == ["u", user]
    assert made_user[-1] == f"/var/lib/{service['StateDirectory']}"
    mode = service["RuntimeDirectoryMode"]
    assert directory == ["d", f"/run/{service['RuntimeDirectory']}", mode, user, group, "-"]


def test_the_document_says_what_to_do_with_each_file() -> None:
    told = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    names = [path.name for path in UNITS.iterdir()]
    assert len(names) > 5
    assert not [name for name in names if name not in told]


def test_the_service_waits_as_long_as_the_daemon_drains() -> None:
    config = load(UNITS / "kvtier.toml", {})
    service = unit_of("kvtier.service")["Service"]
    assert int(service["TimeoutStopSec"]) >= config.server.drain_seconds + 10
    assert tomllib.loads((UNITS / "kvtier.toml").read_text())["server"]["socket"]
