from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.client.address import SocketAddress, TcpAddress, parse_address
from kvtier.client.settings import ClientSettings
from kvtier.errors import ConfigError


def test_a_path_is_a_session_socket() -> None:
    assert parse_address("/run/k.sock") == SocketAddress(Path("/run/k.sock"))
    assert parse_address(Path("k.sock")) == SocketAddress(Path("k.sock"))


def test_a_tcp_address_is_by_value() -> None:
    assert parse_address("tcp://127.0.0.1:9000") == TcpAddress("127.0.0.1:9000")
    assert parse_address("tcp://[::1]:9000") == TcpAddress("[::1]:9000")


@pytest.mark.parametrize(
    "text", ["tcp://", "tcp://host", "tcp://host:", "tcp://:1", "tcp://h:99999"]
)
def test_half_an_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse_address(text)


def test_settings_without_a_deadline_are_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds"):
        ClientSettings(timeout_seconds=0)
    with pytest.raises(ConfigError, match="retry_seconds_max"):
        ClientSettings(retry_seconds_min=3.0)
