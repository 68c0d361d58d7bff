"""A daemon with several tenants, and what their clients do."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvtier.lane import HEAD, LANE_CALLS, pack
from kvtier.paths import lane_socket_path
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.raw_client import HASH_BYTES, RawCalls, RawSession, wait_reserved


@dataclass(frozen=True)
class Tenants:
    """The daemon, and where each tenant connects."""

    daemon: RunningDaemon
    folder: Path

    def socket(self, name: str) -> Path:
        return self.folder / f"{name}.sock"

    def open_to_all(self) -> None:
        """As if everybody were in the sockets' group."""
        self.folder.chmod(0o755)
        for path in self.folder.glob("*.sock"):
            path.chmod(0o666)

    def lines(self, event: str) -> list[str]:
        """Of the daemon's log."""
        return [line for line in self.daemon.log_text.splitlines() if event in line]


@contextlib.contextmanager
def running_tenants(
    tenants: Mapping[str, Mapping[str, str]],
    options: Mapping[str, str] | None = None,
    *,
    dram_bytes: str = "64MiB",
    slab_bytes: str = "4MiB",
    state_dir: Path | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[Tenants]:
    """`tenants`: names, each with its options but the socket."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    settings = dict(options or {})
    for name, its in tenants.items():
        settings[f"tenant.{name}.socket"] = str(folder / f"{name}.sock")
        settings |= {f"tenant.{name}.{option}": value for option, value in its.items()}
    try:
        with running_daemon(
            dram_bytes=dram_bytes,
            slab_bytes=slab_bytes,
            options=settings,
            state_dir=state_dir,
            program=program,
        ) as daemon:
            yield Tenants(daemon, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lane_call(path: Path, call: str, request: pb.MatchRequest) -> tuple[grpc.StatusCode, bytes]:
    """One call by the lane beside this session socket; a closed connection raises."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(lane_socket_path(path)))
        connection.sendall(pack(LANE_CALLS.index(call), request.SerializeToString()))
        head = connection.recv(HEAD.size, socket.MSG_WAITALL)
        if len(head) < HEAD.size:
            raise ConnectionError("the daemon closed the lane")
        length, status = HEAD.unpack(head)
        answer = connection.recv(length, socket.MSG_WAITALL) if length else b""
    return next(code for code in grpc.StatusCode if code.value[0] == status), answer


def offload(session: RawSession, namespace_id: int, hashes: list[bytes], byte: int) -> list[int]:
    """Blocks of one byte's value; their slots. The session has mapped a slab."""
    with RawCalls(session.opened.grpc_address) as stub:
        reserved = wait_reserved(stub, session.token, namespace_id, len(hashes))
        slots = list(reserved.slots)
        for slot in slots:
            view = session.slot_view(slot)
            view[:] = bytes([byte]) * len(view)
        committed = stub.Commit(
            pb.CommitRequest(
                token=session.token,
                namespace_id=namespace_id,
                hashes=b"".join(hashes),
                slots=slots,
                epoch=reserved.epoch,
            ),
            timeout=10,
        )
        assert committed.outcomes == bytes(len(hashes))
    return slots


def matched(session: RawSession, namespace_id: int, hashes: list[bytes]) -> int:
    assert all(len(one) == HASH_BYTES for one in hashes)
    with RawCalls(session.opened.grpc_address) as stub:
        request = pb.MatchRequest(
            token=session.token, namespace_id=namespace_id, hashes=b"".join(hashes)
        )
        return int(stub.Match(request, timeout=10).matched_count)


def own_uid() -> int:
    return os.geteuid()
