"""Eviction policies by name."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvtier.errors import ConfigError
from kvtier.policy.lru import LruPolicy
from kvtier.server import policies
from kvtier.server.policies import GROUP, OURS, policy_named


def offered(name: str, value: str) -> importlib.metadata.EntryPoints:
    one = importlib.metadata.EntryPoint(name, value, GROUP)
    return importlib.metadata.EntryPoints([one])


def test_ours_need_no_entry_point() -> None:
    assert [policy_named(name) for name in OURS] == list(OURS.values())


def test_unknown_name_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered("theirs", "kvtier.policy.lru:LruPolicy")
    monkeypatch.setattr(policies, "entry_points", lambda group: found.select(group=group))
    with pytest.raises(ConfigError, match=r"'lfu': there is lru, curves, arc, theirs"):
        policy_named("lfu")
    assert policy_named("theirs") is LruPolicy


@pytest.mark.parametrize("value", ["no_such_module:Policy", "kvtier.policy.lru:Nothing"])
def test_policy_that_cannot_be_loaded_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered("theirs", value)
    monkeypatch.setattr(policies, "entry_points", lambda group: found.select(group=group))
    with pytest.raises(ConfigError, match="theirs"):
        policy_named("theirs")
