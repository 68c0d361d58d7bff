"""What the FD store keeps: blocks in DRAM outlive the daemon under a real systemd."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from tests.support.systemd_machine import SystemdMachine

pytestmark = pytest.mark.systemd

BLOCK_BYTES = 128 << 10
BLOCK_COUNT = 32


def restart(machine: SystemdMachine) -> None:
    machine.systemctl("restart", "kvtier")


def kill(machine: SystemdMachine) -> None:
    machine.run("kill", "-KILL", str(machine.main_pid))
    machine.wait(lambda: machine.property("NRestarts") == "1", "the restart")


def hang(machine: SystemdMachine) -> None:
    machine.run("kill", "-STOP", str(machine.main_pid))
    machine.wait(lambda: machine.property("NRestarts") == "1", "the watchdog")


@pytest.mark.parametrize("end", [restart, kill, hang])
def test_blocks_in_memory_outlive_the_daemon(
    end: Callable[[SystemdMachine], None], machine: SystemdMachine
) -> None:
    machine.drop_in("[Service]\nWatchdogSec=2\n")
    machine.systemctl("start", "kvtier")
    sent = os.urandom(BLOCK_COUNT * BLOCK_BYTES)
    (machine.root / "var/tmp/sent").write_bytes(sent)
    put = machine.kvtier("put", "/var/tmp/sent", "--block-bytes", str(BLOCK_BYTES))
    assert put.returncode == 0, put.stderr
    (machine.root / "var/tmp/receipt").write_text(put.stdout)
    assert int(machine.property("NFileDescriptorStore")) > 0
    before = machine.main_pid
    end(machine)
    machine.wait(lambda: machine.property("ActiveState") == "active", "the next daemon")
    assert machine.main_pid != before
    found = machine.kvtier("match", "/var/tmp/receipt", "--json")
    assert found.returncode == 0, found.stderr + machine.journal()
    assert json.loads(found.stdout)["tiers"] == {"dram": BLOCK_COUNT}
    got = machine.kvtier("get", "/var/tmp/receipt", "-o", "/var/tmp/engine/got")
    assert got.returncode == 0, got.stderr
    assert (machine.root / "var/tmp/engine/got").read_bytes() == sent
    assert machine.kvtier("check").returncode == 0


def test_a_stop_gives_the_memory_back(machine: SystemdMachine) -> None:
    """On systemd 254 and later, which keeps it, after `systemctl clean`."""
    machine.systemctl("start", "kvtier")
    machine.wait(lambda: int(machine.property("NFileDescriptorStore")) > 0, "something to keep")
    machine.systemctl("stop", "kvtier")
    machine.run("systemctl", "clean", "--what=fdstore", "kvtier", check=False)
    assert machine.property("NFileDescriptorStore") == "0"
