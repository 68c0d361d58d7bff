"""Who the status page answers: requests that name this node, not those that name another site."""

from __future__ import annotations

import pytest

from kvtier.server.admin import names_loopback


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "localhost:9464", "127.0.0.1", "127.0.0.1:9464", "[::1]:9464", "[::1]"],
)
def test_this_node_is_named(host: str) -> None:
    assert names_loopback(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "10.0.0.1:9464", "localhost.evil"]
)
def test_another_site_is_named(host: str) -> None:
    assert not names_loopback(host)
