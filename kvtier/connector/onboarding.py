"""The onboard half of the planning: question, promise, job; acquiring.py holds the leases."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.connector.acquiring import Acquirer
from kvtier.connector.client_api import LeaseLike
from kvtier.connector.desk import Desk
from kvtier.connector.jobs import FailReason, OnboardJob
from kvtier.connector.requests import Attempt, OnboardFlight, OnboardPhase, Request, Residency
from kvtier.connector.residency import KnownResident
from kvtier.connector.waiting import sources_of
from kvtier.policy.load_or_recompute import OnboardWish, copied
from kvtier.types import TierName, Worth

# Reasons that say nothing against the block itself: a new session may well load it.
_NOT_THE_BLOCK = (FailReason.STALE, FailReason.CLOSED)


class Onboarder:
    """Answers "how many blocks can be onboarded?" from what has arrived."""

    def __init__(self, desk: Desk, known: KnownResident) -> None:
        self._desk = desk
        self._acquirer = Acquirer(desk, known)
        self._planned: list[OnboardFlight] = []
        self.flights: dict[int, OnboardFlight] = {}

    @property
    def open_count(self) -> int:
        """Acquires under way plus leases held."""
        return self._acquirer.open_count

    def count(self, request: Request, local_block_count: int) -> int | None:
        """See SchedulerConnector.get_onboard_count."""
        if request.phase in (OnboardPhase.LOADING, OnboardPhase.OVER):
            return 0
        desk, now = self._desk, self._desk.clock.now()
        if desk.session() is None:
            self.restart(request)
            return 0
        request.local_block_count = local_block_count
        rest_count = len(request.prompt) - local_block_count
        if rest_count < desk.settings.onboard_blocks_min:
            self.restart(request)  # The engine may lose what it has while the request waits.
            return 0
        if not request.is_counted:
            request.is_counted = True
            desk.stats.asked_blocks += rest_count
        is_waiting = request.phase is OnboardPhase.WAITING
        if is_waiting and self._is_avoided(request, now):
            self._acquirer.give_up(request)
            return 0
        if is_waiting and not (self._acquirer.has_place(request) or self._is_miss(request, now)):
            return self._wait_turn(request, now)
        if request.first_attempt_at is None:
            request.first_attempt_at = now
        if request.phase is OnboardPhase.LEASED:
            if (leased := self._leased_count(request, local_block_count)) is not None:
                return leased
            # It cannot be promised any more: a new question, a new wait.
            self._acquirer.abandon(request)
            request.phase = OnboardPhase.WAITING
            request.first_attempt_at = now
        waited_seconds = now - request.first_attempt_at
        # The first is never above the second, and costs nothing to know.
        if (
            waited_seconds >= desk.settings.onboard_wait_seconds
            and waited_seconds >= self._acquirer.wait_seconds(request)
        ):
            desk.stats.deadline_missed_requests += 1
            request.waited_seconds = waited_seconds
            self._acquirer.give_up(request)
            return 0
        if request.phase is OnboardPhase.WAITING:
            if self._is_miss(request, now):
                request.first_attempt_at = None  # Answered; asked again, it is a new question.
                return 0
            self._acquirer.ask_in_turn(request, now)
        return None if request.phase is not OnboardPhase.OVER else 0

    def allocated(self, request: Request, device_blocks: Sequence[int], count: int) -> None:
        """See SchedulerConnector.on_allocated."""
        attempt = request.attempt
        if count <= 0:
            if request.phase is not OnboardPhase.LOADING:
                self._acquirer.give_up(request)
                self._desk.rule.settle(request.request_id, 0, request.waited_seconds)
            return
        if request.phase is OnboardPhase.LOADING:
            return  # Told twice: the first one stands.
        local_count = request.local_block_count
        if (
            request.phase is not OnboardPhase.LEASED
            or attempt is None
            or attempt.lease is None
            or count > min(attempt.leased_count - local_count, len(device_blocks))
        ):
            # Promised once, but a reset or a lost session came between: the engine waits for us.
            self._acquirer.give_up(request)
            self._desk.failed.append(request.request_id)
            return
        self._plan(request, attempt, attempt.lease, device_blocks[:count])

    def note_running(self, request: Request) -> None:
        """It computes without what was asked for: nobody will want the lease."""
        if request.phase in (OnboardPhase.ASKED, OnboardPhase.LEASED):
            self._acquirer.give_up(request)
        if request.phase is not OnboardPhase.LOADING:
            self._desk.rule.settle(request.request_id, 0, request.waited_seconds)

    def take_plan(self) -> list[OnboardJob]:
        """Jobs for the workers; those of a session lost meanwhile fail here."""
        if not self._planned:
            return []
        session = self._desk.session()
        planned, self._planned = self._planned, []
        jobs = []
        for flight in planned:
            if flight.job.session == session:
                flight.is_planned = True
                jobs.append(flight.job)
            else:
                self.complete(flight, FailReason.STALE)
        return jobs

    def complete(self, flight: OnboardFlight, failure: FailReason | None) -> None:
        """Every worker has reported, or none was told."""
        desk, request, job = self._desk, flight.request, flight.job
        del self.flights[job.job_id]
        self._settle(flight, 0 if failure else len(job.slots))
        self._acquirer.release(flight.attempt, None if failure else self._worth(flight))
        is_held = flight.is_held
        desk.end_flight(job.job_id, flight)
        if failure is None:
            desk.stats.onboarded_blocks += len(job.slots)
            for tier, count in flight.sources:
                desk.stats.onboarded_tier_blocks[tier] += count
            desk.stats.onboarded_bytes += flight.bytes_count
            desk.stats.onboard_copy_seconds += flight.copy_seconds
        else:
            desk.stats.onboard_failed_blocks += len(job.slots)
            if failure not in _NOT_THE_BLOCK and flight.life == desk.life:
                index = flight.first_index + min(flight.failed_index, len(job.slots) - 1)
                self._acquirer.failed.add(request.prompt[index], now=desk.clock.now())
        if is_held:
            return  # Finished or preempted meanwhile: `released` says all.
        request.phase = OnboardPhase.OVER
        is_good = failure is None and flight.life == desk.life
        (desk.onboarded if is_good else desk.failed).append(request.request_id)

    def end(self, request: Request) -> None:
        """The request is finished or preempted: drop what no worker was told of."""
        for flight in [f for f in self._planned if f.request is request]:
            self._planned.remove(flight)
            del self.flights[flight.job.job_id]
            del request.flights[flight.job.job_id]
            self._desk.rule.copying.end(flight.copy, {}, self._desk.clock.now())
            self._acquirer.release(flight.attempt)
        self._acquirer.give_up(request)
        self._desk.rule.forget(request.request_id)

    def restart(self, request: Request) -> None:
        """The request begins again at token 0, in this life of the namespace."""
        self._acquirer.give_up(request)
        request.phase = OnboardPhase.WAITING
        request.first_attempt_at = request.turn_since = request.depth_limit = None
        request.waited_seconds = 0.0
        request.lower_end = 0
        self._desk.rule.forget(request.request_id)

    def reset(self, requests: Sequence[Request]) -> None:
        """Another namespace: leases of the old one end; its jobs fail when they are reported."""
        planned, self._planned = self._planned, []
        for flight in planned:
            self.complete(flight, FailReason.STALE)
        self._acquirer.failed.clear()
        for request in requests:
            if request.phase in (OnboardPhase.ASKED, OnboardPhase.LEASED):
                self.restart(request)

    def check_invariants(self) -> list[str]:
        found, rule = [], self._desk.rule
        if rule.copying.queued_count != len(self.flights):
            found.append("copies that are waited for are not those under way")
        if rule.promoting.queued_count != self._acquirer.waiting_count:
            found.append("promotions that are waited for are not those under way")
        if not rule.open_ids <= self._desk.requests.keys():
            found.append("a choice is kept of a request that is not")
        return found

    def _settle(self, flight: OnboardFlight, loaded_count: int) -> None:
        desk, request, now = self._desk, flight.request, self._desk.clock.now()
        desk.rule.copying.end(flight.copy, copied(loaded_count) if loaded_count else {}, now)
        if not flight.is_held:
            seconds = request.waited_seconds + now - flight.copy.began_at
            desk.rule.settle(request.request_id, loaded_count, seconds)

    def _is_avoided(self, request: Request, now: float) -> bool:
        """Whether to compute all takes less than to load any of it, or is wished for."""
        if request.wish is OnboardWish.NEVER:
            return True
        if request.residency is not Residency.KNOWN or self._is_miss(request, now):
            return False
        runs = self._acquirer.matched_runs(request)
        count_min = self._desk.settings.onboard_blocks_min
        if sum(count for _, count in runs) < count_min:
            return False  # An old miss.
        return self._acquirer.decide(request, runs) < count_min

    def _worth(self, flight: OnboardFlight) -> Worth | None:
        """None as long as the engine has not said how long it computes."""
        desk, began_at = self._desk, flight.request.first_attempt_at
        if desk.token_seconds is None or began_at is None:
            return None
        token_count = len(flight.job.slots) * desk.spec.block_tokens
        return Worth(token_count * desk.token_seconds, max(0.0, desk.clock.now() - began_at))

    def _wait_turn(self, request: Request, now: float) -> int | None:
        """Leases of other requests are at their limits; they end as these are loaded.

        As long as those in front get on, its turn will come, and the engine is not held up. Who
        came later does not count: small requests may overtake a large one for ever.
        """
        request.first_attempt_at = None
        if request.turn_since is None:
            request.turn_since = now
        number, moved_at = self._acquirer.last_move or (request.number, now)
        if number < request.number:
            request.turn_since = max(request.turn_since, moved_at)
        if now - request.turn_since < self._desk.settings.turn_wait_seconds:
            return None
        self._desk.stats.deadline_missed_requests += 1
        self._acquirer.give_up(request)
        return 0

    def _is_miss(self, request: Request, now: float) -> bool:
        if request.residency is not Residency.KNOWN:
            return False
        if now - request.matched_at > self._desk.settings.match_fresh_seconds:
            return False
        found_count = request.matched_count - request.local_block_count
        return found_count < self._desk.settings.onboard_blocks_min

    def _leased_count(self, request: Request, local_block_count: int) -> int | None:
        """Blocks to promise from the lease held; None when it does not do any more."""
        attempt = request.attempt
        if attempt is None or attempt.lease is None:
            return None
        settings = self._desk.settings
        slack_ns = int(settings.lease_slack_seconds * 1e9)
        if self._desk.clock.now_ns() + slack_ns >= attempt.lease.deadline_ns:
            return None
        if local_block_count < attempt.skip_count:
            return None
        if attempt.lease.session != self._desk.session():
            return None
        found_count = attempt.leased_count - local_block_count
        found_count = self._acquirer.decide(request, ((TierName.DRAM, max(0, found_count)),))
        if found_count < settings.onboard_blocks_min:
            self._acquirer.give_up(request)
            return 0
        return found_count

    def _plan(
        self,
        request: Request,
        attempt: Attempt,
        lease: LeaseLike,
        device_blocks: Sequence[int],
    ) -> None:
        desk, first = self._desk, request.local_block_count
        offset, count = first - attempt.skip_count, len(device_blocks)
        hashes: tuple[bytes, ...] = ()
        if desk.settings.verify_one_in:
            hashes = tuple(request.prompt[first : first + count])
        job = OnboardJob(
            job_id=desk.next_job_id(),
            request_id=request.request_id,
            session=lease.session,
            slots=tuple(lease.slots[offset : offset + count].tolist()),
            device_blocks=tuple(device_blocks),
            deadline_ns=lease.deadline_ns,
            hashes=hashes,
        )
        flight = OnboardFlight(
            request,
            desk.life,
            job=job,
            attempt=attempt,
            first_index=first,
            sources=sources_of(attempt.tiers, lease.leased_count, first, count),
            copy=desk.rule.begin_copy(request.request_id, count, desk.clock.now()),
        )
        request.attempt = None
        request.phase = OnboardPhase.LOADING
        self._acquirer.last_move = request.number, desk.clock.now()
        request.flights[job.job_id] = flight
        self.flights[job.job_id] = flight
        self._planned.append(flight)
