"""Tokens and what they allow."""

from __future__ import annotations

import pytest

from kvtier.errors import Forbidden, Unauthenticated
from kvtier.server.security import ACCESS, Peer, Rights, Tokens
from kvtier.types import Role, SessionId
from kvtier.v1 import kvtier_pb2 as pb

ENGINE, SESSION, ADMIN = ACCESS["Reserve"], ACCESS["Match"], ACCESS["Clear"]


def issue(tokens: Tokens, role: Role, *, by_value: bool = False, greeted: bool = False) -> bytes:
    number = SessionId(len(tokens) + 1)
    return tokens.issue(number, role, by_value=by_value, greeted=greeted, now=10.0).token


def test_every_rpc_of_the_protocol_has_an_access_rule() -> None:
    service = pb.DESCRIPTOR.services_by_name["KVTier"]
    assert {method.name for method in service.methods} == set(ACCESS)


def test_revoked_token_is_unknown() -> None:
    tokens = Tokens()
    token = issue(tokens, Role.BOTH)
    assert tokens.caller(token, ENGINE, now=11.0).session == 1
    tokens.revoke(token)
    with pytest.raises(Unauthenticated):
        tokens.caller(token, SESSION, now=11.0)


@pytest.mark.parametrize(
    ("role", "by_value", "is_allowed"),
    [
        (Role.SCHEDULER, False, True),
        (Role.BOTH, False, True),
        (Role.WORKER, False, False),
        (Role.TOOL, False, False),
        (Role.BOTH, True, False),
    ],
)
def test_only_schedulers_with_fds_hold_slots(role: Role, by_value: bool, is_allowed: bool) -> None:
    tokens = Tokens()
    token = issue(tokens, role, by_value=by_value)
    if is_allowed:
        tokens.caller(token, ENGINE, now=11.0)
        return
    with pytest.raises(Forbidden):
        tokens.caller(token, ENGINE, now=11.0)


def test_greeted_session_may_ask_but_not_administrate_and_counts_as_used() -> None:
    tokens = Tokens()
    token = issue(tokens, Role.TOOL, by_value=True, greeted=True)
    with pytest.raises(Forbidden):
        tokens.caller(token, ADMIN, now=20.0)
    tokens.caller(token, SESSION, now=50.0)
    assert tokens.greeted_before(50.0) == []
    assert [one.token for one in tokens.greeted_before(50.1)] == [token]


def test_a_token_is_worth_no_more_than_its_bearer_is_now() -> None:
    """Whose certificate was moved to another list since."""
    tokens = Tokens()
    before = Peer("red", None, Rights.ENGINE, certificate="dns:a")
    now = Peer("red", None, Rights.READER, certificate="dns:a")
    token = tokens.issue(
        SessionId(1), Role.TOOL, before, by_value=True, greeted=True, now=10.0
    ).token
    tokens.caller(token, ACCESS["Put"], before, now=11.0)
    with pytest.raises(Forbidden, match="you are a reader"):
        tokens.caller(token, ACCESS["Put"], now, now=11.0)
    tokens.caller(token, ACCESS["Get"], now, now=11.0)
