"""kvtier.service under a real systemd: ready, sandboxed, watched, restarted or not."""

from __future__ import annotations

import os

import pytest

from tests.support.systemd_machine import SystemdMachine

pytestmark = pytest.mark.systemd

SOCKETS = ("kvtier.sock", "kvtier.grpc.sock", "kvtier.lane.sock")


def mode_of(machine: SystemdMachine, path: str) -> tuple[str, str, str]:
    kind, mode, owner, group = machine.run("stat", "--format=%F:%a:%U:%G", path).stdout.split(":")
    return kind, mode, f"{owner}:{group.strip()}"


def test_it_is_ready_when_systemd_says_so_and_serves_who_is_in_the_group(
    machine: SystemdMachine,
) -> None:
    machine.systemctl("start", "kvtier")
    assert machine.property("ActiveState") == "active"
    for name in SOCKETS:
        assert mode_of(machine, f"/run/kvtier/{name}") == ("socket", "660", "kvtier:kvtier")
    told = machine.kvtier("check")
    assert told.returncode == 0, told.stderr
    assert machine.kvtier("check", user="stranger").returncode == 3, "who is not is kept out"
    process = machine.run("cat", f"/proc/{machine.main_pid}/status").stdout
    assert "\nCapEff:\t0000000000000000\n" in process
    assert "\nSeccomp:\t2\n" in process
    assert "\nNoNewPrivs:\t1\n" in process


def test_blocks_come_back_through_the_sandbox_after_the_daemon_was_stopped(
    machine: SystemdMachine,
) -> None:
    """A pool is made in the state directory, written past the page cache, and read again."""
    machine.configure('[nvme]\npaths = ["/var/lib/kvtier/pool"]\nbytes = "512MiB"\n')
    machine.systemctl("start", "kvtier")
    sent = os.urandom(4 << 20)
    (machine.root / "var/tmp/sent").write_bytes(sent)
    put = machine.kvtier("put", "/var/tmp/sent", "--block-bytes", "131072")
    assert put.returncode == 0, put.stderr
    (machine.root / "var/tmp/receipt").write_text(put.stdout)
    machine.systemctl("stop", "kvtier")
    machine.systemctl("start", "kvtier")
    machine.wait(lambda: "pool read blocks=32" in machine.journal(), "the pool", 10)
    got = machine.kvtier("get", "/var/tmp/receipt", "-o", "/var/tmp/engine/got")
    assert got.returncode == 0, got.stderr + machine.journal()
    assert (machine.root / "var/tmp/engine/got").read_bytes() == sent
    assert "page cache" not in machine.journal(), "O_DIRECT was not to be had"


def test_a_pool_elsewhere_is_refused_in_a_line_until_a_drop_in_allows_it(
    machine: SystemdMachine,
) -> None:
    machine.run("install", "--directory", "--owner=kvtier", "/srv/pool")
    machine.configure('[nvme]\npaths = ["/srv/pool/file"]\nbytes = "512MiB"\n')
    assert machine.run("systemctl", "start", "kvtier", check=False).returncode
    assert machine.property("ExecMainStatus") == "2", "a mistake that no restart mends"
    assert "ConfigError: /srv/pool/file: Read-only file system" in machine.journal()
    machine.drop_in("[Service]\nReadWritePaths=/srv/pool\n")
    machine.systemctl("start", "kvtier")
    machine.wait(lambda: "nvme pool opened" in machine.journal(), "the pool", 10)


def test_a_reload_reads_the_file_again_and_the_daemon_goes_on(machine: SystemdMachine) -> None:
    machine.systemctl("start", "kvtier")
    before = machine.main_pid
    machine.configure("[lease]\nseconds_max = 30\n")
    machine.systemctl("reload", "kvtier")
    read = "lists of certificates read again names=0 restart=lease.seconds_max"
    machine.wait(lambda: read in machine.journal(), "the file is read again", 10)
    assert machine.main_pid == before
    assert machine.kvtier("check").returncode == 0


def test_a_daemon_that_hangs_is_ended_with_its_stacks_in_the_log_and_started_again(
    machine: SystemdMachine,
) -> None:
    machine.drop_in("[Service]\nWatchdogSec=1\n")
    machine.systemctl("start", "kvtier")
    before = machine.main_pid
    # Longer than the watchdog waits: a daemon that is well is left alone.
    machine.run("sleep", "1.5")
    assert machine.main_pid == before
    machine.run("kill", "-STOP", str(before))
    machine.wait(lambda: machine.property("NRestarts") == "1", "the watchdog")
    machine.wait(lambda: machine.property("ActiveState") == "active", "the next daemon")
    assert machine.main_pid != before
    told = machine.journal()
    assert "watchdog" in told.lower()
    assert "Fatal Python error: Aborted" in told
    assert machine.kvtier("check").returncode == 0


def test_a_killed_daemon_is_started_again_on_the_same_paths(machine: SystemdMachine) -> None:
    machine.systemctl("start", "kvtier")
    machine.run("kill", "-KILL", str(machine.main_pid))
    machine.wait(lambda: machine.property("NRestarts") == "1", "the restart")
    machine.wait(lambda: machine.property("ActiveState") == "active", "the next daemon")
    assert machine.kvtier("check").returncode == 0


def test_a_mistake_in_the_configuration_is_told_and_not_retried(machine: SystemdMachine) -> None:
    machine.configure('[dram]\nbites = "64MiB"\n')
    assert machine.run("systemctl", "start", "kvtier", check=False).returncode
    machine.run("sleep", "1.5")  # RestartSec is 1.
    assert machine.property("ActiveState") == "failed"
    assert machine.property("NRestarts") == "0"
    assert "unknown option dram.bites: did you mean 'bytes'?" in machine.journal()


def test_a_stop_drains_and_is_no_failure(machine: SystemdMachine) -> None:
    machine.systemctl("start", "kvtier")
    machine.systemctl("stop", "kvtier")
    assert machine.property("ActiveState") == "inactive"
    assert machine.property("Result") == "success"
    assert "drained" in machine.journal()
    # Containers have it mounted: it must stay.
    assert mode_of(machine, "/run/kvtier") == ("directory", "755", "kvtier:kvtier")


def test_tenants_have_daemons_of_their_own_and_cannot_reach_another_s(
    machine: SystemdMachine,
) -> None:
    machine.run("groupadd", "--system", "--force", "kvtier-blue")
    (machine.root / "etc/kvtier/blue.toml").write_text(
        '[server]\ntenant = "blue"\n[dram]\nbytes = "32MiB"\n[admin]\naddress = "127.0.0.1:9465"\n'
    )
    machine.systemctl("start", "kvtier", "kvtier@blue")
    socket = "/run/kvtier/blue/kvtier.sock"
    assert mode_of(machine, socket) == ("socket", "660", "kvtier:kvtier-blue")
    assert machine.kvtier("check", "--socket", socket).returncode == 3
    assert machine.kvtier("check").returncode == 0
    machine.systemctl("stop", "kvtier@blue")
