"""The leases of the onboard half: asked for, waited for, held, and each released exactly once.

A lease ends when its attempt is abandoned (missed, aborted, expired, declined) or when every worker
has reported the job that used it. What is in memory is asked for through the control thread; an
acquire that waits for promotion goes beside it, and only a few of those at a time: each pins what
it waits for.
"""

from __future__ import annotations

from kvtier.connector.acquire_call import AcquireCall
from kvtier.connector.client_api import LeaseLike
from kvtier.connector.desk import Desk
from kvtier.connector.failed import FailedHashes
from kvtier.connector.requests import Attempt, OnboardPhase, Request, Residency
from kvtier.connector.residency import KnownResident
from kvtier.connector.waiting import request_wait_seconds, sources_of
from kvtier.errors import KVTierError
from kvtier.policy.link import Counts
from kvtier.policy.load_or_recompute import Runs, lower_counts
from kvtier.types import Cut, TierName, Worth


class Acquirer:
    """Moves requests from WAITING over ASKED to LEASED, or gives them up."""

    def __init__(self, desk: Desk, known: KnownResident) -> None:
        self._desk = desk
        self._known = known
        settings = desk.settings
        self.failed = FailedHashes(
            failed_seconds=settings.failed_seconds, count_max=settings.failed_hashes_max
        )
        self.open_count = 0  # Acquires under way plus leases held.
        self.open_blocks = 0  # What these pin, or may come to pin.
        self.waiting_count = 0  # Acquires under way that wait for promotion.
        # The request that last got on in its turn, and when.
        self.last_move: tuple[int, float] | None = None

    def wait_seconds(self, request: Request) -> float:
        """How long it may wait for an answer, from its first scheduling attempt on."""
        return self._seconds_for(self._lower_counts(request))

    def _seconds_for(self, lower: Counts) -> float:
        reading_seconds = self._desk.rule.promoting.seconds(lower) if lower else None
        return request_wait_seconds(self._desk.settings, reading_seconds)

    def decide(self, request: Request, runs: Runs) -> int:
        """How many blocks of these, which follow the engine's own, are to be loaded.

        Once for each time that the request begins; after that the limit stands.
        """
        desk, local_count = self._desk, request.local_block_count
        count = sum(count for _, count in runs)
        if request.depth_limit is None:
            now = desk.clock.now()
            depth = desk.rule.choose(request.request_id, runs, now, request.wish)
            # All that is known of: there may be more by now.
            request.depth_limit = len(request.prompt) if depth == count else local_count + depth
        return min(count, max(0, request.depth_limit - local_count))

    def matched_runs(self, request: Request) -> Runs:
        """What is known to be resident behind the engine's own blocks."""
        local_count = request.local_block_count
        end = min(request.matched_count, len(request.prompt))
        first = max(local_count, min(end, request.lower_first) if request.lower_end else end)
        lower = _tiers_of(request, first, end - first)
        return ((TierName.DRAM, max(0, first - local_count)), *lower)

    def _lower_counts(self, request: Request) -> Counts:
        count = request.lower_count(request.local_block_count)
        if count == 0:
            return {}
        first = max(request.lower_first, request.local_block_count)
        return lower_counts(_tiers_of(request, first, count), count)

    def _wait_until(self, request: Request, lower: Counts) -> float:
        """Until when an acquire may wait for promotion: what is left is for its answer."""
        assert request.first_attempt_at is not None, "nobody has asked for it"
        left_seconds = self._seconds_for(lower) - self._desk.settings.onboard_wait_seconds
        return request.first_attempt_at + left_seconds

    def has_place(self, request: Request) -> bool:
        """Whether one more lease, of what may be found for this request, is within the limits."""
        settings = self._desk.settings
        if self.open_count == 0:
            return True
        blocks = self.open_blocks + self._expected_count(request)
        is_few = self.open_count < settings.acquires_in_flight_max
        return is_few and blocks <= settings.leased_blocks_max

    def ask_in_turn(self, request: Request, now: float) -> None:
        """Acquire, if there is a place for it."""
        settings = self._desk.settings
        if not self.has_place(request):
            return
        lower = self._lower_counts(request)
        if now >= (wait_until := self._wait_until(request, lower)):
            # Nothing to wait for, or no time left for it.
            self._ask_acquire(request, now, None, lower)
        elif self.waiting_count < settings.waiting_acquires_max:
            self._ask_acquire(request, now, wait_until, lower)

    def _ask_acquire(
        self, request: Request, now: float, wait_until: float | None, lower: Counts
    ) -> None:
        """Leave an acquire with another thread, which leaves out what failed lately."""
        desk = self._desk
        attempt = Attempt(request.local_block_count, self._known.learned_count, wait_until)
        failed = self.failed.current(now=now)
        call = AcquireCall(
            desk, desk.namespace, request.wanted, attempt, failed, request.request_id
        )
        life = desk.life

        def on_answer(answer: LeaseLike | KVTierError | None) -> None:
            self._on_acquired(request, attempt, life, answer)

        ask = desk.ask if wait_until is None else desk.ask_waiting
        if not ask(call, on_answer):
            request.phase = OnboardPhase.OVER  # Closed.
            return
        attempt.block_count = self._expected_count(request)
        self.open_count += 1
        self.open_blocks += attempt.block_count
        if wait_until is not None:
            self.waiting_count += 1
            attempt.promotion = desk.rule.promoting.begin(lower, now)
            desk.stats.waiting_acquires += 1
        request.attempt = attempt
        request.phase = OnboardPhase.ASKED
        self.last_move = request.number, now

    def _on_acquired(
        self,
        request: Request,
        attempt: Attempt,
        life: int,
        answer: LeaseLike | KVTierError | None,
    ) -> None:
        desk = self._desk
        lease = None if isinstance(answer, KVTierError) else answer
        if isinstance(answer, KVTierError):
            desk.note_error(answer)
        if attempt.wait_until is not None:
            self.waiting_count -= 1
        self._note_promoted(attempt, lease)
        if lease is None or lease.lease_id is None:
            self._leave(attempt)
        else:
            attempt.lease = lease
            attempt.leased_count = min(attempt.asked_count, lease.leased_count)
            self.open_blocks += attempt.leased_count - attempt.block_count
            attempt.block_count = attempt.leased_count
        if attempt.is_abandoned:
            if attempt.lease is not None:
                self.release(attempt)
            return
        if request.first_attempt_at is not None:
            request.waited_seconds = desk.clock.now() - request.first_attempt_at
        self._learn(request, attempt, lease, life)
        if lease is not None and self._goes_on_waiting(request, attempt, lease):
            return
        if lease is None or lease.lease_id is None:
            request.attempt = None
            request.phase = OnboardPhase.OVER
            return
        found_count = attempt.leased_count - attempt.skip_count
        too_few = found_count < desk.settings.onboard_blocks_min
        if too_few or len(lease.slots) < found_count or lease.session != desk.session():
            self.give_up(request)
            return
        desk.stats.matched_blocks += found_count
        request.phase = OnboardPhase.LEASED

    def _goes_on_waiting(self, request: Request, attempt: Attempt, lease: LeaseLike) -> bool:
        """Whether an acquire that found out by itself what lies on NVMe is made again, to wait."""
        if lease.cut is not Cut.DEADLINE or attempt.wait_until is not None:
            return False
        end = attempt.asked_count
        if request.residency is Residency.KNOWN and request.matched_count > attempt.leased_count:
            end = min(end, request.matched_count)
        request.lower_first, request.lower_end = attempt.leased_count, end
        request.match_tiers = ()  # They have moved since, or nobody has said.
        local_count, now = request.local_block_count, self._desk.clock.now()
        if now >= self._wait_until(request, self._lower_counts(request)):
            return False
        first = max(local_count, attempt.leased_count)
        lower = _tiers_of(request, first, end - first)
        request.depth_limit = None  # What was decided did not know of these.
        runs = ((TierName.DRAM, first - local_count), *lower)
        if self.decide(request, runs) <= first - local_count:
            return False  # What is in memory is enough.
        self.abandon(request)
        request.phase = OnboardPhase.WAITING
        self.ask_in_turn(request, now)
        return True

    def _note_promoted(self, attempt: Attempt, lease: LeaseLike | None) -> None:
        load, attempt.promotion = attempt.promotion, None
        if load is None:
            return
        came: Counts = {}
        if lease is not None and lease.lease_id is not None:
            first, count = attempt.skip_count, lease.leased_count - attempt.skip_count
            came = lower_counts(sources_of(attempt.tiers, lease.leased_count, first, count), count)
        if not came and lease is not None and lease.cut is Cut.DEADLINE:
            came = dict.fromkeys(load.counts, 1)  # Not even one of each: it takes longer than this.
        self._desk.rule.promoting.end(load, came, self._desk.clock.now())

    def _learn(
        self, request: Request, attempt: Attempt, lease: LeaseLike | None, life: int
    ) -> None:
        """An acquire that ended at a miss is as good as a match, and spares one."""
        if lease is None or life != self._desk.life or request.residency is Residency.KNOWN:
            return
        if lease.cut not in (Cut.NONE, Cut.MISS) or attempt.asked_count < len(request.prompt):
            return
        request.residency = Residency.KNOWN
        request.matched_count = request.offload_index = lease.leased_count
        request.matched_at = self._desk.clock.now()
        request.match_limit = len(request.prompt)
        request.match_learned_count = attempt.learned_count
        request.lower_end = 0

    # ------------------------------------------------------------------------------- ending

    def give_up(self, request: Request) -> None:
        self.abandon(request)
        request.phase = OnboardPhase.OVER

    def abandon(self, request: Request) -> None:
        """Whatever its acquire brings is not wanted any more."""
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return
        attempt.is_abandoned = True
        if attempt.lease is not None:
            self.release(attempt)

    def release(self, attempt: Attempt, worth: Worth | None = None) -> None:
        lease, attempt.lease = attempt.lease, None
        assert lease is not None, "a lease is released twice"
        self._leave(attempt)
        self._desk.release(lease, worth)

    def _leave(self, attempt: Attempt) -> None:
        self.open_count -= 1
        self.open_blocks -= attempt.block_count

    def _expected_count(self, request: Request) -> int:
        """Blocks that a lease for it would pin, at most: an old match may know too few."""
        settings, now = self._desk.settings, self._desk.clock.now()
        is_fresh = now - request.matched_at <= settings.match_fresh_seconds
        if request.residency is Residency.KNOWN and is_fresh:
            return min(len(request.wanted), request.matched_count)
        return len(request.wanted)


def _tiers_of(request: Request, first: int, count: int) -> Runs:
    """Where `count` blocks from `first` on are; as on NVMe where the daemon has not said."""
    if count <= 0:
        return ()
    if request.match_tiers and request.match_tiers[-1][1] >= request.matched_count - first:
        return ((request.match_tiers[-1][0], count),)  # One run, as nearly always.
    found = sources_of(request.match_tiers, request.matched_count, first, count)
    return found or ((TierName.NVME, count),)
