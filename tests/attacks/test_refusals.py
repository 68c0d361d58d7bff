"""Each attack is refused, leaves one line (or one count) behind, and costs its victim nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from kvtier.lane import HEAD, PAYLOAD_BYTES_MAX
from kvtier.paths import lane_socket_path
from kvtier.server.calls import MESSAGE_BYTES_MAX
from kvtier.server.doors import RECEIVED_BYTES_MAX
from kvtier.server.lane import FRAME_SECONDS_MAX
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.processes import eventually
from tests.support.raw_client import RawCalls, RawSession, chain, connect, hello, open_session
from tests.support.tenant_daemon import Tenants, lane_call, matched, offload, running_tenants
from tests.support.users import OTHER_UID

HASHES = chain(4, seed=3)
BYTE = 6
FRAME_ERRORS = 'kvtier_frame_errors_total{error="BadFrame"}'
UNREAD = "kvtier_grpc_unread_calls_count"
TOO_LARGE = 'kvtier_calls_total{method="Match",outcome="LimitExceeded"}'
UNKNOWN = 'kvtier_calls_total{method="Match",outcome="UnknownNamespace"}'
RATED = 'kvtier_tenant_refused_calls_total{tenant="rated"}'


@dataclass(frozen=True)
class Scene:
    """A daemon, its victim at work, and a half of a frame that was sent when it began."""

    tenants: Tenants
    victim: RawSession
    namespace_id: int
    slots: list[int]
    half: socket.socket

    def nothing_was_lost(self) -> None:
        assert matched(self.victim, self.namespace_id, HASHES) == len(HASHES)
        for slot in self.slots:
            assert bytes(self.victim.slot_view(slot)) == bytes([BYTE]) * 4096


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    named = {
        "red": {},
        "blue": {},
        "strangers": {"uids": str(OTHER_UID + 1)},
        "rated": {"calls_per_second": "1"},
    }
    with running_tenants(named, {"server.hello_seconds": "0.5"}) as tenants:
        tenants.daemon.wait_populated()
        with (
            socket.socket(socket.AF_UNIX) as half,
            open_session(tenants.socket("red")) as victim,
        ):
            half.connect(str(lane_socket_path(tenants.socket("blue"))))
            half.sendall(HEAD.pack(100, 0) + b"half")
            opened = victim.open_namespace()
            victim.map_slab()
            slots = offload(victim, opened.namespace_id, HASHES, BYTE)
            yield Scene(tenants, victim, opened.namespace_id, slots, half)


def code_of(call: object, request: object) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=10)  # type: ignore[operator]
    code: grpc.StatusCode = caught.value.code()
    return code


def strangers_session(scene: Scene) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(10)
        raw.connect(str(scene.tenants.socket("strangers")))
        assert RawSession(raw).wait_error().name == "Forbidden"


def strangers_call(scene: Scene) -> None:
    with pytest.raises(ConnectionError):
        lane_call(scene.tenants.socket("strangers"), "Match", pb.MatchRequest())


def stolen_token(scene: Scene) -> None:
    request = pb.MatchRequest(token=scene.victim.token, namespace_id=scene.namespace_id)
    code, _ = lane_call(scene.tenants.socket("blue"), "Match", request)
    assert code is grpc.StatusCode.PERMISSION_DENIED


def stolen_session(scene: Scene) -> None:
    with connect(scene.tenants.socket("blue")) as thief:
        claim = hello(
            thief, old_session_id=scene.victim.opened.session_id, old_token=scene.victim.token
        )
        thief.send(pb.ClientFrame(hello=claim))
        assert thief.wait_error().name == "Unauthenticated"


def guessed_token(scene: Scene) -> None:
    request = pb.MatchRequest(token=bytes(32), namespace_id=scene.namespace_id)
    code, _ = lane_call(scene.tenants.socket("red"), "Match", request)
    assert code is grpc.StatusCode.UNAUTHENTICATED


def forged_namespace(scene: Scene) -> None:
    with open_session(scene.tenants.socket("blue")) as blue:
        request = pb.MatchRequest(
            token=blue.token, namespace_id=scene.namespace_id, hashes=b"".join(HASHES)
        )
        code, _ = lane_call(scene.tenants.socket("blue"), "Match", request)
        assert code is grpc.StatusCode.NOT_FOUND


def foreign_slots(scene: Scene) -> None:
    with open_session(scene.tenants.socket("blue")) as blue:
        own = blue.open_namespace().namespace_id
        request = pb.AbortRequest(token=blue.token, namespace_id=own, slots=scene.slots)
        with RawCalls(blue.opened.grpc_address) as stub:
            assert code_of(stub.Abort, request) is grpc.StatusCode.INVALID_ARGUMENT


def malformed_frames(scene: Scene) -> None:
    with open_session(scene.tenants.socket("blue")) as blue:
        for _ in range(8):
            blue.send_bytes(b"\xff")
            assert blue.wait_error().name == "BadFrame"
        assert blue.is_closed_by_daemon()


def oversized_frame(scene: Scene) -> None:
    with open_session(scene.tenants.socket("blue")) as blue:
        blue.send_bytes(bytes(66_000))
        assert "this one was cut" in blue.wait_error().message


def oversized_call(scene: Scene) -> None:
    with socket.socket(socket.AF_UNIX) as lane:
        lane.settimeout(10)
        lane.connect(str(lane_socket_path(scene.tenants.socket("blue"))))
        lane.sendall(HEAD.pack(PAYLOAD_BYTES_MAX + 1, 0))
        assert lane.recv(1) == b""


def oversized_message(scene: Scene) -> None:
    assert code_of_message(scene, MESSAGE_BYTES_MAX) is grpc.StatusCode.RESOURCE_EXHAUSTED


def message_beyond_grpc(scene: Scene) -> None:
    assert code_of_message(scene, RECEIVED_BYTES_MAX) is grpc.StatusCode.RESOURCE_EXHAUSTED


def code_of_message(scene: Scene, hashes_bytes: int) -> grpc.StatusCode:
    with open_session(scene.tenants.socket("blue")) as blue:
        request = pb.MatchRequest(token=blue.token, hashes=bytes(hashes_bytes))
        with RawCalls(blue.opened.grpc_address) as stub:
            return code_of(stub.Match, request)


def no_hello(scene: Scene) -> None:
    with connect(scene.tenants.socket("blue")) as silent:
        assert "no Hello within" in silent.wait_error().message


def too_many_calls(scene: Scene) -> None:
    with open_session(scene.tenants.socket("rated"), role=pb.ROLE_TOOL, shards=[]) as rated:
        namespace_id = rated.open_namespace().namespace_id
        request = pb.MatchRequest(token=rated.token, namespace_id=namespace_id)
        codes = [lane_call(scene.tenants.socket("rated"), "Match", request)[0] for _ in range(2)]
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes


@pytest.mark.parametrize(
    ("attack", "line", "count"),
    [
        (strangers_session, "connection refused", None),
        (strangers_call, "connection refused", None),
        (stolen_token, "call refused", None),
        (stolen_session, "connection refused", None),
        (guessed_token, "call refused", None),
        (forged_namespace, "call refused", UNKNOWN),
        (foreign_slots, "call refused", None),
        (malformed_frames, "session closed after bad frames", None),
        (oversized_frame, "session frame refused", FRAME_ERRORS),
        (oversized_call, "lane frame refused", None),
        (oversized_message, "call refused", TOO_LARGE),
        (message_beyond_grpc, None, UNREAD),  # No code of ours sees it.
        (no_hello, "connection refused", None),
        (too_many_calls, "call refused", RATED),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_an_attack_is_refused_told_once_and_costs_its_victim_nothing(
    scene: Scene, attack: Callable[[Scene], None], line: str | None, count: str | None
) -> None:
    tenants = scene.tenants

    def lines() -> int:
        return 0 if line is None else len(tenants.lines(line))

    def counted() -> float:
        return 0.0 if count is None else tenants.daemon.metrics().get(count, 0.0)

    before, count_before = lines(), counted()
    attack(scene)
    eventually(lambda: lines() > before or line is None, "no line says so")
    time.sleep(0.05)
    assert lines() == before + (line is not None)
    assert counted() == count_before + (count is not None)
    scene.nothing_was_lost()


def test_half_a_frame_is_given_up_and_told_once(scene: Scene) -> None:
    scene.half.settimeout(4 * FRAME_SECONDS_MAX)
    assert scene.half.recv(1) == b""
    assert len(scene.tenants.lines("lane frame too slow")) == 1
    scene.nothing_was_lost()
