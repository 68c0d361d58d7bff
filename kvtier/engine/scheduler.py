"""Decides what each step computes: continuous batching over a pool of device blocks.

Running requests come first, in the order they were started; a prompt that does not fit into the
step's token budget is computed in parts. When device blocks run out the request started latest is
preempted: all its blocks are taken, and come back from kvtier or are computed anew
(`policy/preemption.py`). So the first running request always gets on.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier.engine.blocks import DeviceBlockPool
from kvtier.engine.config import Batching, EngineConfig
from kvtier.engine.connector_api import SchedulerSide
from kvtier.engine.onboards import Onboards
from kvtier.engine.request import Load, Request, RequestEvent, RequestState, ScheduledTokens
from kvtier.engine.tables import BlockTables
from kvtier.policy.preemption import Preemption, PreemptionRule, Victim

if TYPE_CHECKING:
    from kvtier.connector.jobs import StepOutcome


class Scheduler:
    """Owns the requests that are not finished."""

    def __init__(
        self,
        config: EngineConfig,
        connector: SchedulerSide | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        has_tier = connector is not None
        self.preemption = PreemptionRule(config.preemption if has_tier else Preemption.RECOMPUTE)
        self.tables = BlockTables(config, self._reclaim)
        self.onboards = Onboards(config, self.tables, connector, self.preemption, now)
        self._config = config
        self._connector = connector
        self._now = now
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._fork_numbers = itertools.count(1)
        self.computed_token_count = 0  # Since the start.
        # Of prompts, cached as the beginning of a block that goes on otherwise: computed all the
        # same, and known to a radix tree alone.
        self.sub_block_token_count = 0

    @property
    def pool(self) -> DeviceBlockPool:
        return self.tables.pool

    @property
    def active(self) -> list[Request]:
        """Requests that have a block table."""
        return [*self._running, *self.onboards.requests.values()]

    @property
    def ahead(self) -> list[ScheduledTokens]:
        """Tokens computed beside loads, not settled yet."""
        return list(self.onboards.ahead.values())

    @property
    def waiting_count(self) -> int:
        """Requests without device blocks."""
        return len(self._waiting)

    @property
    def unfinished_count(self) -> int:
        """Requests that will still give tokens."""
        return len(self._waiting) + len(self.active)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.append(request)
        self.onboards.announce(request)

    def fork(self, parent: Request) -> Request:
        """A branch that shares all blocks with its parent, and is whatever that is."""
        number = next(self._fork_numbers)
        branch = parent.fork(f"{parent.leader_id}~{number}")
        parent.width = branch.width = 1
        if parent.state is RequestState.RUNNING:
            self.pool.hold(branch.device_blocks)
            self._running.insert(self._running.index(parent) + 1, branch)
        else:
            # A beam that was preempted with its scores known. What is computed for its parent the
            # branch finds in the prefix cache.
            branch.state = RequestState.WAITING
            branch.device_blocks = []
            branch.computed_count = branch.published_count = 0
            self.onboards.announce(branch)
            self._waiting.appendleft(branch)
        return branch

    def schedule(self) -> list[ScheduledTokens]:
        """The next step's work; empty when all requests wait."""
        is_closed = self._config.batching is Batching.STATIC and bool(self.active)
        batch: list[ScheduledTokens] = []
        budget = self._config.step_tokens_max
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(request.pending_count, budget)
            if count == 0:  # A beam that waits for the others.
                index += 1
            elif self.tables.grow(request, request.computed_count + count):
                batch.append(self._scheduled(request, count))
                budget -= count
                index += 1
            else:
                self._preempt(self._running[-1])
                preempted = True
        # After a preemption a newcomer would take what was just missing.
        if not preempted and not is_closed:
            self._admit(batch, budget)
        return batch

    def on_computed(self, scheduled: ScheduledTokens) -> None:
        """The KV of these tokens is in the device blocks: publish the blocks now full."""
        request = scheduled.request
        request.computed_count += scheduled.count
        self.computed_token_count += scheduled.count
        full_count = request.full_count
        if full_count == request.published_count:
            return
        self.tables.publish(request, full_count)
        if self._connector is not None:
            self.onboards.announce(request)
            self._connector.on_blocks_full(
                request.request_id,
                request.hashes[:full_count],
                request.device_blocks[:full_count],
            )

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Start requests whose onboard has ended; free what copies no longer touch."""
        for load, request_ids in ((Load.GOOD, outcome.onboarded), (Load.FAILED, outcome.failed)):
            for request_id in request_ids:
                if (request := self.onboards.end(request_id, load)) is not None:
                    self._start(request)
        for request_id in outcome.released:
            self.tables.release_kept(request_id)

    def settle(self, ahead: ScheduledTokens) -> bool:
        """Tokens computed ahead, and the verdict on their load: start their request. Whether they
        count."""
        self._start(self.onboards.settle(ahead))
        if ahead.load is Load.FAILED:
            return False
        self.on_computed(ahead)
        return True

    def finish(self, request: Request) -> None:
        """The request is over, whatever it was doing."""
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request.state is RequestState.WAITING_FOR_ONBOARD:
            self.onboards.drop(request)
        else:
            self._waiting.remove(request)
        request.move(RequestEvent.FINISH)
        keep = (
            self._connector is not None
            and request.is_announced
            and self._connector.request_finished(request.request_id)
        )
        self.tables.let_go(request, keep=keep)
        self.preemption.forget(request.request_id)

    def check_invariants(self) -> list[str]:
        """Each string is one violation."""
        return self.tables.check_invariants(self.active) + [
            f"{request.request_id} waits with blocks"
            for request in self._waiting
            if request.device_blocks
        ]

    def _admit(self, batch: list[ScheduledTokens], budget: int) -> None:
        """Start waiting requests, first come first served, but not behind one that asks kvtier."""
        for request in list(self._waiting):
            if budget == 0 or self._must_wait(request):
                return
            local = self.tables.match(request)
            onboard_count = self.onboards.ask(request, len(local))
            if onboard_count is None:
                continue
            if onboard_count > 0:
                if not self.onboards.begin(request, local, onboard_count, budget):
                    return
                self._waiting.remove(request)
                scheduled = self.onboards.ahead.get(request.request_id)
            else:
                scheduled = self._begin(request, local, budget)
                if scheduled is None:
                    return
            if scheduled is not None:
                batch.append(scheduled)
                budget -= scheduled.count

    def _begin(self, request: Request, local: list[int], budget: int) -> ScheduledTokens | None:
        """Compute what is not cached; None: no room now."""
        self.tables.open(request, local)
        count = min(request.pending_count, budget)
        if not self.tables.grow(request, request.computed_count + count):
            self.tables.let_go(request)
            return None
        self._waiting.remove(request)
        if request.prefix_counts is None:
            prefix = request.prefix(request.reusable_count)
            self.sub_block_token_count += self.pool.index.extra_count(prefix)
        self._start(request)
        return self._scheduled(request, count)

    def _start(self, request: Request) -> None:
        request.move(RequestEvent.START)
        self._running.append(request)
        self.preemption.note_back(request.request_id, request.computed_count, self._now())
        if request.prefix_counts is None:
            request.prefix_counts = (
                request.local_block_count * self._config.block_tokens,
                request.onboard_block_count * self._config.block_tokens,
            )

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        request.move(RequestEvent.PREEMPT)
        request.preempted_count += 1
        self._waiting.appendleft(request)
        if request.group is not None:
            request.group.preempted_count += 1
        victim = Victim(request.computed_count, request.full_count, self._config.block_tokens)
        self.preemption.choose(request.request_id, victim)
        keep = (
            self._connector is not None
            and request.is_announced
            and self._connector.on_preempted(request.request_id)
        )
        self.onboards.announce(request)
        self.tables.let_go(request, keep=keep)

    def _scheduled(self, request: Request, count: int) -> ScheduledTokens:
        self.tables.check_writable(request, count)
        return ScheduledTokens(request, request.computed_count, count)

    def _must_wait(self, request: Request) -> bool:
        """For its turn. Branches of a group start again one after another: each finds in the prefix
        cache what those before it share with it."""
        active: Sequence[Request] = self.active
        if sum(one.width for one in active) + request.width > self._config.running_count_max:
            return True
        return request.group is not None and any(
            one.group is request.group and one.pending_count > 1 for one in active
        )

    def _reclaim(self, block_count: int) -> None:
        assert self._connector is not None, "nobody keeps blocks"
        self._connector.on_device_blocks_short(block_count)
        self.on_outcome(self._connector.on_results(()))
