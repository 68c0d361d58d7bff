"""The onboard half of the planning for several KV groups: one promise, a job in each group.

As `Onboarder`, but what is offered is the length of a prefix, and it is offered only with leases on
all that every group must load for it. A load has ended when the jobs of all groups have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.connector.desk import Desk
from kvtier.connector.failed import FailedHashes
from kvtier.connector.grouped_call import (
    Group,
    GroupedAnswer,
    GroupedAttempt,
    GroupedCall,
    HitFinder,
    Part,
)
from kvtier.connector.heads import Head
from kvtier.connector.jobs import FailReason, JobResult, OnboardJob
from kvtier.connector.requests import OnboardPhase
from kvtier.connector.waiting import request_wait_seconds, sources_of
from kvtier.errors import KVTierError
from kvtier.types import TierName, Worth

Found = Callable[[GroupedAttempt, GroupedAnswer], None]
_NOT_THE_BLOCK = (FailReason.STALE, FailReason.CLOSED)


@dataclass(slots=True, eq=False)
class Asker:
    """One request, as long as it has not ended."""

    request_id: str
    hashes: Sequence[bytes]  # The engine's own list, which grows.
    phase: OnboardPhase = OnboardPhase.WAITING
    first_attempt_at: float | None = None
    turn_since: float | None = None
    is_counted: bool = False
    attempt: GroupedAttempt | None = None
    found_tokens: int | None = None  # What the daemon had when it was last asked.
    found_at: float = float("-inf")
    lower_bytes: int = 0
    present: tuple[frozenset[bytes], ...] = ()  # By group, as the daemon said then.


@dataclass(slots=True, eq=False)
class GroupedFlight:
    """The jobs of one load."""

    asker: Asker
    attempt: GroupedAttempt
    parts: dict[int, Part]
    life: int
    jobs: dict[int, tuple[int, OnboardJob]]  # By job id: its group.
    tokens: int = 0
    open_jobs: set[int] = field(default_factory=set)
    failed: list[tuple[int, JobResult]] = field(default_factory=list)  # With the group.
    bytes_count: int = 0
    copy_seconds: float = 0.0


class GroupedOnboarder:
    """Answers "how many tokens can be onboarded?" from what has arrived."""

    def __init__(self, desk: Desk, groups: Sequence[Group], finder: HitFinder, found: Found):
        """`found`: told of every answer, and what it was asked about."""
        self._desk = desk
        self._finder = finder
        self._found = found
        self.groups = groups
        self._askers: dict[str, Asker] = {}
        self._planned: list[GroupedFlight] = []
        self._flights: dict[int, GroupedFlight] = {}  # By job.
        self._failed = FailedHashes(
            failed_seconds=desk.settings.failed_seconds, count_max=desk.settings.failed_hashes_max
        )
        self.open_count = 0  # Calls under way plus leased answers.
        self.open_blocks = 0
        self.learned: Callable[[], tuple[int, ...]] = tuple

    # ------------------------------------------------------------------------------- questions

    def begin(self, request_id: str, hashes: Sequence[bytes], token_limit: int) -> None:
        """Learn in the background how much there is."""
        asker = self._askers[request_id] = Asker(request_id, hashes)
        if self._desk.session() is not None:
            attempt = self._attempt(asker, 0, token_limit)
            attempt.leases = False
            self._ask(asker, attempt, urgent=False)

    def count(self, request_id: str, local_tokens: int, token_limit: int) -> int | None:
        """Tokens that can be onboarded behind the engine's own; None: ask again at the next step.

        The prefix is at most `token_limit` tokens long.
        """
        asker, desk = self._askers.get(request_id), self._desk
        if asker is None or asker.phase in (OnboardPhase.LOADING, OnboardPhase.OVER):
            return 0
        now = desk.clock.now()
        if desk.session() is None:
            self.restart(request_id)
            return 0
        if not asker.is_counted:
            asker.is_counted = True
            desk.stats.asked_blocks += max(0, token_limit - local_tokens) // self._step
        if asker.phase is OnboardPhase.LEASED:
            if (tokens := self._leased_tokens(asker, local_tokens, token_limit)) is not None:
                return tokens
            self.restart(request_id)
        if asker.phase is OnboardPhase.WAITING:
            if self._is_miss(asker, local_tokens, now):
                asker.first_attempt_at = None
                return 0
            if not self._has_place(asker):
                return self._wait_turn(asker, now)
        if asker.first_attempt_at is None:
            asker.first_attempt_at = now
        reading_seconds = None
        if asker.lower_bytes:
            reading_seconds = asker.lower_bytes / desk.settings.nvme_bytes_per_second
        wait_seconds = request_wait_seconds(desk.settings, reading_seconds)
        if now - asker.first_attempt_at >= wait_seconds:
            desk.stats.deadline_missed_requests += 1
            self.give_up(request_id)
            return 0
        if asker.phase is OnboardPhase.WAITING:
            self._ask_leases(asker, local_tokens, token_limit, wait_seconds)
        return None

    def allocated(
        self, request_id: str, local_tokens: int, tokens: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """The engine waits for these tokens. `tables[g][i]` holds block i of group g; a negative
        number where the engine needs none."""
        asker = self._askers.get(request_id)
        attempt = None if asker is None else asker.attempt
        answer = None if attempt is None else attempt.answer
        if asker is None or attempt is None or answer is None or answer.parts is None:
            return  # A reset, or a lost session: nothing is planned, and that is a failed load.
        flight = GroupedFlight(asker, attempt, answer.parts, self._desk.life, {}, tokens)
        end = local_tokens + tokens
        for number, group in enumerate(self.groups):
            size = group.spec.block_tokens
            places = {
                index: tables[number][index]
                for index in range(local_tokens // size, min(end // size, len(tables[number])))
                if tables[number][index] >= 0
            }
            part = answer.parts.get(number)
            if not places:
                continue
            if part is None or not part.slots.keys() >= places.keys():
                self.give_up(request_id)  # The engine needs more than it told.
                return
            job = OnboardJob(
                job_id=self._desk.next_job_id(),
                request_id=request_id,
                session=part.lease.session,
                slots=tuple(part.slots[index] for index in places),
                device_blocks=tuple(places.values()),
                deadline_ns=part.lease.deadline_ns,
                hashes=self._sample(part, places),
            )
            flight.jobs[job.job_id] = number, job
        asker.phase, asker.attempt = OnboardPhase.LOADING, None
        flight.open_jobs = set(flight.jobs)
        self._planned.append(flight)
        self._flights.update(dict.fromkeys(flight.jobs, flight))

    def present(self, request_id: str, number: int) -> frozenset[bytes]:
        """Hashes of a group that were there when the daemon was last asked for the request."""
        asker = self._askers.get(request_id)
        return asker.present[number] if asker is not None and asker.present else frozenset()

    # ------------------------------------------------------------------------------- jobs

    def take_plan(self) -> list[list[OnboardJob]]:
        """By group, what workers are to load."""
        planned, self._planned = self._planned, []
        jobs: list[list[OnboardJob]] = [[] for _ in self.groups]
        for flight in planned:
            if any(job.session != self._desk.session() for _, job in flight.jobs.values()):
                self._end_flight(flight, FailReason.STALE)
                continue
            for number, job in flight.jobs.values():
                jobs[number].append(job)
        return jobs

    def report(self, result: JobResult) -> None:
        """Of any job; those of others are ignored, and so is what is told twice."""
        flight = self._flights.get(result.job_id)
        if flight is None or result.job_id not in flight.open_jobs:
            return
        flight.open_jobs.discard(result.job_id)
        flight.bytes_count += result.bytes_count
        flight.copy_seconds = max(flight.copy_seconds, result.seconds)
        if result.failed is not None:
            flight.failed.append((flight.jobs[result.job_id][0], result))
        if not flight.open_jobs:
            self._end_flight(flight, flight.failed[0][1].failed if flight.failed else None)

    def sources(self, request_id: str) -> tuple[tuple[TierName, int], ...]:
        """Where the blocks of the first group that loads any came from."""
        for flight in self._planned:
            if flight.asker.request_id != request_id:
                continue
            for number, job in flight.jobs.values():
                return self._sources(flight.parts[number], len(job.slots))
        return ()

    # ------------------------------------------------------------------------------- ending

    def end(self, request_id: str) -> None:
        """The request has ended; what workers were told of goes on."""
        if request_id in self._askers:
            self.give_up(request_id)
            del self._askers[request_id]

    def give_up(self, request_id: str) -> None:
        asker = self._askers.get(request_id)
        if asker is not None and asker.phase is not OnboardPhase.LOADING:
            self._abandon(asker)
            asker.phase = OnboardPhase.OVER

    def restart(self, request_id: str) -> None:
        """It begins again at token 0."""
        asker = self._askers.get(request_id)
        if asker is not None:
            self._abandon(asker)
            asker.phase = OnboardPhase.WAITING
            asker.first_attempt_at = asker.turn_since = asker.found_tokens = None
            asker.lower_bytes = 0

    def recount(self, request_id: str) -> None:
        """Preempted: it asks anew, for what it may onboard once more."""
        if (asker := self._askers.get(request_id)) is not None:
            asker.is_counted = False
            self.restart(request_id)

    def reset(self) -> None:
        """Other namespaces from now on; what is being loaded of the old ones fails."""
        self._failed.clear()
        for asker in self._askers.values():
            asker.present = ()
        planned, self._planned = self._planned, []
        for flight in planned:
            self._end_flight(flight, FailReason.STALE)
        for request_id, asker in self._askers.items():
            if asker.phase in (OnboardPhase.ASKED, OnboardPhase.LEASED):
                self.restart(request_id)

    def close(self) -> None:
        for request_id in list(self._askers):
            self.end(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._flights)

    @property
    def request_count(self) -> int:
        return len(self._askers)

    # ------------------------------------------------------------------------------- details

    @property
    def _step(self) -> int:
        return max(group.spec.block_tokens for group in self.groups)

    def _attempt(self, asker: Asker, local_tokens: int, token_limit: int) -> GroupedAttempt:
        hashes = Head(asker.hashes, len(asker.hashes))
        attempt = GroupedAttempt(hashes, token_limit, local_tokens)
        attempt.learned_counts = self.learned()
        return attempt

    def _ask_leases(
        self, asker: Asker, local_tokens: int, token_limit: int, wait_seconds: float
    ) -> None:
        attempt = self._attempt(asker, local_tokens, token_limit)
        assert asker.first_attempt_at is not None, "it is being asked about"
        if asker.lower_bytes:
            left = wait_seconds - self._desk.settings.onboard_wait_seconds
            attempt.wait_until = asker.first_attempt_at + left
        attempt.block_count = self._expected_blocks(asker)
        if self._ask(asker, attempt, urgent=True):
            asker.attempt, asker.phase = attempt, OnboardPhase.ASKED
            self.open_count += 1
            self.open_blocks += attempt.block_count
        else:
            asker.phase = OnboardPhase.OVER  # Closed.

    def _ask(self, asker: Asker, attempt: GroupedAttempt, *, urgent: bool) -> bool:
        desk = self._desk
        failed = self._failed.current(now=desk.clock.now())
        call = GroupedCall(desk, self.groups, self._finder, attempt, failed, asker.request_id)
        life = desk.life

        def on_answer(answer: GroupedAnswer | KVTierError) -> None:
            if attempt.leases:
                self._on_leased(asker, attempt, answer, life)
            self._learn(asker, attempt, answer, life)

        if attempt.wait_until is not None:
            desk.stats.waiting_acquires += 1
            return desk.ask_waiting(call, on_answer)
        return desk.ask(call, on_answer, urgent=urgent)

    def _learn(
        self, asker: Asker, attempt: GroupedAttempt, answer: GroupedAnswer | KVTierError, life: int
    ) -> None:
        if isinstance(answer, KVTierError):
            self._desk.note_error(answer)
        elif life == self._desk.life and answer.present:
            asker.present = answer.present
            asker.found_tokens, asker.found_at = answer.token_count, self._desk.clock.now()
            asker.lower_bytes = answer.lower_bytes
            self._found(attempt, answer)

    def _on_leased(
        self, asker: Asker, attempt: GroupedAttempt, answer: GroupedAnswer | KVTierError, life: int
    ) -> None:
        parts = None if isinstance(answer, KVTierError) else answer.parts
        if not isinstance(answer, KVTierError):
            attempt.answer = answer
        if parts is None:
            self._leave(attempt)
        if attempt.is_abandoned or life != self._desk.life:
            if parts is not None:
                self._release(attempt, None)
            return
        if parts is not None:
            self._desk.stats.matched_blocks += sum(len(part.slots) for part in parts.values())
            asker.phase = OnboardPhase.LEASED
            return
        asker.attempt = None
        is_lower = not isinstance(answer, KVTierError) and answer.lower_bytes > 0
        # Found out only now that it lies lower: asked again, to wait for it.
        goes_on = is_lower and attempt.wait_until is None
        asker.phase = OnboardPhase.WAITING if goes_on else OnboardPhase.OVER

    def _leased_tokens(self, asker: Asker, local_tokens: int, token_limit: int) -> int | None:
        attempt = asker.attempt
        answer = None if attempt is None else attempt.answer
        if attempt is None or answer is None or answer.parts is None:
            return None
        slack_ns = int(self._desk.settings.lease_slack_seconds * 1e9)
        soon_ns = self._desk.clock.now_ns() + slack_ns
        for part in answer.parts.values():
            if part.lease.deadline_ns <= soon_ns or part.lease.session != self._desk.session():
                return None
        if local_tokens < attempt.local_tokens or answer.token_count > token_limit:
            return None
        tokens = answer.token_count - local_tokens
        if tokens < self._desk.settings.onboard_blocks_min * self._step:
            self.give_up(asker.request_id)
            return 0
        return tokens

    def _is_miss(self, asker: Asker, local_tokens: int, now: float) -> bool:
        settings = self._desk.settings
        if asker.found_tokens is None or now - asker.found_at > settings.match_fresh_seconds:
            return False
        return asker.found_tokens - local_tokens < settings.onboard_blocks_min * self._step

    def _expected_blocks(self, asker: Asker) -> int:
        tokens = asker.found_tokens
        if tokens is None:
            tokens = len(asker.hashes) * self._step
        return sum(tokens // group.spec.block_tokens for group in self.groups)

    def _has_place(self, asker: Asker) -> bool:
        settings = self._desk.settings
        if self.open_count == 0:
            return True
        blocks = self.open_blocks + self._expected_blocks(asker)
        is_few = self.open_count < settings.acquires_in_flight_max
        return is_few and blocks <= settings.leased_blocks_max

    def _wait_turn(self, asker: Asker, now: float) -> int | None:
        """Leases of other requests are at their limits; they end as these are loaded."""
        asker.first_attempt_at = None
        if asker.turn_since is None:
            asker.turn_since = now
        if now - asker.turn_since < self._desk.settings.turn_wait_seconds:
            return None
        self._desk.stats.deadline_missed_requests += 1
        self.give_up(asker.request_id)
        return 0

    def _abandon(self, asker: Asker) -> None:
        attempt, asker.attempt = asker.attempt, None
        if attempt is None:
            return
        attempt.is_abandoned = True
        if attempt.answer is not None and attempt.answer.parts is not None:
            self._release(attempt, None)

    def _release(self, attempt: GroupedAttempt, worth: Worth | None) -> None:
        """Every lease of the attempt, once."""
        assert attempt.answer is not None, "nothing was leased"
        for part in (attempt.answer.parts or {}).values():
            self._desk.release(part.lease, worth)
            worth = None  # Of all groups together.
        self._leave(attempt)

    def _leave(self, attempt: GroupedAttempt) -> None:
        self.open_count -= 1
        self.open_blocks -= attempt.block_count

    def _end_flight(self, flight: GroupedFlight, failure: FailReason | None) -> None:
        desk, asker = self._desk, flight.asker
        for job_id in flight.jobs:
            del self._flights[job_id]
        self._release(flight.attempt, None if failure else self._worth(flight))
        count = sum(len(job.slots) for _, job in flight.jobs.values())
        if failure is None:
            desk.stats.onboarded_blocks += count
            desk.stats.onboarded_bytes += flight.bytes_count
            desk.stats.onboard_copy_seconds += flight.copy_seconds
            for number, job in flight.jobs.values():
                for tier, part_count in self._sources(flight.parts[number], len(job.slots)):
                    desk.stats.onboarded_tier_blocks[tier] += part_count
        else:
            desk.stats.onboard_failed_blocks += count
            for number, result in flight.failed:
                if result.failed in _NOT_THE_BLOCK or flight.life != desk.life:
                    continue
                part, job = flight.parts[number], flight.jobs[result.job_id][1]
                slot = job.slots[min(result.failed_index, len(job.slots) - 1)]
                index = next(i for i, one in part.slots.items() if one == slot)
                self._failed.add(part.hashes[index], now=desk.clock.now())
        if asker.phase is OnboardPhase.LOADING:
            asker.phase = OnboardPhase.OVER

    def _sources(self, part: Part, count: int) -> tuple[tuple[TierName, int], ...]:
        """Loaded are the last `count` blocks of the lease."""
        leased = part.lease.leased_count
        return sources_of(part.lease.tiers, leased, leased - count, count)

    def _worth(self, flight: GroupedFlight) -> Worth | None:
        desk, began_at = self._desk, flight.asker.first_attempt_at
        if desk.token_seconds is None or began_at is None:
            return None
        return Worth(flight.tokens * desk.token_seconds, max(0.0, desk.clock.now() - began_at))

    def _sample(self, part: Part, places: dict[int, int]) -> tuple[bytes, ...]:
        if not self._desk.settings.verify_one_in:
            return ()
        return tuple(part.hashes[index] for index in places)
