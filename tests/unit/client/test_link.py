"""What the link lets pass, without a daemon or a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import grpc
import pytest

from kvtier.client.link import Link, OpenSession
from kvtier.client.rpc import Rpc
from kvtier.client.settings import ClientSettings
from kvtier.client.values import Namespace, NamespaceState, SessionRef
from kvtier.errors import BadRequest, TierFull, Unauthenticated, Unavailable
from kvtier.io.memory import create_memfd
from kvtier.memory import HUGE_BYTES
from kvtier.namespace import NamespaceSpec
from kvtier.v1 import kvtier_pb2 as pb
from tests.support.clock import ManualClock

SPEC = NamespaceSpec("m", "w", "bfloat16", "nhd", 16, 4096)
TIMED_OUT = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def session_of(session_id: int, generation: int = 1) -> OpenSession:
    return OpenSession(
        ref=SessionRef(generation, session_id),
        token=bytes([session_id]) * 32,
        by_value=False,
        by_value_reason="",
        lease_ns_max=60_000_000_000,
        grpc_address="unix:/nowhere",
        rpc=cast(Rpc, None),
    )


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(ClientSettings(), ManualClock())
    yield made
    made.start_closing()
    made.callbacks.join(5)


def connect(link: Link, session: OpenSession) -> None:
    link.enter_generation(session.ref.generation)
    link.session_opened(session)
    link.probe_answered(session)


def open_namespace(link: Link, session: OpenSession) -> Namespace:
    namespace = link.open_namespace(SPEC)
    state = NamespaceState(1, b"f" * 16, 2, 4096, session.ref, session.token)
    link.namespace_opened(namespace, state)
    return namespace


def test_calls_pass_only_after_the_daemon_has_answered(link: Link) -> None:
    session = session_of(1)
    link.enter_generation(1)
    with pytest.raises(Unavailable):
        link.begin_any()
    link.session_opened(session)
    with pytest.raises(Unavailable):
        link.begin_any()
    link.probe_answered(session)
    assert link.begin_any() is session


def test_a_missing_answer_of_a_match_only_opens_the_breaker(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    assert isinstance(link.failed(session, False, *TIMED_OUT), Unavailable)
    assert link.session is None
    link.probe_answered(session)
    assert link.session is session


def test_a_missing_answer_of_a_reserve_ends_the_session(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    link.failed(session, True, *TIMED_OUT)
    link.probe_answered(session)
    assert link.session is None
    link.session_lost("replaced")
    connect(link, session_of(2))
    assert link.begin_any().ref.session_id == 2


def test_a_named_error_leaves_the_breaker_closed(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    error = link.failed(session, True, grpc.StatusCode.RESOURCE_EXHAUSTED, "TierFull: full")
    assert isinstance(error, TierFull)
    assert link.session is session


def test_what_the_daemon_itself_calls_unavailable_is_an_answer(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    said = "Unavailable: cleared on this node, but others could not be told"
    error = link.failed(session, True, grpc.StatusCode.UNAVAILABLE, said)
    assert isinstance(error, Unavailable)
    assert link.session is session


def test_an_unknown_token_ends_the_session(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    error = link.failed(session, False, grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated: who")
    assert isinstance(error, Unauthenticated)
    assert link.session is None


def test_a_late_failure_of_an_older_session_changes_nothing(link: Link) -> None:
    old, new = session_of(1), session_of(2)
    connect(link, old)
    link.session_lost("broken")
    connect(link, new)
    link.failed(old, True, *TIMED_OUT)
    assert link.session is new


def test_reports_of_several_calls_of_a_lost_session_are_taken(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    link.failed(session, False, grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated: who")
    link.failed(session, False, *TIMED_OUT)
    link.failed(session, True, *TIMED_OUT)
    link.probe_answered(session)
    assert link.session is None


def test_a_namespace_of_the_last_session_is_not_used_in_the_next(link: Link) -> None:
    old, new = session_of(1), session_of(2)
    connect(link, old)
    namespace = open_namespace(link, old)
    assert link.begin(namespace)[1].session == old.ref
    link.session_lost("broken")
    connect(link, new)
    with pytest.raises(Unavailable, match="still being opened"):
        link.begin(namespace)


def test_what_is_kept_stays_while_nobody_answers_and_goes_when_the_client_closes(
    link: Link,
) -> None:
    """A daemon that starts anew refuses a connection or two first."""
    session = replace(session_of(1), keeps_memory=True)
    connect(link, session)
    fd = create_memfd("kvtier-slab", HUGE_BYTES)
    offer = pb.SlabOffered(
        namespace_id=1, slab_id=1, slot_count=16, slot_bytes=4096, slab_bytes=HUGE_BYTES
    )
    link.arenas.add(offer, fd, session.ref)
    os.close(fd)
    for why in ("broken", "connection refused", "connection refused"):
        link.session_lost(why)
        assert link.arenas.has_kept
    link.start_closing()
    link.session_lost("closing")
    assert not link.arenas.has_kept


def test_a_refused_namespace_raises_the_daemons_reason(link: Link) -> None:
    session = session_of(1)
    connect(link, session)
    namespace = link.open_namespace(SPEC)
    link.namespace_refused(namespace, BadRequest("no such layout"))
    with pytest.raises(BadRequest, match="no such layout"):
        link.begin(namespace)


def test_a_refused_namespace_raises_the_reason_before_the_first_probe_is_answered(
    link: Link,
) -> None:
    link.enter_generation(1)
    link.session_opened(session_of(1))
    namespace = link.open_namespace(SPEC)
    link.namespace_refused(namespace, BadRequest("no such layout"))
    with pytest.raises(BadRequest, match="no such layout"):
        link.begin(namespace)


def test_a_refusal_ends_with_its_session(link: Link) -> None:
    connect(link, session_of(1))
    namespace = link.open_namespace(SPEC)
    link.namespace_refused(namespace, BadRequest("no such layout"))
    link.session_lost("restarted")
    with pytest.raises(Unavailable, match="restarted"):
        link.begin(namespace)
    assert namespace.error is None, "nobody is told of what another daemon said"


def test_a_closed_client_is_unavailable_whatever_was_refused(link: Link) -> None:
    connect(link, session_of(1))
    namespace = link.open_namespace(SPEC)
    link.namespace_refused(namespace, BadRequest("no such layout"))
    link.start_closing()
    with pytest.raises(Unavailable, match="closed"):
        link.begin(namespace)


def test_the_same_spec_is_the_same_namespace(link: Link) -> None:
    assert link.open_namespace(SPEC) is link.open_namespace(SPEC)


def test_quiet_is_queued_after_the_handler_and_until_acknowledged(link: Link) -> None:
    seen: list[SessionRef] = []
    session = session_of(1)
    connect(link, session)
    link.add_quiet_handler(seen.append)
    link.session_lost("broken")
    link.callbacks.join(5)
    assert seen == [session.ref]
    assert link.quiets_to_send() == [1]
    link.quiet_acknowledged(1)
    assert link.quiets_to_send() == []


def test_quiet_asked_again_is_told_again(link: Link) -> None:
    connect(link, session_of(1))
    link.quiet_requested(SessionRef(1, 77))
    link.callbacks.join(5)
    link.quiet_acknowledged(77)
    link.quiet_requested(SessionRef(1, 77))
    assert link.quiets_to_send() == [77]


def test_nothing_is_told_about_a_session_of_another_generation(link: Link) -> None:
    connect(link, session_of(1))
    link.session_lost("broken")
    link.callbacks.join(5)
    link.enter_generation(2)
    assert link.quiets_to_send() == []


def test_a_failing_handler_is_never_taken_for_quiet(link: Link) -> None:
    def fail(_: SessionRef) -> None:
        raise OSError("still copying")

    connect(link, session_of(1))
    link.add_quiet_handler(fail)
    link.session_lost("broken")
    link.callbacks.join(0.1)
    assert link.quiets_to_send() == []


def test_by_value_is_warned_of_once(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    connect(link, session_of(1))
    link.fall_back_to_values("no descriptors")
    link.fall_back_to_values("no descriptors")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no descriptors" in warnings[0].getMessage()
