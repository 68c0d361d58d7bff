"""Whom a certificate names, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import load
from kvtier.errors import ConfigError, Forbidden, Unauthenticated
from kvtier.server.certificates import Grants, TlsFiles, grants_of
from kvtier.server.security import ACCESS, Peer, Rights, Tokens
from kvtier.types import Role, SessionId
from tests.support.authority import Authority, Identity


def options(authority: Authority, own: Identity) -> dict[str, str]:
    return {
        "grpc.tcp": "0.0.0.0:0",
        "grpc.tls_certificate": str(own.certificate),
        "grpc.tls_private_key": str(own.private_key),
        "grpc.tls_authorities": str(authority.path),
    }


def test_lists_decide_whose_a_certificate_is_and_what_it_may() -> None:
    tls = {f"grpc.tls_{one}": "/f" for one in ("certificate", "private_key", "authorities")}
    config = load(
        None,
        {
            **tls,
            "grpc.tcp": "0.0.0.0:1",
            "grpc.reader_certificates": "dns:see",
            "grpc.operator_certificates": "dns:op",
            "tenant.red.socket": "/r",
            "tenant.red.certificates": "dns:put",
            "tenant.red.admin_certificates": "uri:spiffe://red/admin",
        },
    )
    grants = grants_of(config)
    found = {
        name: (peer.tenant, peer.rights, peer.certificate)
        for name in ("dns:see", "dns:op", "dns:put", "uri:spiffe://red/admin")
        for peer in [grants.peer_of(["dns:other", name])]
    }
    assert found == {
        "dns:see": ("", Rights.READER, "dns:see"),
        "dns:op": ("", Rights.OPERATOR, "dns:op"),
        "dns:put": ("red", Rights.ENGINE, "dns:put"),
        "uri:spiffe://red/admin": ("red", Rights.ADMIN, "uri:spiffe://red/admin"),
    }


def test_a_certificate_in_no_list_or_in_two_is_nobodys() -> None:
    grants = Grants({"dns:a": Peer("red"), "dns:b": Peer("blue"), "dns:c": Peer("red")})
    with pytest.raises(Forbidden, match=r"dns:x sha256:1 is in no list"):
        grants.peer_of(["dns:x", "sha256:1"])
    with pytest.raises(Forbidden, match="in several lists"):
        grants.peer_of(["dns:a", "dns:b"])
    assert grants.peer_of(["dns:a", "dns:c"]).tenant == "red"


@pytest.mark.parametrize("broken", ["certificate", "private_key", "authorities"])
@pytest.mark.parametrize("how", ["absent", "empty", "of another"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, broken: str, how: str) -> None:
    authority = Authority(tmp_path)
    given = options(authority, authority.vouch("daemon", "dns:a"))
    path = Path(given[f"grpc.tls_{broken}"])
    if how == "absent":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif broken == "authorities":
        path.write_bytes(Path(given["grpc.tls_private_key"]).read_bytes())
    else:
        other = authority.vouch("other", "dns:b")
        kinds = {"certificate": other.certificate, "private_key": other.private_key}
        path.write_bytes(kinds[broken].read_bytes())
    with pytest.raises(ConfigError, match=r"grpc.tls_\w+: .* cannot be used") as caught:
        TlsFiles(load(None, given).grpc)
    if how == "absent":
        assert f"grpc.tls_{broken}: {path}" in str(caught.value)


def test_a_token_counts_for_its_own_certificate_only() -> None:
    tokens = Tokens()
    admin = Peer("red", None, Rights.ADMIN, "dns:admin")
    caller = tokens.issue(SessionId(1), Role.TOOL, admin, by_value=True, greeted=True, now=0.0)
    for thief in (Peer("red", None, Rights.READER, "dns:reader"), Peer("red", 7, Rights.ADMIN)):
        with pytest.raises(Forbidden, match="another certificate's session"):
            tokens.caller(caller.token, ACCESS["Stats"], thief, now=1.0)
    assert tokens.caller(caller.token, ACCESS["Clear"], admin, now=1.0) is caller
    tokens.revoke(caller.token)
    with pytest.raises(Unauthenticated):
        tokens.caller(caller.token, ACCESS["Clear"], admin, now=2.0)


def test_without_a_certificate_a_greeted_session_administrates_nothing() -> None:
    tokens = Tokens()
    peer = Peer("red", None, Rights.ADMIN)
    caller = tokens.issue(SessionId(1), Role.TOOL, peer, by_value=True, greeted=True, now=0.0)
    with pytest.raises(Forbidden, match="may not administrate"):
        tokens.caller(caller.token, ACCESS["Clear"], peer, now=1.0)
