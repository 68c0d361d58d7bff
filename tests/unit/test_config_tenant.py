"""Mistakes in [tenant.NAME] are one line that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import load, parse
from kvtier.config_tenant import sharers
from kvtier.errors import ConfigError
from kvtier.namespace import NamespaceSpec
from kvtier.server.peers import Credentials
from kvtier.server.security import Rights
from kvtier.server.tenants import check_users_visible, tenants_of
from kvtier.types import EngineId

RED = {"tenant.red.socket": "/run/red.sock"}


def test_a_table_and_overrides_make_tenants(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('[tenant.red]\nsocket = "/run/red.sock"\nuids = [7]\n')
    found = load(file, {"tenant.red.readers": "8,9", "tenant.blue.socket": "/run/blue.sock"})
    assert found.tenant["red"].uids == (7,)
    assert found.tenant["red"].readers == (8, 9)
    assert found.tenant["blue"].names_users is False


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tenant.Red.socket": "/a"}, "[tenant.Red]: a name has small letters"),
        ({"tenant.*.socket": "/a"}, "[tenant.*]: a name has small letters"),
        ({"tenant.red.uids": "7"}, "tenant.red.socket is empty"),
        ({**RED, "tenant.red.sockt": "/a"}, "unknown option tenant.red.sockt: did you mean"),
        ({**RED, "server.tenant": "red"}, "[tenant.red] is what server.tenant is called"),
        ({**RED, "server.tenant": "*"}, "stands for shared namespaces"),
        ({**RED, "server.socket": "/run/red.sock"}, "are one place"),
        ({**RED, "tenant.blue.socket": "/run/red.socket"}, "are one place"),
        ({**RED, "tenant.red.uids": "root"}, "a user is a number"),
        ({**RED, "tenant.red.uids": "7", "tenant.red.readers": "7"}, "user 7 is in"),
        ({**RED, "tenant.red.shared_models": "m"}, "it is shared where two name it"),
        ({**RED, "cxl.dax": "/dev/dax0.0", "cxl.single_tenant": "true"}, "there are tenants"),
        ({**RED, "grpc.tcp": "127.0.0.1:0"}, "without TLS nobody can tell whose tenant"),
    ],
)
def test_mistakes_are_refused(options: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, options)
    assert part in str(caught.value)


def test_a_tenant_that_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write it as a table \[tenant.red\]"):
        parse({"tenant": {"red": 3}})


def test_models_are_shared_by_those_who_name_them() -> None:
    options = {
        "tenant.a.socket": "/a",
        "tenant.a.shared_models": "m,n",
        "tenant.b.socket": "/b",
        "tenant.b.shared_models": "n,m",
        "tenant.c.socket": "/c",
    }
    assert sharers(load(None, options).tenant) == dict.fromkeys("mn", frozenset("ab"))


def test_lists_decide_who_may_what() -> None:
    options = {**RED, "tenant.red.uids": "1", "tenant.red.gids": "20"}
    options |= {"tenant.red.readers": "3", "tenant.red.admins": "1,4"}
    own, red = tenants_of("", Path("/run/k.sock"), load(None, options).tenant)
    rights = {
        uid: red.admit(Credentials(uid, frozenset(gids))).rights
        for uid, gids in ((1, ()), (2, (19, 20)), (3, (20,)), (4, ()))
    }
    assert rights == {1: Rights.ADMIN, 2: Rights.ENGINE, 3: Rights.READER, 4: Rights.ADMIN}
    with pytest.raises(Exception, match=r"user 5 is in no list of \[tenant.red\]"):
        red.admit(Credentials(5, frozenset((5,))))
    assert own.admit(Credentials(5, frozenset())).rights is Rights.OPERATOR


def test_an_engines_id_is_another_in_each_tenant() -> None:
    engine = EngineId(b"E" * 16)
    mine = [one.engine(engine) for one in tenants_of("", Path("/k"), load(None, RED).tenant)]
    assert len({*mine, engine}) == 3
    (alone,) = tenants_of("", Path("/k"), {})
    assert alone.engine(engine) == engine


def test_users_that_this_namespace_cannot_see_are_refused(tmp_path: Path) -> None:
    tenants = load(None, {**RED, "tenant.red.uids": "1000,2000"}).tenant.values()
    uid_map = tmp_path / "uid_map"
    uid_map.write_text("         0          0          1\n      1000       1000          1\n")
    with pytest.raises(ConfigError, match="user 2000 of a tenant is not to be seen"):
        check_users_visible(tenants, uid_map)
    uid_map.write_text("         0          0 4294967295\n")
    check_users_visible(tenants, uid_map)


def test_a_tenant_makes_another_namespace_of_the_same_model() -> None:
    def of(tenant: str) -> bytes:
        facts = {"layout": "LBHD", "block_tokens": 16, "shard_bytes": 4096}
        return NamespaceSpec("m", "w", "bf16", tenant=tenant, **facts).fingerprint()  # type: ignore[arg-type]

    assert len({of(""), of("red"), of("*")}) == 3
