"""Hello against the daemon's clock: one clock, another one, or too late to tell."""

from __future__ import annotations

import pytest

from kvtier.errors import BadFrame, ClockUncertain
from kvtier.server.handshake import CLOCK_TOLERANCE_NS, Greeting, check_hello
from kvtier.types import PROTOCOL_VERSION
from kvtier.v1 import kvtier_pb2 as pb

WELCOME_NS = 10**12


def greeting(round_trip_ns: int = 1000, *, is_life_provable: bool = True) -> Greeting:
    return Greeting(WELCOME_NS, WELCOME_NS + round_trip_ns, 5.0, is_life_provable)


def hello(client_ns: int) -> pb.Hello:
    return pb.Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=bytes(16),
        role=pb.ROLE_BOTH,
        shards=[0],
        welcome_ns=WELCOME_NS,
        client_ns=client_ns,
    )


def test_clock_inside_the_round_trip_passes_fds() -> None:
    opening, reason = check_hello(hello(WELCOME_NS + 500), greeting())
    assert (opening.by_value, reason) == (False, "")


def test_the_node_of_a_device_counts_from_one_so_that_none_is_0() -> None:
    said = hello(WELCOME_NS + 500)
    assert check_hello(said, greeting())[0].node is None
    said.memory_node = 1
    assert check_hello(said, greeting())[0].node == 0


@pytest.mark.parametrize("offset_ns", [-2 * CLOCK_TOLERANCE_NS, 2 * CLOCK_TOLERANCE_NS, -(10**12)])
def test_clock_outside_the_round_trip_is_by_value(offset_ns: int) -> None:
    opening, reason = check_hello(hello(WELCOME_NS + offset_ns), greeting())
    assert opening.by_value
    assert "time namespace" in reason


def test_round_trip_within_the_margin_is_certain_and_beyond_it_is_not() -> None:
    check_hello(hello(WELCOME_NS + 1), greeting(5 * 10**9))
    with pytest.raises(ClockUncertain):
        check_hello(hello(WELCOME_NS + 1), greeting(5 * 10**9 + 1))


def test_stamp_of_another_welcome_is_refused() -> None:
    forged = hello(WELCOME_NS)
    forged.welcome_ns += 1
    with pytest.raises(BadFrame):
        check_hello(forged, greeting())


def test_without_proof_of_life_no_fds_are_passed() -> None:
    opening, reason = check_hello(hello(WELCOME_NS), greeting(is_life_provable=False))
    assert opening.by_value
    assert "pidfd" in reason
