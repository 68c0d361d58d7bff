"""What a user may set in `kv_connector_extra_config`; everything has a default.

Keys begin with "kvtier.", so that a configuration may be shared with other connectors; a key of
ours that is not known is an error, because it would otherwise do nothing in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any

from kvtier.client.address import TcpAddress, parse_address
from kvtier.client.settings import ClientSettings
from kvtier.connector.settings import ConnectorSettings
from kvtier.errors import ConfigError

PREFIX = "kvtier."
# No hook waits for a call, so calls may take their time: in a process whose engine is busy, every
# turn of a thread of ours can cost milliseconds, and a call that is given up with its effect
# unknown costs the whole session. A request's own wait is `onboard_wait_seconds`.
CLIENT_SETTINGS = ClientSettings(timeout_seconds=0.5)
# Set by the adapter itself: they say what vLLM does, not what a user wants.
_NOT_OPTIONS = ("worker_count", "holds_preempted_blocks", "lingering_blocks_max", "may_offload")
_SETTINGS = tuple(f.name for f in fields(ConnectorSettings) if f.name not in _NOT_OPTIONS)
_TEXTS = ("socket", "weights", "tenant", "salt")


@dataclass(frozen=True, slots=True)
class Options:
    """One engine's options, validated."""

    socket: Path | None  # None: where the daemon listens by default.
    weights: str  # Empty: a digest of the checkpoint's files.
    tenant: str
    salt: str
    settings: ConnectorSettings


def parse_options(extra: Mapping[str, Any]) -> Options:
    """Raises ConfigError that names the key."""
    given = {key[len(PREFIX) :]: value for key, value in extra.items() if key.startswith(PREFIX)}
    known = (*_TEXTS, *_SETTINGS)
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f": is {PREFIX}{close[0]} meant?" if close else ", see docs/vllm.md"
            raise ConfigError(f"kv_connector_extra_config has no key {PREFIX}{name}{hint}")
    texts = {name: _text(name, given.get(name, "")) for name in _TEXTS}
    socket = texts["socket"]
    if isinstance(parse_address(socket), TcpAddress):
        raise ConfigError(
            f"{PREFIX}socket is {socket!r}: vLLM needs the daemon of its own node, by its Unix"
            " socket, because KV travels in shared memory"
        )
    settings = {name: _number(name, given[name]) for name in _SETTINGS if name in given}
    return Options(
        Path(socket) if socket else None,
        texts["weights"],
        texts["tenant"],
        texts["salt"],
        ConnectorSettings(**settings),
    )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{PREFIX}{name} is {value!r}: it must be a text")
    return value


def _number(name: str, value: Any) -> Any:
    wanted = type(getattr(ConnectorSettings(), name))
    if issubclass(wanted, StrEnum):
        if isinstance(value, str) and value in frozenset(wanted):
            return wanted(value)
        raise ConfigError(f"{PREFIX}{name} is {value!r}: it must be one of {', '.join(wanted)}")
    if wanted is float and type(value) in (int, float):
        if not isfinite(value):  # JSON as Python reads it has both; nothing would end such a wait.
            raise ConfigError(f"{PREFIX}{name} is {value!r}: it must be a finite number")
        return float(value)
    if type(value) is wanted:
        return value
    raise ConfigError(f"{PREFIX}{name} is {value!r}: it must be of type {wanted.__name__}")
