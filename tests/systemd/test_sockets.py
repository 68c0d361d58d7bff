"""kvtier.socket: systemd listens, and the daemon takes over what it is handed."""

from __future__ import annotations

import time

import pytest

from tests.support.systemd_machine import SystemdMachine

pytestmark = pytest.mark.systemd

SESSION = "/run/kvtier/kvtier.sock"


def inode_of(machine: SystemdMachine, path: str) -> str:
    return machine.run("stat", "--format=%i:%a:%U:%G", path).stdout.strip()


def test_the_first_client_starts_the_daemon(machine: SystemdMachine) -> None:
    machine.systemctl("start", "kvtier.socket")
    assert machine.property("ActiveState") == "inactive"
    before = inode_of(machine, SESSION)
    assert before.endswith(":660:kvtier:kvtier")
    told = machine.kvtier("check")
    assert told.returncode == 0, told.stderr + machine.journal()
    assert machine.property("ActiveState") == "active"
    assert inode_of(machine, SESSION) == before, "the daemon made no socket of its own"


def test_sockets_outlive_the_daemon_and_who_connects_meanwhile_waits(
    machine: SystemdMachine,
) -> None:
    machine.systemctl("start", "kvtier.socket", "kvtier.service")
    before = inode_of(machine, SESSION), inode_of(machine, "/run/kvtier/kvtier.lane.sock")
    machine.systemctl("restart", "kvtier")
    assert before == (
        inode_of(machine, SESSION),
        inode_of(machine, "/run/kvtier/kvtier.lane.sock"),
    )
    machine.run("kill", "-KILL", str(machine.main_pid))
    began = time.monotonic()
    told = machine.kvtier("check")
    assert told.returncode == 0, f"refused after {time.monotonic() - began:.1f} s: {told.stderr}"
    machine.systemctl("stop", "kvtier.socket", "kvtier.service")
    assert machine.run("test", "-e", SESSION, check=False).returncode == 1


def test_a_socket_unit_that_disagrees_with_the_configuration_is_told(
    machine: SystemdMachine,
) -> None:
    machine.configure('[server]\nsocket = "/run/kvtier/other.sock"\n')
    machine.systemctl("start", "kvtier.socket")
    assert machine.run("systemctl", "start", "kvtier.service", check=False).returncode
    assert "its socket unit and server.socket must agree" in machine.journal()
