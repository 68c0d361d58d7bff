"""How a set-up that is not supported is refused: one line that says what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from kvtier.errors import ConfigError


class Unsupported(ConfigError):
    """This engine cannot run with kvtier as it is configured."""


def refuse(what: str, advice: str) -> NoReturn:
    raise Unsupported(f"kvtier: {what}; {advice}, or without kvtier")


def layer_specs(group_spec: Any) -> list[Any]:
    """The specs of a group's layers; one for all where they are equal."""
    by_layer = getattr(group_spec, "kv_cache_specs", None)
    return [group_spec] if by_layer is None else list(by_layer.values())
