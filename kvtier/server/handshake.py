"""Hello, checked: versions, identity, and whether two clocks are one."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import BadFrame, ClockUncertain
from kvtier.namespace import SHARD_COUNT_MAX
from kvtier.server.sessions import Opening
from kvtier.server.wire import check_protocol
from kvtier.types import EngineId, Role, SessionId
from kvtier.v1 import kvtier_pb2 as pb

ENGINE_ID_BYTES = 16
NAME_CHARS_MAX = 64
# Reading a clock on one core and comparing it with one read on another.
CLOCK_TOLERANCE_NS = 1_000_000

_MAPPING_ROLES = (Role.WORKER, Role.BOTH)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the daemon knows when Hello arrives."""

    welcome_ns: int  # What Welcome said.
    now_ns: int
    margin_seconds: float
    is_life_provable: bool  # There is a pidfd.


def check_hello(hello: pb.Hello, greeting: Greeting) -> tuple[Opening, str]:
    """The session to open, and why it is by value ("" when it is not).

    Raises ProtocolMismatch, BadFrame or ClockUncertain.
    """
    check_protocol(hello.protocol)
    _check_identity(hello)
    reason = _by_value_reason(hello, greeting)
    opening = Opening(
        engine=EngineId(hello.engine_id),
        role=Role(hello.role),
        shards=tuple(hello.shards),
        name=hello.name,
        by_value=bool(reason),
        old_session=SessionId(hello.old_session_id) if hello.old_session_id else None,
        old_token=hello.old_token,
        node=hello.memory_node - 1 if hello.memory_node else None,
        knows_segments=hello.knows_segments,
    )
    return opening, reason


def _check_identity(hello: pb.Hello) -> None:
    if len(hello.engine_id) != ENGINE_ID_BYTES:
        raise BadFrame(f"Hello.engine_id has {len(hello.engine_id)} bytes: send 16 random ones")
    try:
        role = Role(int(hello.role))
    except ValueError:
        raise BadFrame(
            f"Hello.role is {hello.role}: send scheduler, worker, both or tool"
        ) from None
    if len(hello.name) > NAME_CHARS_MAX:
        raise BadFrame(f"Hello.name is too long: at most {NAME_CHARS_MAX} characters")
    if role in _MAPPING_ROLES and not hello.shards:
        raise BadFrame("Hello.shards is empty: a worker names the shards it holds")
    if len(hello.shards) > SHARD_COUNT_MAX or len(set(hello.shards)) != len(hello.shards):
        raise BadFrame(f"Hello.shards: name each shard once, at most {SHARD_COUNT_MAX}")
    if any(shard >= SHARD_COUNT_MAX for shard in hello.shards):
        raise BadFrame(f"Hello.shards: shards are numbered 0 to {SHARD_COUNT_MAX - 1}")


def _by_value_reason(hello: pb.Hello, greeting: Greeting) -> str:
    """A lease's deadline means the same on both sides only if the clocks are one."""
    if hello.welcome_ns != greeting.welcome_ns:
        raise BadFrame("Hello.welcome_ns is not Welcome.daemon_ns: send it back unchanged")
    if greeting.now_ns - greeting.welcome_ns > greeting.margin_seconds * 1e9:
        raise ClockUncertain(
            "Hello came too late to compare the clocks: connect again, or raise "
            "lease.margin_seconds"
        )
    earliest = greeting.welcome_ns - CLOCK_TOLERANCE_NS
    if not earliest <= hello.client_ns <= greeting.now_ns + CLOCK_TOLERANCE_NS:
        return "the clocks differ: the client runs in another time namespace"
    if not greeting.is_life_provable:
        return "no pidfd of the client: the kernel is older than 6.5 and none came with Hello"
    return ""
