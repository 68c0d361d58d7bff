"""The offload half of the planning: what to copy out, into which slots, committed in which order.

From the first block of a request's chain that is not known to be resident; moving.py holds the
blocks on their way, supply.py the slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from kvtier.connector.desk import Desk
from kvtier.connector.heads import Head
from kvtier.connector.jobs import OffloadJob
from kvtier.connector.lingering import LingeringRequests
from kvtier.connector.moving import MovingBlocks
from kvtier.connector.requests import MovingBlock, OffloadFlight, Request, Residency
from kvtier.connector.residency import KnownResident
from kvtier.connector.stock import Footing
from kvtier.connector.supply import SlotSupply
from kvtier.errors import KVTierError
from kvtier.types import PrefixMatch

T = TypeVar("T")

# Requests with blocks left over that one plan looks at: bounds the hook's time.
_PENDING_PER_PLAN = 64
# Chains longer than this are not asked about again: one Match takes at most 1 MiB of hashes.
_MATCH_BLOCKS_MAX = 32_768


class Offloader:
    """Invariant: a given slot belongs to one moving block, until it is committed or aborted."""

    def __init__(self, desk: Desk, known: KnownResident) -> None:
        self._desk = desk
        self._known = known
        settings = desk.settings
        self._supply = SlotSupply(desk)
        self.stock = self._supply.stock
        self.moving = MovingBlocks(desk, known, self._supply, self._surprise)
        self.flights: dict[int, OffloadFlight] = {}
        self._planned: dict[int, OffloadFlight] = {}
        # Those with blocks left to plan, oldest first; lingering ones stand in `lingering` alone.
        self._pending: dict[str, Request] = {}
        self.lingering = LingeringRequests(desk)
        self._session: object = None
        self._budget = settings.offload_blocks_per_plan

    # ------------------------------------------------------------------------------- planning

    def note_chain(
        self, request: Request, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        """See SchedulerConnector.on_blocks_full. Costs the new blocks only."""
        if not (request.may_offload and self._desk.settings.may_offload):
            return
        count = min(len(hashes), len(device_blocks))
        known_count = len(request.chain)
        if known_count and (
            count < known_count
            or hashes[known_count - 1] != request.chain[-1]  # Chained: equal means all before.
            or device_blocks[known_count - 1] != request.device_blocks[-1]
        ):
            if count < known_count:
                return
            request.forget_chain()
            request.residency = Residency.UNKNOWN
            known_count = 0
        if count == known_count:
            return
        if isinstance(hashes, Head) and isinstance(device_blocks, Head):
            request.chain, request.device_blocks = hashes.until(count), device_blocks.until(count)
        else:
            request.chain = _extended(request.chain, hashes, count)
            request.device_blocks = _extended(request.device_blocks, device_blocks, count)
        self._pending[request.request_id] = request
        self._pick(request, self._budget)

    def take_plan(self) -> list[OffloadJob]:
        """Plan what is left over from before, then hand out all jobs since the last time."""
        self.tend()
        self.tend_lingering()
        if self._desk.session() is not None:
            self._pick_all(islice(self._pending.values(), _PENDING_PER_PLAN))
        planned, self._planned = self._planned, {}
        self._budget = self._desk.settings.offload_blocks_per_plan
        jobs = []
        for flight in planned.values():
            flight.is_planned = True
            assert flight.job is not None
            jobs.append(flight.job)
        return jobs

    def tend(self) -> None:
        """Notice a new session, and keep the stock filled; costs nothing when there is no need."""
        self.lingering.end_lost()
        self._note_session()
        if self._desk.settings.may_offload and self._desk.session() is not None:
            self._supply.refill()

    def tend_lingering(self) -> None:
        """Plan what finished requests left, and end the stay of those whose time is over."""
        self.lingering.end_lost()
        self._pick_all(self.lingering.requests())
        self.lingering.end_overdue()  # Last: an engine's step may have been longer than the wait.

    def _pick_all(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            if self._budget <= 0 or len(self.moving) >= self._desk.settings.offload_blocks_max:
                return
            self._pick(request, self._budget)

    def _pick(self, request: Request, limit: int) -> None:
        """Plan the request's next blocks, as far as slots and limits allow."""
        if not self._desk.spec.chained:
            request.residency = Residency.KNOWN  # Commit tells which were there already.
        if request.residency is not Residency.KNOWN:
            if request.residency is Residency.UNKNOWN and request.open_block_count == 0:
                self.ask_match(request)
            return
        footing = self.stock.footing
        if footing is None or footing.session != self._desk.session():
            return
        index = self._skip_resident(request)
        settings = self._desk.settings
        limit = min(limit, settings.offload_blocks_max - len(self.moving))
        wanted_count = min(limit, len(request.chain) - index)
        if wanted_count > len(self.stock):
            self.stock.want(wanted_count)
        slots = deque(self.stock.take(wanted_count))
        run: list[tuple[int, int]] = []  # Pairs of chain index and slot.
        while index < len(request.chain) and slots:
            if self._is_underway(request.chain[index]):  # Somebody's; ours go on behind it.
                self._begin_flight(request, footing, run)
                run = []
            else:
                run.append((index, slots.popleft()))
            index += 1
        self._begin_flight(request, footing, run)
        self.stock.give_back(footing, slots)
        request.offload_index = index
        if index >= len(request.chain):
            self._pending.pop(request.request_id, None)
            if request.is_lingering:
                self.lingering.end(request)

    def _is_underway(self, block_hash: bytes) -> bool:
        """Without a chain any block may be known, not the first ones alone."""
        is_known = not self._desk.spec.chained and self._known.is_known(block_hash, since=0)
        return is_known or block_hash in self.moving

    def _skip_resident(self, request: Request) -> int:
        index = request.offload_index
        while index < len(request.chain):
            since = request.match_learned_count if index < request.match_limit else 0
            if not self._known.is_known(request.chain[index], since=since):
                break
            index += 1
        request.offload_index = index
        return index

    def _begin_flight(
        self, request: Request, footing: Footing, run: Sequence[tuple[int, int]]
    ) -> None:
        if not run:
            return
        desk, chain = self._desk, request.chain
        flight = OffloadFlight(request, desk.life, job_id=desk.next_job_id(), footing=footing)
        for index, slot in run:
            block_hash = chain[index]
            parent = chain[index - 1] if index and desk.spec.chained else None
            block = MovingBlock(block_hash, parent, slot, flight, index)
            self.moving.add(block)
            flight.blocks.append(block)
        settings = desk.settings
        flight.job = OffloadJob(
            job_id=flight.job_id,
            request_id=request.request_id,
            session=footing.session,
            slots=tuple(slot for _, slot in run),
            device_blocks=tuple(request.device_blocks[index] for index, _ in run),
            hashes=tuple(chain[index] for index, _ in run) if settings.verify_one_in else (),
            with_checksums=settings.worker_checksums,
        )
        self._planned[flight.job_id] = flight
        self.flights[flight.job_id] = flight
        request.flights[flight.job_id] = flight
        if request.is_lingering:  # Else hold_flights does it, when the engine gives them up.
            request.hold_flights()
        request.open_block_count += len(run)
        self._budget -= len(run)
        desk.stats.offload_planned_blocks += len(run)

    # ------------------------------------------------------------------------------- residency

    def ask_match(self, request: Request) -> None:
        """Learn in the background how much of the request's chain is resident."""
        desk = self._desk
        if desk.session() is None:
            return
        longer = len(request.chain) > len(request.prompt)
        hashes = tuple(request.chain[:_MATCH_BLOCKS_MAX]) if longer else request.prompt
        learned_count, life, namespace = self._known.learned_count, desk.life, desk.namespace

        def call() -> PrefixMatch | None:
            if request.residency is not Residency.ASKED:
                return None  # An acquire has answered meanwhile.
            return desk.client.match(namespace, hashes, request_id=request.request_id)

        def on_answer(answer: PrefixMatch | KVTierError | None) -> None:
            if life != desk.life or request.residency is not Residency.ASKED:
                return
            if answer is None or isinstance(answer, KVTierError):
                if answer is not None:
                    desk.note_error(answer)
                self._surprise(request)
                return
            request.residency = Residency.KNOWN
            request.matched_count = request.offload_index = answer.matched_count
            request.matched_at = desk.clock.now()
            request.match_limit = len(hashes)
            request.match_learned_count = learned_count
            request.match_tiers = answer.tiers
            request.lower_first = answer.memory_count
            request.lower_end = min(answer.matched_count, len(request.prompt))
            if request.left_count:
                self._pend(request)
            elif request.is_lingering:
                self.lingering.end(request)

        request.residency = Residency.ASKED  # Before asking: the call reads it in its thread.
        if not desk.ask(call, on_answer, urgent=False):
            request.residency = Residency.UNKNOWN

    def _surprise(self, request: Request) -> None:
        """What was believed of the chain is wrong: ask again, a bounded number of times."""
        if request.residency is Residency.UNKNOWN:
            return
        if request.is_finished and not request.is_lingering:
            return  # Its device blocks are gone, or will be as soon as its flights have ended.
        request.residency = Residency.UNKNOWN
        request.rematch_count += 1
        if request.rematch_count > self._desk.settings.rematches_max:
            self._stop(request)
        elif request.chain:
            self._pend(request)

    def _pend(self, request: Request) -> None:
        """Look at it in the next plan; a lingering request is looked at in any case."""
        if not request.is_finished:
            self._pending[request.request_id] = request

    def _stop(self, request: Request) -> None:
        request.may_offload = False
        request.residency = Residency.KNOWN
        self._pending.pop(request.request_id, None)
        if request.is_lingering:
            self.lingering.end(request, "given_up")

    # ------------------------------------------------------------------------------- ending

    def complete(self, flight: OffloadFlight) -> None:
        """Every worker has reported: commit what was copied, in chain order."""
        desk, request = self._desk, flight.request
        del self.flights[flight.job_id]
        desk.end_flight(flight.job_id, flight)
        if flight.doomed:
            self.moving.drop(flight, flight.doomed)
        elif flight.failure is not None:
            self.moving.drop(flight, str(flight.failure))
            self._surprise(request)
        elif flight.session != desk.session():
            self.moving.drop(flight, "session_lost")
        else:
            desk.stats.offloaded_blocks += len(flight.blocks)
            desk.stats.offloaded_bytes += flight.bytes_count
            desk.stats.offload_copy_seconds += flight.copy_seconds
            self.moving.copied(flight)

    def finish(self, request: Request) -> None:
        """Plan what is left; what cannot be planned yet waits while the request lingers."""
        if request.request_id in self._pending:
            self._pick(request, self._desk.settings.offload_blocks_max)
            is_left = self._pending.pop(request.request_id, None) is not None
            if is_left and not self.lingering.begin(request):
                dropped = self._desk.stats.dropped_blocks
                dropped["finished_before_planned"] += request.left_count

    def preempt(self, request: Request, *, is_held: bool) -> None:
        """The device blocks are taken away, or kept until `released` if `is_held`."""
        for flight in list(request.flights.values()):
            if not isinstance(flight, OffloadFlight) or (is_held and flight.is_planned):
                continue
            if flight.is_planned:
                flight.doomed = "preempted"
                flight.is_disowned = True
            else:
                self._withdraw(flight, "preempted")
        self._forget(request)

    def distrust(self, device_blocks: Collection[int]) -> None:
        """These hold what their hashes do not stand for, and so does what was computed on them."""
        for request in list(self._desk.requests.values()):
            if set(request.device_blocks).isdisjoint(device_blocks):
                continue
            for flight in list(request.flights.values()):
                if not isinstance(flight, OffloadFlight):
                    continue
                if flight.is_planned:
                    flight.doomed = "invalid"
                else:
                    self._withdraw(flight, "invalid")
            self._stop(request)

    def reset(self, requests: Iterable[Request]) -> None:
        """Another namespace: nothing planned before may be committed."""
        self.lingering.end_all("reset")
        self.moving.reset()
        for flight in list(self.flights.values()):
            if flight.is_planned:
                flight.doomed = "reset"
            else:
                self._withdraw(flight, "reset")
        self._supply.throw_away()
        self.stock.is_asking = False
        self._known.clear()
        for request in requests:
            # What it computes now may rest on KV of the old weights: no offload until it restarts.
            request.may_offload = False
            self._forget(request)

    def close(self) -> None:
        """Slots that no worker was told of go back; the rest returns when the client says Bye."""
        self.lingering.end_all("closed")
        for flight in list(self._planned.values()):
            self._withdraw(flight, "closed")
        self._supply.throw_away()

    def recall(self, count: int) -> None:
        self._supply.recall(count)

    def check_invariants(self) -> list[str]:
        found = self.stock.check_invariants()
        owned = [
            slot
            for f in self.flights.values()
            for slot in (b.slot for b in f.blocks)
            if f.footing is self.stock.footing
        ]
        if len(set(owned)) != len(owned):
            found.append("a slot is in two flights")
        found += self.moving.check_invariants(self.flights)
        found += self.lingering.check_invariants()
        return found

    def _withdraw(self, flight: OffloadFlight, reason: str) -> None:
        """No worker was told of it: as if it had never been planned."""
        self._planned.pop(flight.job_id, None)
        del self.flights[flight.job_id]
        self._desk.end_flight(flight.job_id, flight)
        self.moving.drop(flight, reason)

    def _forget(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)
        request.forget_chain()
        request.residency = Residency.UNKNOWN
        request.rematch_count = 0

    def _note_session(self) -> None:
        """After a new session nothing is known, and jobs planned under the old one are void."""
        session = self._desk.session()
        if session is None or session == self._session:
            return
        self._session = session
        self._known.clear()
        for request in self._desk.requests.values():
            request.residency = Residency.UNKNOWN
            request.offload_index = request.rematch_count = 0
            if request.chain and request.may_offload and not request.is_finished:
                self._pending[request.request_id] = request
        footing = self.stock.footing
        if footing is not None and footing.session != session:
            self.stock.discard()
        for flight in list(self._planned.values()):
            if flight.session != session:
                self._withdraw(flight, "session_lost")


def _extended(known: Sequence[T], told: Sequence[T], count: int) -> list[T]:
    """A list of our own, made longer in place: it costs what is new."""
    own = known if isinstance(known, list) else list(known)
    own.extend(told[len(own) : count])
    return own
