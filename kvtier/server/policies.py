"""Eviction policies by name: ours, and those that other packages bring.

A package offers one in the entry point group `kvtier.eviction`: a callable that takes what
`kvtier.policy.eviction.Blocks` describes and returns an `EvictionPolicy`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from kvtier.errors import ConfigError
from kvtier.policy.arc import ArcPolicy
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import PolicyMaker
from kvtier.policy.lru import LruPolicy

GROUP = "kvtier.eviction"
OURS: dict[str, PolicyMaker] = {"lru": LruPolicy, "curves": CurvesPolicy, "arc": ArcPolicy}


def policy_named(name: str) -> PolicyMaker:
    """Raises ConfigError that names those there are."""
    if name in OURS:
        return OURS[name]
    others = {one.name: one for one in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join([*OURS, *sorted(others)])
        raise ConfigError(f"dram.policy is {name!r}: there is {known}")
    try:
        found = others[name].load()
    except Exception as error:
        raise ConfigError(f"dram.policy {name!r}: {others[name].value}: {error}") from error
    if not callable(found):
        raise ConfigError(f"dram.policy {name!r}: {others[name].value} is no maker of policies")
    maker: PolicyMaker = found
    return maker
