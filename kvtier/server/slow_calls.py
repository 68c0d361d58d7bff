"""The last calls that took long, and their lines."""

from __future__ import annotations

import logging

from kvtier.errors import UnknownNamespace
from kvtier.server import logs
from kvtier.server.base import Base
from kvtier.server.history import SlowCallSeen
from kvtier.server.security import Caller

log = logging.getLogger(__name__)

# These take as long as their clients do; and Stats is what asks for the list of slow calls, again
# and again, and would fill it.
_LEFT_OUT = frozenset({"Watch", "Put", "Get", "Stats"})


class SlowCalls:
    """Belongs to the event loop."""

    def __init__(self, base: Base, seconds_max: float) -> None:
        self._history = base.history
        self._namespaces = base.namespaces
        self._clock = base.clock
        self.seconds_max = seconds_max

    def note(
        self, name: str, request: object, caller: Caller | None, outcome: str, seconds: float
    ) -> None:
        """A call has taken longer than `seconds_max`."""
        if name in _LEFT_OUT:
            return
        seen = SlowCallSeen(
            call=name,
            at=self._clock.now(),
            seconds=seconds,
            request_id=logs.request_id.get(),
            block_count=self._block_count(request),
            outcome=outcome,
            session=None if caller is None else caller.session,
            tenant="" if caller is None else caller.tenant,
        )
        self._history.slow_calls.append(seen)
        log.warning(
            "call slow",
            extra={
                "call": name,
                "session": seen.session,
                "seconds": round(seconds, 6),
                "blocks": seen.block_count,
                "outcome": outcome,
            },
        )

    def _block_count(self, request: object) -> int:
        packed = getattr(request, "hashes", b"")
        if packed:
            try:
                opened = self._namespaces.get(getattr(request, "namespace_id", 0))
            except UnknownNamespace:
                return 0
            return len(packed) // opened.spec.hash_bytes
        return int(getattr(request, "count", 0)) or len(getattr(request, "slots", ()))
