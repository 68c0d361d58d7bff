"""The scheduler side: hooks for the engine's scheduling thread; none of them waits.

The engine calls all hooks from one thread. Calls to the daemon are made by the control thread;
what has arrived is handled at the start of each hook. Unknown request ids are ignored, never
asserted on: an engine must not die of its cache. Nor of a bug of ours: after an internal error all
hooks answer as if there were no kvtier, and what the engine waits for is told it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvtier.clock import Clock, SystemClock
from kvtier.connector.client_api import SchedulerClient
from kvtier.connector.control import Control, ControlThread
from kvtier.connector.desk import Desk
from kvtier.connector.heads import Head
from kvtier.connector.hooks import hook, nothing
from kvtier.connector.jobs import JobResult, StepOutcome, StepPlan
from kvtier.connector.offloading import Offloader
from kvtier.connector.onboarding import Onboarder
from kvtier.connector.promises import Promises
from kvtier.connector.requests import OnboardFlight, Request, TokensOf
from kvtier.connector.residency import KnownResident
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stats import ConnectorStats
from kvtier.namespace import NamespaceSpec
from kvtier.policy.load_or_recompute import OnboardChoice, OnboardWish
from kvtier.types import TierName

log = logging.getLogger(__name__)


class SchedulerConnector:
    """Plans offload and onboard for one engine; one instance, used by one thread."""

    def __init__(
        self,
        client: SchedulerClient,
        spec: NamespaceSpec,
        *,
        settings: ConnectorSettings | None = None,
        clock: Clock | None = None,
        control: Control | None = None,
        job_ids: Iterator[int] | None = None,
    ) -> None:
        """`job_ids`: shared by all that plan for the same workers."""
        settings = settings or ConnectorSettings()
        control = control or ControlThread(
            background_max=settings.matches_queued_max, waiting_max=settings.waiting_acquires_max
        )
        self._desk = Desk(client, spec, settings, clock or SystemClock(), control, job_ids)
        known = KnownResident(count_max=settings.resident_hashes_max)
        self._onboarder = Onboarder(self._desk, known)
        self._offloader = Offloader(self._desk, known)
        self._known = known
        self._requests = self._desk.requests
        self._promises = Promises(worker_count=settings.worker_count)
        # No quiet handler: the scheduler side touches no slot, and notices a new session at its
        # next hook. What it has planned under the old one, the workers refuse.
        client.set_recall_handler(self.on_recall)

    @hook(without=nothing)
    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens_of: TokensOf | None = None,
        wish: OnboardWish | None = None,
    ) -> None:
        """A request arrived. `hashes`: of all full blocks of its prompt. Starts the match.

        A `Head` is kept as it is, anything else is copied. `tokens_of` describes blocks to who
        reads the daemon's events, if the daemon asks for it. `wish`: in place of `onboard` of the
        settings.
        """
        self._offloader.tend()
        if request_id in self._requests:
            return  # Told twice, or the id of one that is not released yet: no kvtier for it.
        prompt = hashes if isinstance(hashes, Head) else tuple(hashes)
        wish = self._desk.settings.onboard if wish is None else wish
        request = Request(request_id, prompt, tokens_of, wish)
        self._requests[request_id] = request
        if request.prompt:
            self._offloader.ask_match(request)

    @hook(without=lambda *_, **__: 0)
    def get_onboard_count(self, request_id: str, local_block_count: int) -> int | None:
        """Blocks after the engine's own `local_block_count` that can be onboarded.

        None: ask again at the next step; 0: nothing, or the wait is over. May be asked repeatedly;
        a count holds until the next question.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return 0
        return self._onboarder.count(request, max(0, local_block_count))

    @hook(
        without=lambda self, request_id, device_blocks, onboard_count: self._promises.allocated(
            request_id, onboard_count
        )
    )
    def on_allocated(
        self, request_id: str, device_blocks: Sequence[int], onboard_count: int
    ) -> None:
        """The engine allocated for the request; with `onboard_count` 0 it declines.

        device_blocks[i] receives block local_block_count + i. With a count above 0 the request
        must not run until an outcome names it as onboarded or failed.
        """
        self._promises.allocated(request_id, onboard_count)
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            self._onboarder.allocated(request, device_blocks, onboard_count)

    @hook(without=nothing)
    def on_blocks_full(
        self, request_id: str, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        """The request's whole chain so far: confirmed tokens whose KV is computed or onboarded.

        device_blocks[i] holds block i; the engine keeps it unchanged until request_finished,
        on_preempted or reset, and beyond that as these say. Nothing is copied of two `Head`s.
        """
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            self._onboarder.note_running(request)
            self._offloader.note_chain(request, hashes, device_blocks)

    def note_prefill(self, token_seconds: float) -> None:
        """What a token of a prefill takes now: by it is told what onboards are worth."""
        self._desk.note_prefill(token_seconds)

    @hook(without=lambda self: StepPlan(self._desk.spec))
    def build_plan(self) -> StepPlan:
        """The jobs for the workers, once every step; every worker gets the same plan."""
        offloads = self._offloader.take_plan()
        plan = StepPlan(self._desk.spec, tuple(self._onboarder.take_plan()), tuple(offloads))
        self._promises.planned(plan)
        return plan

    @hook(without=lambda self, results: self._settle(results))
    def on_results(self, results: Sequence[JobResult]) -> StepOutcome:
        """The workers' reports, and what they mean; call it every step, with () as well."""
        self._promises.reported(results)
        worker_count = self._desk.settings.worker_count
        for result in results:
            if (onboard := self._onboarder.flights.get(result.job_id)) is not None:
                if onboard.is_planned and onboard.report(result, worker_count=worker_count):
                    self._onboarder.complete(onboard, onboard.failure)
                continue
            offload = self._offloader.flights.get(result.job_id)
            if offload is None or not offload.is_planned:
                continue  # Unknown, or reported before: late reports change nothing.
            if offload.report(result, worker_count=worker_count):
                self._offloader.complete(offload)
        self._offloader.tend_lingering()
        outcome = self._desk.take_outcome()
        self._promises.told(outcome)
        return outcome

    @hook(without=lambda self, request_id: self._promises.end(request_id))
    def request_finished(self, request_id: str) -> bool:
        """The request ended, in whatever way, at whatever moment.

        True: keep its device blocks until an outcome's `released` names it (jobs still touch
        them, or will: see `finish_wait_seconds`); False: they are free, and the id will not be
        heard of again.
        """
        request = self._requests.get(request_id)
        if request is None:
            return self._promises.ended(request_id, is_held=False)
        if not request.is_finished:
            self._onboarder.end(request)
            self._offloader.finish(request)
            request.is_finished = True
            request.hold_flights()
            self._desk.withdraw_verdict(request)
            self._desk.forget_if_ended(request)
        return self._promises.ended(request_id, is_held=request.hold_count > 0)

    @hook(without=lambda self, request_id: self._end_preempted(request_id))
    def on_preempted(self, request_id: str) -> bool:
        """The engine takes the request's device blocks away; it will start again at token 0.

        True: keep them until `released` names the request. Without the setting
        `holds_preempted_blocks` that happens only while an onboard writes into them.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        is_held = self._desk.settings.holds_preempted_blocks
        self._desk.withdraw_verdict(request)
        if len(request.chain) > len(request.prompt):
            request.prompt = tuple(request.chain)  # What it had computed may be onboarded, too.
        self._onboarder.end(request)
        self._offloader.preempt(request, is_held=is_held)
        request.hold_flights(onboards_only=not is_held)
        request.may_offload = True
        request.is_counted = False  # It asks anew, for what it may onboard once more.
        self._onboarder.restart(request)
        return self._promises.ended(request_id, is_held=request.hold_count > 0)

    @hook(without=nothing)
    def on_device_blocks_short(self, block_count: int) -> None:
        """The engine is short of so many device blocks: those kept for planning alone are freed.

        The next outcome's `released` names their requests, but for those that jobs touch. An engine
        that never calls this gets them back within `finish_wait_seconds`.
        """
        self._offloader.lingering.give_up(block_count)

    @hook(without=nothing)
    def on_blocks_invalid(self, device_blocks: Collection[int]) -> None:
        """The engine has computed on device blocks whose KV is wrong, and does so again.

        What is being offloaded of their requests is thrown away; these offload again only after
        they were preempted.
        """
        self._offloader.distrust(device_blocks)

    @hook(without=nothing)
    def reset(self, spec: NamespaceSpec) -> None:
        """The engine dropped its own KV (new weights): go on in another namespace.

        Requests that were begun before offload again only after they were preempted: their KV may
        mix both weights. Onboards under way are reported as failed.
        """
        self._end_life()
        self._desk.begin_life(spec)

    @hook(without=nothing)
    def clear(self, spare: NamespaceSpec) -> None:
        """As `reset`, but stay in the namespace, which must be this engine's alone.

        A daemon holds a bounded number of namespaces in its life, and an engine may be reset at
        every step of a training. Nothing is asked for until the daemon has voided it; where it
        does not, go on in `spare`.
        """
        self._end_life()
        self._desk.clear(spare)

    @hook(without=nothing)
    def hint(
        self,
        hashes: Sequence[bytes],
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> None:
        """Advice to the daemon's policies about a user's session; may be dropped."""
        desk, namespace, prefix = self._desk, self._desk.namespace, tuple(hashes)
        if desk.session() is not None:
            desk.ask(
                lambda: desk.client.hint(
                    namespace,
                    prefix,
                    session_end=session_end,
                    paused_seconds=paused_seconds,
                    turn_kind=turn_kind,
                ),
                desk.ignore,
                urgent=False,
            )

    @property
    def spec(self) -> NamespaceSpec:
        """The namespace that is planned for."""
        return self._desk.spec

    @property
    def has_work(self) -> bool:
        """Whether an idle engine should go on stepping, so that copies and commits end."""
        if self.is_disabled:
            return self._promises.is_owing
        offloader = self._offloader
        if self.has_outcome or len(offloader.lingering):
            return True
        return bool(self._onboarder.flights or offloader.flights or len(offloader.moving))

    @property
    def has_outcome(self) -> bool:
        """Whether `on_results` would tell something although no worker has reported anything."""
        if self.is_disabled:
            return self._promises.has_outcome
        desk = self._desk
        return bool(desk.onboarded or desk.failed or desk.released)

    def onboard_sources(self, request_id: str) -> tuple[tuple[TierName, int], ...]:
        """The tiers that the blocks being onboarded for the request came from; () if none are."""
        request = self._requests.get(request_id)
        flights = () if request is None else request.flights.values()
        return next((f.sources for f in flights if isinstance(f, OnboardFlight)), ())

    @property
    def is_disabled(self) -> bool:
        """Whether an internal error has ended all offload and onboard; `stats` names it."""
        return bool(self._desk.stats.disabled_by)

    @property
    def stock_count(self) -> int:
        """Slots reserved ahead that wait for a block."""
        return len(self._offloader.stock)

    @property
    def lease_count(self) -> int:
        """Acquires under way plus leases held."""
        return self._onboarder.open_count

    @property
    def request_count(self) -> int:
        """Requests remembered: those not finished, and those whose device blocks are held."""
        return len(self._requests)

    @property
    def lingering_count(self) -> int:
        """Finished requests whose device blocks are kept for what is not planned yet."""
        return len(self._offloader.lingering)

    @property
    def learned_count(self) -> int:
        """Rises with everything learned to be resident; see `note_absent`."""
        return self._known.learned_count

    def note_absent(self, hashes: frozenset[bytes], learned: int) -> None:
        """What was not resident when `learned_count` was `learned`."""
        self._known.discard_all(hashes, until=learned)

    def stats(self) -> ConnectorStats:
        stats, rule = self._desk.stats.copy(), self._desk.rule
        stats.avoided_blocks = rule.avoided_count
        stats.load_regret_seconds = rule.regret_seconds[OnboardChoice.LOAD]
        stats.recompute_regret_seconds = rule.regret_seconds[OnboardChoice.RECOMPUTE]
        return stats

    def close(self) -> None:
        """Give leases and slots back as far as time allows; the client stays open."""
        self._give_back()
        self._desk.control.close(self._desk.settings.close_seconds)

    def check_invariants(self) -> list[str]:
        """Violations, each in words; for tests."""
        return [*self._offloader.check_invariants(), *self._onboarder.check_invariants()]

    @hook(without=nothing)
    def _give_back(self) -> None:
        for request in list(self._requests.values()):
            self._onboarder.end(request)
        self._offloader.close()

    def _end_life(self) -> None:
        requests = list(self._requests.values())
        self._offloader.reset(requests)
        self._onboarder.reset(requests)

    def _settle(self, results: Sequence[JobResult]) -> StepOutcome:
        self._promises.reported(results)
        return self._promises.settle()

    def _end_preempted(self, request_id: str) -> bool:
        onboards_only = not self._desk.settings.holds_preempted_blocks
        return self._promises.end(request_id, onboards_only=onboards_only)

    def _disable(self, hook: str, error: Exception) -> None:
        """The planning is in doubt from here on: nothing more is planned, committed or given back.

        Leases expire by themselves; reserved slots return when the client closes its session.
        """
        desk = self._desk
        desk.stats.disabled_by = f"{type(error).__name__} in {hook}"
        log.error("internal error: this engine goes on without kvtier", exc_info=error)
        with suppress(Exception):
            desk.client.set_recall_handler(None)
        with suppress(Exception):
            desk.control.close(0.0)  # Does not wait; what arrives now is never looked at.

    def on_recall(self, namespace: Any, count: int) -> None:
        """The daemon wants slots back. Called in a thread of the client's."""

        def note() -> None:
            if namespace is self._desk.namespace:
                self._offloader.recall(count)

        self._desk.control.post(note)
