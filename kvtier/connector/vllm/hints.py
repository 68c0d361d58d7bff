"""What a request says of its user's session, for the daemon's policies.

Advice of whoever wrote the request: what is not understood is left out, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from kvtier.policy.load_or_recompute import OnboardWish

TURN_KIND_CHARS_MAX = 32
PAUSED_SECONDS_MAX = 30 * 24 * 3600.0
# A hint is one call: what a chain has beyond this is left to the policies.
HINTED_BLOCKS_MAX = 16_384

Hint = Mapping[str, Any]
_WISHES = frozenset(OnboardWish)


def onboard_wish_of(request: Any) -> OnboardWish | None:
    """What it wants to become of blocks that are there; None: as the engine is set."""
    params = request.kv_transfer_params
    said = params.get("kvtier") if isinstance(params, dict) else None
    word: Any = said.get("onboard") if isinstance(said, dict) else None
    if said is False or word is False:
        return OnboardWish.NEVER
    return OnboardWish(word) if isinstance(word, str) and word in _WISHES else None


def hints_of(request: Any) -> list[Hint]:
    """The words of `SchedulerConnector.hint`, one call each."""
    params = request.kv_transfer_params
    said = params.get("kvtier") if isinstance(params, dict) else None
    if not isinstance(said, dict):
        return []
    found: list[Hint] = []
    kind: Any = said.get("turn_kind")
    paused: Any = said.get("paused_seconds")
    if isinstance(kind, str) and 0 < len(kind) <= TURN_KIND_CHARS_MAX:
        found.append({"turn_kind": kind})
    if said.get("session_end") is True:
        found.append({"session_end": True})
    elif _is_number(paused) and isfinite(paused) and 0 <= paused <= PAUSED_SECONDS_MAX:
        found.append({"paused_seconds": float(paused)})
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
