"""Starting, ending, and two daemons that want the same thing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.server.admin import REQUEST_SECONDS_MAX, STATUS_SECONDS
from kvtier.server.instance import claimed, locked
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import DaemonFailed, RunningDaemon, running_daemon
from tests.support.raw_client import RawCalls, chain, open_session, wait_reserved


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


def run_serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_sigterm_drains_and_exits_0_without_sockets(daemon: RunningDaemon) -> None:
    daemon.wait_populated()
    assert daemon.terminate() == 0
    assert not daemon.socket.exists()
    assert [path.name for path in daemon.directory.glob("*.sock")] == []


def test_sockets_are_for_owner_and_group_only(daemon: RunningDaemon) -> None:
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in daemon.directory.glob("*.sock")
    }
    assert modes == {
        "kvtier.sock": "0o660",
        "kvtier.grpc.sock": "0o660",
        "kvtier.lane.sock": "0o660",
    }


def test_drain_waits_for_leases_and_refuses_new_ones() -> None:
    with (
        running_daemon(options={"server.drain_seconds": "20"}) as daemon,
        open_session(daemon.socket) as session,
        RawCalls(daemon.grpc_address) as stub,
    ):
        namespace = session.open_namespace()
        session.map_slab()
        reserved = wait_reserved(stub, session.token, namespace.namespace_id, 1)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert daemon.process.poll() is None, "ended while a slot was reserved"
        abort = pb.AbortRequest(
            token=session.token, namespace_id=namespace.namespace_id, slots=reserved.slots
        )
        assert stub.Abort(abort, timeout=5).freed_count == 1
        assert daemon.process.wait(5) == 0


def test_second_signal_ends_at_once() -> None:
    with (
        running_daemon(options={"server.drain_seconds": "60"}) as daemon,
        open_session(daemon.socket) as session,
        RawCalls(daemon.grpc_address) as stub,
    ):
        namespace = session.open_namespace()
        session.map_slab()
        wait_reserved(stub, session.token, namespace.namespace_id, 1)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(5) == 128 + signal.SIGTERM


def test_stale_socket_is_replaced_and_the_daemon_starts_again(daemon: RunningDaemon) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    open_session(daemon.socket).close()


def test_second_daemon_on_one_state_directory_is_refused(daemon: RunningDaemon) -> None:
    other = daemon.directory / "other.sock"
    ended = run_serve("--socket", str(other), "--state-dir", str(daemon.state_dir))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"another daemon (process {daemon.process.pid}) uses server.state_dir" in ended.stderr


def test_a_full_disk_does_not_keep_the_state_directory_from_being_held(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    with locked(tmp_path), pytest.raises(ConfigError, match="another daemon"), locked(tmp_path):
        raise AssertionError("held twice")


def test_live_socket_is_never_replaced(daemon: RunningDaemon, tmp_path: Path) -> None:
    ended = run_serve("--socket", str(daemon.socket), "--state-dir", str(tmp_path))
    assert ended.returncode == 2
    assert f"another daemon (process {daemon.process.pid}) uses server.socket" in ended.stderr
    (daemon.directory / "kvtier.sock.lock").unlink()  # As beside a daemon that knew no such file.
    ended = run_serve("--socket", str(daemon.socket), "--state-dir", str(tmp_path))
    assert ended.returncode == 2
    assert f"a daemon is listening at {daemon.socket} already" in ended.stderr
    open_session(daemon.socket).close()


def test_of_daemons_that_start_at_once_on_one_socket_one_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    with claimed(path):  # Another one, which does not listen yet.
        ended = run_serve("--socket", str(path), "--state-dir", str(tmp_path / "state"))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"another daemon (process {os.getpid()}) uses server.socket {path}" in ended.stderr
    assert not path.exists()


@pytest.mark.parametrize("option", ["admin.address", "grpc.tcp"])
def test_a_start_refused_for_a_busy_port_leaves_no_sockets(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        ended = run_serve(
            *("--socket", str(tmp_path / "k.sock"), "--state-dir", str(tmp_path / "state")),
            *("--set", "admin.address=off", "--set", f"{option}={address}"),
        )
    assert ended.returncode == 2
    assert option in ended.stderr
    assert list(tmp_path.glob("*.sock")) == []


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    ended = run_serve("--socket", str(path), "--state-dir", str(tmp_path / "state"))
    assert ended.returncode == 2
    assert "is there and no socket" in ended.stderr
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--set", "dram.byts=1"], "unknown option dram.byts: did you mean 'bytes'?"),
        (["--dram-bytes", "4GB"], "dram.bytes is '4GB': it must be a size such as 4GiB"),
        (["--grpc-tcp", "0.0.0.0:1"], "other machines reach: set grpc.tls_certificate"),
        (["--config", "/nowhere/kvtier.toml"], "cannot read /nowhere/kvtier.toml"),
        (["--socket", "/tmp/" + "x" * 120], "is too long: at most 107 bytes are possible"),
    ],
)
def test_mistake_in_the_options_is_one_line_and_exit_code_2(
    words: list[str], line: str, tmp_path: Path
) -> None:
    ended = run_serve("--state-dir", str(tmp_path), *words)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("kvtier: ConfigError: ")
    assert line in ended.stderr


def test_assertions_switched_off_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-O", "-m", "kvtier.cli.main", "serve"]
    words = ["--socket", str(tmp_path / "s.sock"), "--state-dir", str(tmp_path)]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert "start it without -O" in ended.stderr


def test_taken_admin_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(DaemonFailed, match=f"admin.address 127.0.0.1:{port}: Address already"),
            running_daemon(options={"admin.address": f"127.0.0.1:{port}"}),
        ):
            pass


def test_page_does_not_answer_a_browser_that_another_site_has_sent(
    daemon: RunningDaemon,
) -> None:
    address = daemon.ready["admin"]
    for name, status in (("evil.example", 403), (address, 200)):
        with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
            connection.request("GET", "/status.json", headers={"Host": name})
            assert connection.getresponse().status == status


def test_healthz_answers_and_other_paths_are_404(daemon: RunningDaemon) -> None:
    assert daemon.http("/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        daemon.http("/nowhere")


def test_silent_connections_and_many_pages_keep_nobody_waiting(daemon: RunningDaemon) -> None:
    host, port = daemon.ready["admin"].split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection((host, int(port))))
        began = time.monotonic()
        with ThreadPoolExecutor(50) as viewers:
            told = list(viewers.map(lambda _: daemon.http("/status.json"), range(50)))
        assert daemon.http("/healthz") == "ok\n"
        seconds = time.monotonic() - began
    assert seconds < REQUEST_SECONDS_MAX, "they waited for the silent ones"
    moments = {json.loads(one)["uptime_seconds"] for one in told}
    assert len(moments) <= seconds / STATUS_SECONDS + 1, "each page costs the loop its own answer"


def test_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = tmp_path / "notify"
        manager.bind(str(path))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        with running_daemon() as daemon:
            assert manager.recv(100) == b"READY=1"
            daemon.terminate()
            assert manager.recv(100) == b"STOPPING=1"


def test_clear_then_kill_restarts_with_the_new_epoch(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as session, RawCalls(daemon.grpc_address) as stub:
        namespace = session.open_namespace()
        asked = pb.ClearRequest(token=session.token, namespace_id=namespace.namespace_id)
        cleared = stub.Clear(asked, timeout=5)
        daemon.kill()
    assert cleared.epoch not in (0, namespace.epoch)
    daemon.start()
    with open_session(daemon.socket) as session:
        assert session.open_namespace().epoch == cleared.epoch
        assert session.open_namespace(weights="v2").epoch != cleared.epoch


def test_damaged_epoch_record_means_a_new_epoch(daemon: RunningDaemon) -> None:
    with open_session(daemon.socket) as session:
        before = session.open_namespace().epoch
    daemon.kill()
    (record,) = (daemon.state_dir / "epochs").glob("*.epoch")
    data = bytearray(record.read_bytes())
    data[25] ^= 1
    record.write_bytes(data)
    daemon.start()
    with open_session(daemon.socket) as session:
        assert session.open_namespace().epoch not in (0, before)


def test_blocks_do_not_outlive_a_daemon_without_holder(daemon: RunningDaemon) -> None:
    generation = daemon.ready["generation"]
    daemon.restart()
    assert daemon.ready["generation"] != generation
    with open_session(daemon.socket) as session, RawCalls(daemon.grpc_address) as stub:
        namespace = session.open_namespace()
        asked = pb.MatchRequest(
            token=session.token,
            namespace_id=namespace.namespace_id,
            hashes=b"".join(chain(3)),
        )
        assert stub.Match(asked, timeout=5).matched_count == 0


def test_sessions_leave_no_descriptor_behind(daemon: RunningDaemon) -> None:
    daemon.wait_populated()
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    counts = []
    for _ in range(3):
        for _ in range(5):
            session = open_session(daemon.socket)
            session.send(pb.ClientFrame(bye=pb.Bye()))
            assert session.is_closed_by_daemon()
            session.close()
        time.sleep(0.1)
        counts.append(len(os.listdir(folder)))
    assert len(set(counts)) == 1, counts
