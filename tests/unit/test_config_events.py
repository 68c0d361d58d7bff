"""[kv_events]: nothing listens beyond this node, and a mistake is one line."""

from __future__ import annotations

import pytest

from kvtier.config import load
from kvtier.config_events import EventsConfig, connections
from kvtier.errors import ConfigError


def loaded(**options: str) -> EventsConfig:
    return load(None, {f"kv_events.{name}": value for name, value in options.items()}).kv_events


def test_nothing_is_published_unless_a_place_is_named() -> None:
    assert not EventsConfig().is_set
    assert loaded(bind="tcp://127.0.0.1:5557").is_set
    assert loaded(bind="ipc:///run/kvtier/kv-events").is_set
    assert connections(loaded(connect="tcp://a:1, tcp://b:2")) == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bind": "tcp://*:5557"}, "loopback"),
        ({"bind": "tcp://0.0.0.0:5557"}, "loopback"),
        ({"bind": "127.0.0.1:5557"}, "write"),
        ({"connect": "indexer:5557"}, "tcp://HOST:PORT"),
        ({"connect": "tcp://*:5557"}, "tcp://HOST:PORT"),
        ({"connect": "tcp://indexer"}, "PORT"),
        ({"replay_bind": "tcp://127.0.0.1:5558"}, "neither"),
        ({"bind": "ipc:///a", "replay_bind": "ipc:///a"}, "two"),
        ({"bind": "ipc:///a", "topic": "kv@{pod}"}, "node, model, tenant"),
        ({"bind": "ipc:///a", "topic": "kv@{node"}, "node, model, tenant"),
        ({"bind": "ipc:///a", "hash_form": "hex"}, "int64"),
    ],
)
def test_mistakes_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events\.\w+") as refused:
        loaded(**options)
    assert said in str(refused.value)
