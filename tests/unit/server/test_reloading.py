"""What of a configuration that has changed counts at once, and what is told to need a restart."""

from __future__ import annotations

from kvtier.config import Config, parse
from kvtier.server.certificates import grants_of
from kvtier.server.reloading import differences, with_lists_of


def config_of(tenant: dict[str, object], **more: dict[str, object]) -> Config:
    return parse({"tenant": {"red": {"socket": "/r", **tenant}}, **more})


BEFORE = config_of({"certificates": ["dns:a", "dns:b"]}, grpc={"certificates": ["dns:own"]})


def test_lists_are_taken_over_and_nothing_else() -> None:
    found = config_of(
        {"certificates": ["dns:b"], "admin_certificates": ["dns:c"], "weight": 3.0},
        grpc={"operator_certificates": ["dns:own"], "calls_max": 7},
    )
    config = with_lists_of(BEFORE, found)
    assert config.tenant["red"].certificates == ("dns:b",)
    assert config.tenant["red"].admin_certificates == ("dns:c",)
    assert config.grpc.certificates == ()
    assert config.grpc.operator_certificates == ("dns:own",)
    assert config.grpc.calls_max == BEFORE.grpc.calls_max
    assert differences(config, found) == ["grpc.calls_max", "tenant.red.weight"]


def test_a_tenant_that_is_gone_has_no_names_and_one_that_is_new_has_none_yet() -> None:
    found = parse({"tenant": {"new": {"socket": "/n", "certificates": ["dns:n"]}}})
    config = with_lists_of(BEFORE, found)
    assert len(grants_of(config)) == 0
    assert list(config.tenant) == ["red"]
    assert "tenant.new.certificates" in differences(config, found)


def test_the_same_again_differs_in_nothing() -> None:
    assert with_lists_of(BEFORE, BEFORE) == BEFORE
    assert differences(BEFORE, BEFORE) == []
