"""Options that name an address to listen at."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from kvtier.errors import ConfigError

OFF = "off"
_IP_ADDRESS = re.compile(r"localhost|[0-9.]+|[0-9a-fA-F:.]+")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address of this node with a port, or "off"."""

    is_loopback_only: bool = False  # Nothing listens beyond this node.

    def check(self, name: str, value: object) -> object:
        if not isinstance(value, str):
            raise ConfigError(f'{name} is {value!r}: it must be a text such as "127.0.0.1:9464"')
        if value == OFF:
            return value
        host, port = split_address(name, value)
        if self.is_loopback_only and host != "localhost" and not is_loopback(host):
            raise ConfigError(f"{name} is {value!r}: only loopback addresses may be listened on")
        if not _IP_ADDRESS.fullmatch(host):
            raise ConfigError(f"{name} is {value!r}: write an IP address of this node, and a port")
        if not 0 <= port <= 65535:
            raise ConfigError(f"{name} is {value!r}: the port may be 0 to 65535")
        return value

    def from_text(self, text: str) -> object:
        return text

    def describe(self) -> str:
        kind = "a loopback address" if self.is_loopback_only else "an address"
        return f"{kind} with a port, or off"

    def show(self, value: object) -> str:
        return f'"{value}"'


def split_address(name: str, value: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:0" or "[::1]:0"."""
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f'{name} is {value!r}: write ADDRESS:PORT, such as "127.0.0.1:9464"')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
