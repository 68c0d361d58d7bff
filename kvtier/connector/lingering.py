"""Finished requests whose device blocks the engine keeps until their last blocks are planned.

A short request is over before the daemon has said what is resident, and the last blocks of a longer
one may find the stock empty. They wait here: for a bounded time, in a bounded number, and never
longer than their session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.connector.desk import Desk
from kvtier.connector.requests import Request


@dataclass(frozen=True, slots=True)
class Linger:
    """One request's stay."""

    request: Request
    session: object
    until: float
    block_count: int  # Device blocks that the engine keeps for it.


class LingeringRequests:
    """Invariant: a request is in here if and only if `is_lingering`, which is one of its holds."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lingers: dict[str, Linger] = {}  # In order of time: all may stay equally long.
        self.block_count = 0

    def __len__(self) -> int:
        return len(self._lingers)

    def requests(self) -> list[Request]:
        """Oldest first; ending one of them does not disturb the list."""
        return [linger.request for linger in self._lingers.values()]

    def begin(self, request: Request) -> bool:
        """Let a request that finishes now stay; False when that would break a limit."""
        desk, settings = self._desk, self._desk.settings
        block_count, session = len(request.device_blocks), desk.session()
        if (
            session is None
            or settings.finish_wait_seconds == 0
            or len(self._lingers) >= settings.lingering_requests_max
            or self.block_count + block_count > settings.lingering_blocks_max
        ):
            return False
        until = desk.clock.now() + settings.finish_wait_seconds
        self._lingers[request.request_id] = Linger(request, session, until, block_count)
        self.block_count += block_count
        request.is_lingering = True
        request.hold_count += 1
        desk.stats.lingered_requests += 1
        return True

    def end(self, request: Request, dropped: str = "") -> None:
        """All is planned, or the rest is `dropped` for that reason; flights may hold on."""
        linger = self._lingers.pop(request.request_id)
        assert linger.request is request, "a request lingers under the id of another one"
        self.block_count -= linger.block_count
        request.is_lingering = False
        if dropped:
            self._desk.stats.dropped_blocks[dropped] += request.left_count
        self._desk.forget_if_ended(request)
        self._desk.end_hold(request)

    def end_all(self, dropped: str) -> None:
        self._end_where(lambda _: True, dropped)

    def end_lost(self) -> None:
        """Those of a session that is no more."""
        if self._lingers:
            session = self._desk.session()
            self._end_where(lambda linger: linger.session != session, "session_lost")

    def end_overdue(self) -> None:
        if self._lingers:
            now = self._desk.clock.now()
            self._end_where(lambda linger: linger.until <= now, "finish_deadline")

    def give_up(self, block_count: int) -> None:
        """The engine is short of that many device blocks: the oldest ones end."""
        for linger in list(self._lingers.values()):
            if block_count <= 0:
                return
            block_count -= linger.block_count
            self.end(linger.request, "blocks_short")

    def check_invariants(self) -> list[str]:
        found, settings = [], self._desk.settings
        lingers = self._lingers.values()
        if len(lingers) > settings.lingering_requests_max:
            found.append("too many requests linger")
        if self.block_count > settings.lingering_blocks_max:
            found.append("lingering requests hold too many device blocks")
        if self.block_count != sum(linger.block_count for linger in lingers):
            found.append("the count of lingering blocks is wrong")
        if not all(linger.request.is_finished for linger in lingers):
            found.append("a request lingers that is not finished")
        for request in self._desk.requests.values():
            held = sum(flight.is_held for flight in request.flights.values())
            if request.hold_count != held + request.is_lingering:
                found.append("a request's holds are not those of its flights and its linger")
            if request.is_lingering != (request.request_id in self._lingers):
                found.append("a request lingers unknown to us")
        return found

    def _end_where(self, condition: Callable[[Linger], bool], dropped: str) -> None:
        for linger in list(self._lingers.values()):
            if condition(linger):
                self.end(linger.request, dropped)
