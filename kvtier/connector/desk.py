"""What the two halves of the planning (onboard, offload) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.connector.client_api import SchedulerClient
from kvtier.connector.control import Control
from kvtier.connector.jobs import StepOutcome
from kvtier.connector.requests import Flight, Request
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stats import ConnectorStats
from kvtier.errors import KVTierError
from kvtier.namespace import NamespaceSpec
from kvtier.policy.link import Link
from kvtier.policy.load_or_recompute import LoadRule
from kvtier.types import TierName, Worth

T = TypeVar("T")
LOWER_TIERS = (TierName.CXL, TierName.NVME, TierName.REMOTE)


class Desk:
    """The client, the open namespace, the counters, and what the next StepOutcome will say."""

    def __init__(
        self,
        client: SchedulerClient,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        clock: Clock,
        control: Control,
        job_ids: Iterator[int] | None = None,
    ) -> None:
        self.client = client
        self.settings = settings
        self.clock = clock
        self.control = control
        self.stats = ConnectorStats()
        self.token_seconds: float | None = None  # What a token of a prefill takes, by the engine.
        self.life = 0  # Counts resets: what was planned in another life is void.
        self.is_clearing = False  # The daemon is yet to void the namespace.
        self.spec = spec
        self.namespace: Any = client.open_namespace(spec)
        block_bytes = spec.shard_bytes * spec.shard_count
        first = block_bytes / settings.nvme_bytes_per_second
        self.rule = LoadRule(spec.block_tokens, Link(dict.fromkeys(LOWER_TIERS, first)))
        self.requests: dict[str, Request] = {}
        self.onboarded: list[str] = []
        self.failed: list[str] = []
        self.released: list[str] = []
        self._job_ids = job_ids or count(1)

    def note_prefill(self, token_seconds: float) -> None:
        self.token_seconds = self.rule.token_seconds = token_seconds

    def session(self) -> Any | None:
        """The session to plan under; None while there is none, or none that passes slots."""
        client = self.client
        if self.is_clearing or not client.connected or client.by_value:
            return None
        state = self.namespace.state
        session = client.session
        if state is None or session is None or state.session != session:
            return None
        return session

    def next_job_id(self) -> int:
        return next(self._job_ids)

    def begin_life(self, spec: NamespaceSpec) -> None:
        self.life += 1
        self.is_clearing = False
        self.spec = spec
        self.namespace = self.client.open_namespace(spec)

    def clear(self, spare: NamespaceSpec) -> None:
        """Begin a life in the same namespace, once the daemon has voided it; else in `spare`."""
        self.life += 1
        if self.is_clearing:
            return  # Nothing has been stored since that was asked for.
        self.is_clearing = True
        namespace = self.namespace

        def on_answer(answer: int | KVTierError) -> None:
            self.ignore(answer)
            if namespace is not self.namespace:
                return
            self.is_clearing = False
            if isinstance(answer, KVTierError):
                self.begin_life(spare)

        if not self.ask_waiting(lambda: self.client.clear(namespace), on_answer):
            self.begin_life(spare)

    def ask(
        self,
        call: Callable[[], T],
        on_answer: Callable[[T | KVTierError], None],
        *,
        urgent: bool = True,
    ) -> bool:
        return self.control.ask(call, on_answer, urgent=urgent)

    def ask_waiting(
        self, call: Callable[[], T], on_answer: Callable[[T | KVTierError], None]
    ) -> bool:
        return self.control.ask_waiting(call, on_answer)

    def ignore(self, answer: object) -> None:
        """For calls whose failure mends itself (a lease expires, a lost session's slots return)."""
        if isinstance(answer, KVTierError):
            self.note_error(answer)

    def note_error(self, error: KVTierError) -> None:
        self.stats.call_errors[type(error).__name__] += 1

    def release(self, lease: Any, worth: Worth | None = None) -> None:
        self.ask(lambda: self.client.release([lease], worth), self.ignore)

    def abort(self, namespace: Any, session: Any, slots: Sequence[int]) -> None:
        """Give slots back unfilled; those of a lost session return when it is quiet."""
        if slots and session == self.client.session:
            self.ask(lambda: self.client.abort(namespace, slots, session=session), self.ignore)

    def end_flight(self, job_id: int, flight: Flight) -> None:
        """No worker touches the flight's device blocks any more."""
        request = flight.request
        del request.flights[job_id]
        self.forget_if_ended(request)
        if flight.is_held:
            self.end_hold(request)

    def end_hold(self, request: Request) -> None:
        """A held flight or the linger has ended; the last one frees the device blocks."""
        request.hold_count -= 1
        assert request.hold_count >= 0, "a request is released twice"
        if request.hold_count == 0:
            self.released.append(request.request_id)

    def forget_if_ended(self, request: Request) -> None:
        if request.is_finished and not request.flights and not request.is_lingering:
            self.requests.pop(request.request_id, None)

    def withdraw_verdict(self, request: Request) -> None:
        """The engine no longer waits for the request's onboard: say nothing about it."""
        for ids in (self.onboarded, self.failed):
            if request.request_id in ids:
                ids.remove(request.request_id)

    def take_outcome(self) -> StepOutcome:
        outcome = StepOutcome(tuple(self.onboarded), tuple(self.failed), tuple(self.released))
        self.onboarded, self.failed, self.released = [], [], []
        return outcome
