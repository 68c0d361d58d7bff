"""Decides what each step computes: continuous batching over a pool of device blocks.

Running requests come first, in the order they were started; a prompt that does not fit into the
step's token budget is computed in parts. When device blocks run out the request started latest is
preempted: all its blocks are taken, and come back from kvtier or are computed anew
(`policy/preemption.py`). So the first running request always gets on.

Who holds device blocks:
  (0) requests that run, or wait for their onboard: those of their block table;
  (1) the connector, for requests that ended or were preempted while a copy touches them or is to
      be planned: `_kept`. Before anybody goes without, the latter are taken back.
Nothing is written to a published block: the last block of a prompt is always computed into a block
of the request's own, so a prompt that is cached as a whole still has a token to compute. Branches
of one prompt share even the block they go on in; who writes first takes a copy, the last one what
is left.

With layer-wise loading the tokens after a prefix are computed *ahead* of the verdict on its load.
They count when the load was in time and right; until then, and for good if it was not, nothing of
them is known to anybody: no block is cached or offloaded, no token is given out.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from kvtier.engine.blocks import DeviceBlockPool
from kvtier.engine.config import Batching, EngineConfig, IndexKind
from kvtier.engine.connector_api import SchedulerSide
from kvtier.engine.prefix_index import ChainedHashes, PrefixIndex, RadixTree
from kvtier.engine.request import Request, RequestEvent, RequestState
from kvtier.policy.preemption import Preemption, PreemptionRule, Victim

if TYPE_CHECKING:
    from kvtier.connector.jobs import StepOutcome


class Load(Enum):
    """That tokens are computed beside."""

    NONE = "none"
    UNDER_WAY = "under way"
    GOOD = "good"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """A request's next `count` tokens, from `first` on."""

    request: Request
    first: int
    count: int
    load: Load = Load.NONE


class Scheduler:
    """Owns the requests that are not finished, and their device blocks."""

    def __init__(
        self,
        config: EngineConfig,
        connector: SchedulerSide | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        has_tier = connector is not None
        self.preemption = PreemptionRule(config.preemption if has_tier else Preemption.RECOMPUTE)
        self._now = now
        self._onboard_began: dict[str, float] = {}
        self.pool = DeviceBlockPool(config.device_block_count, partial(_make_index, config))
        self._config = config
        self._connector = connector
        self._waiting: deque[Request] = deque()
        self._onboarding: dict[str, Request] = {}
        self._ahead: dict[str, ScheduledTokens] = {}  # Of requests in `_onboarding`.
        self._running: list[Request] = []
        self._kept: dict[str, list[int]] = {}
        self._copies: list[tuple[int, int]] = []
        self._fork_numbers = itertools.count(1)
        self.copied_block_count = 0  # Since the start, on write.
        self.computed_token_count = 0  # Since the start.
        # Of prompts, cached as the beginning of a block that goes on otherwise: computed all the
        # same, and known to a radix tree alone.
        self.sub_block_token_count = 0

    @property
    def waiting_count(self) -> int:
        """Requests without device blocks."""
        return len(self._waiting)

    @property
    def unfinished_count(self) -> int:
        """Requests that will still give tokens."""
        return len(self._waiting) + len(self._onboarding) + len(self._running)

    @property
    def kept_block_count(self) -> int:
        """Device blocks held for copies, planned or to come, alone."""
        return sum(len(device_blocks) for device_blocks in self._kept.values())

    def block_tables(self) -> list[tuple[list[int], int]]:
        """Of the requests that hold device blocks: which, and how many tokens' KV is in them."""
        active = [*self._running, *self._onboarding.values()]
        return [(request.device_blocks, request.computed_count) for request in active]

    def is_kept(self, request_id: str) -> bool:
        """Whether copies still touch the blocks of a former request of this id."""
        return request_id in self._kept

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.append(request)
        self._announce(request)

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
            self._announce(branch)
            self._waiting.appendleft(branch)
        return branch

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs of device blocks: the second becomes a copy of the first before the step's tokens
        are computed, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def schedule(self) -> list[ScheduledTokens]:
        """The next step's work; empty when all requests wait."""
        is_closed = self._config.batching is Batching.STATIC and bool(
            self._running or self._onboarding
        )
        batch: list[ScheduledTokens] = []
        budget = self._config.step_tokens_max
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(request.pending_count, budget)
            if count == 0:  # A beam that waits for the others.
                index += 1
            elif self._grow(request, request.computed_count + count):
                batch.append(self._scheduled(request, count))
                budget -= count
                index += 1
            else:
                self._preempt(self._running[-1])
                preempted = True
        if (
            not preempted and not is_closed
        ):  # Else what a newcomer would take is what was just missing.
            self._admit(batch, budget)
        return batch

    def on_computed(self, scheduled: ScheduledTokens) -> None:
        """The KV of these tokens is in the device blocks: publish the blocks now full."""
        request = scheduled.request
        request.computed_count += scheduled.count
        self.computed_token_count += scheduled.count
        full_count = request.computed_count // self._config.block_tokens
        if full_count == request.published_count:
            return
        self._publish(request, full_count)
        if self._connector is not None:
            self._announce(request)
            self._connector.on_blocks_full(
                request.request_id,
                request.hashes[:full_count],
                request.device_blocks[:full_count],
            )

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Start requests whose onboard has ended; free what copies no longer touch."""
        for request_id in outcome.onboarded:
            self._end_load(request_id, Load.GOOD)
        for request_id in outcome.failed:
            self._end_load(request_id, Load.FAILED)
        for request_id in outcome.released:
            self.pool.release(self._kept.pop(request_id))

    def settle(self, ahead: ScheduledTokens) -> bool:
        """Tokens computed ahead, and the verdict on their load: start their request. Whether they
        count."""
        request = ahead.request
        settled = self._ahead.pop(request.request_id)
        assert settled is ahead, f"{request.request_id} has two loads"
        self._start_onboarded(request, ahead.load)
        if ahead.load is Load.FAILED:
            return False
        self.on_computed(ahead)
        return True

    def finish(self, request: Request) -> None:
        """The request is over, whatever it was doing."""
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request.state is RequestState.WAITING_FOR_ONBOARD:
            del self._onboarding[request.request_id]
            self._ahead.pop(request.request_id, None)
        else:
            self._waiting.remove(request)
        request.move(RequestEvent.FINISH)
        keep = (
            self._connector is not None
            and request.is_announced
            and self._connector.request_finished(request.request_id)
        )
        self._let_go(request, keep=keep)
        self.preemption.forget(request.request_id)
        self._settle_onboard(request, is_good=False)

    def check_invariants(self) -> list[str]:
        """Each string is one violation."""
        wrong = self.pool.check_invariants()
        held = Counter(block for blocks in self._kept.values() for block in blocks)
        for request in [*self._running, *self._onboarding.values()]:
            held.update(request.device_blocks)
        wrong += [f"device block {block} is held {self.pool.hold_count(block)} times, "
                  f"{held[block]} times by us" for block in range(self.pool.block_count)
                  if self.pool.hold_count(block) != held[block]]  # fmt: skip
        wrong += [f"{request.request_id} waits with blocks" for request in self._waiting
                  if request.device_blocks]  # fmt: skip
        return wrong

    def _admit(self, batch: list[ScheduledTokens], budget: int) -> None:
        """Start waiting requests, first come first served, but not behind one that asks kvtier."""
        for request in list(self._waiting):
            if budget == 0 or self._must_wait(request):
                return
            local = self._match(request)
            onboard_count = self._onboard_count(request, len(local))
            if onboard_count is None:
                continue
            if onboard_count > 0:
                if not self._begin_onboard(request, local, onboard_count, budget):
                    return
                if (ahead := self._ahead.get(request.request_id)) is not None:
                    batch.append(ahead)
                    budget -= ahead.count
                continue
            cached_count = len(local) * self._config.block_tokens
            count = min(len(request.token_ids) - cached_count, budget)
            self.pool.hold(local)
            request.device_blocks = list(local)
            request.computed_count = cached_count
            if not self._grow(request, cached_count + count):
                self.pool.release(local)
                request.device_blocks = []
                request.computed_count = 0
                return
            self._waiting.remove(request)
            request.published_count = request.local_block_count = len(local)
            request.onboard_block_count = 0
            if request.prefix_counts is None:
                prefix = request.prefix(self._reusable_count(request))
                self.sub_block_token_count += self.pool.index.extra_count(prefix)
            self._start(request)
            batch.append(self._scheduled(request, count))
            budget -= count

    def _begin_onboard(
        self, request: Request, local: list[int], onboard_count: int, budget: int
    ) -> bool:
        """Allocate for the engine's own prefix and what kvtier brings; False: no room now."""
        assert self._connector is not None
        self.pool.hold(local)
        if not self._make_room(onboard_count):
            self.pool.release(local)
            return False
        fresh = self.pool.take(onboard_count)
        self._waiting.remove(request)
        request.device_blocks = local + fresh
        request.computed_count = len(local) * self._config.block_tokens
        request.published_count = request.local_block_count = len(local)
        request.onboard_block_count = onboard_count
        self.preemption.note_queued(onboard_count)
        self._onboard_began[request.request_id] = self._now()
        request.move(RequestEvent.ONBOARD)
        self._onboarding[request.request_id] = request
        if self._config.layerwise_loading and request.group is None:
            self._schedule_ahead(request, budget)
        self._connector.on_allocated(request.request_id, fresh, onboard_count)
        return True

    def _schedule_ahead(self, request: Request, budget: int) -> None:
        """What follows the prefix, if there are blocks for it; else it waits for the load."""
        block_tokens, block_count = self._config.block_tokens, len(request.device_blocks)
        first = block_count * block_tokens
        count = min(len(request.token_ids) - first, budget)
        missing = -(-(first + count) // block_tokens) - block_count
        if missing <= self.pool.free_count:
            request.device_blocks += self.pool.take(missing)
            self._ahead[request.request_id] = ScheduledTokens(request, first, count, Load.UNDER_WAY)

    def _settle_onboard(self, request: Request, *, is_good: bool) -> None:
        began_at = self._onboard_began.pop(request.request_id, None)
        if began_at is None:
            return
        if is_good:
            self.preemption.note_arrived(request.onboard_block_count, began_at, self._now())
        else:
            self.preemption.note_failed(request.onboard_block_count)

    def _end_load(self, request_id: str, load: Load) -> None:
        self._settle_onboard(self._onboarding[request_id], is_good=load is Load.GOOD)
        ahead = self._ahead.get(request_id)
        if ahead is None:
            self._start_onboarded(self._onboarding[request_id], load)
        else:
            ahead.load = load  # The engine settles it, once it has the tokens.

    def _start_onboarded(self, request: Request, load: Load) -> None:
        del self._onboarding[request.request_id]
        if load is Load.GOOD:
            count = request.local_block_count + request.onboard_block_count
            request.computed_count = count * self._config.block_tokens
            self._publish(request, count)
        else:
            # The blocks meant for the onboard stay the request's own and are computed.
            request.onboard_block_count = 0
        self._start(request)

    def _start(self, request: Request) -> None:
        request.move(RequestEvent.START)
        self._running.append(request)
        self.preemption.note_back(request.request_id, request.computed_count, self._now())
        if request.prefix_counts is None:
            block_tokens = self._config.block_tokens
            request.prefix_counts = (
                request.local_block_count * block_tokens,
                request.onboard_block_count * block_tokens,
            )

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        request.move(RequestEvent.PREEMPT)
        request.preempted_count += 1
        self._waiting.appendleft(request)
        if request.group is not None:
            request.group.preempted_count += 1
        full_count = request.computed_count // self._config.block_tokens
        victim = Victim(request.computed_count, full_count, self._config.block_tokens)
        self.preemption.choose(request.request_id, victim)
        keep = False
        if self._connector is not None:
            if request.is_announced:
                keep = self._connector.on_preempted(request.request_id)
            self._announce(request)
        self._let_go(request, keep=keep)

    def _let_go(self, request: Request, *, keep: bool) -> None:
        if keep:
            self._kept.setdefault(request.request_id, []).extend(request.device_blocks)
        else:
            self.pool.release(request.device_blocks)
        request.device_blocks = []
        request.computed_count = request.published_count = 0

    def _grow(self, request: Request, token_count: int) -> bool:
        """Make the block table long enough for `token_count` tokens, and the request the only
        holder of the blocks it will write to, if the pool has the blocks."""
        missing = -(-token_count // self._config.block_tokens) - len(request.device_blocks)
        copied = self._shared_tail(request)
        if not self._make_room(missing + len(copied)):
            return False
        for index in copied:
            [own] = self.pool.take(1)
            self._copies.append((request.device_blocks[index], own))
            self.copied_block_count += 1
            self.pool.release([request.device_blocks[index]])
            request.device_blocks[index] = own
        if missing > 0:
            request.device_blocks += self.pool.take(missing)
        return True

    def _shared_tail(self, request: Request) -> range:
        """Indexes of the blocks that it would write to, and others hold: none, or the last."""
        first = request.computed_count // self._config.block_tokens
        blocks = request.device_blocks[first:]
        is_shared = bool(blocks) and self.pool.hold_count(blocks[0]) > 1
        assert all(self.pool.hold_count(block) == 1 for block in blocks[1:]), "fresh block shared"
        return range(first, first + 1) if is_shared else range(0)

    def _make_room(self, block_count: int) -> bool:
        """Whether so many blocks are free, if need be after the connector has let go of some."""
        missing = block_count - self.pool.free_count
        if missing > 0 and self._connector is not None and self._kept:
            self._connector.on_device_blocks_short(missing)
            self.on_outcome(self._connector.on_results(()))
        return block_count <= self.pool.free_count

    def _scheduled(self, request: Request, count: int) -> ScheduledTokens:
        first = request.computed_count // self._config.block_tokens
        end = -(-(request.computed_count + count) // self._config.block_tokens)
        written = request.device_blocks[first:end]
        assert not any(self.pool.is_published(block) for block in written), "cached block written"
        return ScheduledTokens(request, request.computed_count, count)

    def _publish(self, request: Request, full_count: int) -> None:
        if self._config.prefix_caching and full_count > request.published_count:
            prefix = request.prefix(full_count)
            for index in range(request.published_count, full_count):
                self.pool.publish(request.device_blocks[index], prefix, index)
        request.published_count = full_count

    def _match(self, request: Request) -> list[int]:
        if not self._config.prefix_caching:
            return []
        return self.pool.index.match(request.prefix(self._reusable_count(request)))

    def _onboard_count(self, request: Request, local_count: int) -> int | None:
        if self._connector is None or self.preemption.is_recomputed(request.request_id):
            return 0
        self.preemption.note_asked(request.request_id, self._now())
        count = self._connector.get_onboard_count(request.request_id, local_count)
        return None if count is None else min(count, self._reusable_count(request) - local_count)

    def _reusable_count(self, request: Request) -> int:
        """Full blocks before the one with the last token, which is always computed."""
        return (len(request.token_ids) - 1) // self._config.block_tokens

    def _must_wait(self, request: Request) -> bool:
        """For its turn. Branches of a group start again one after another: each finds in the prefix
        cache what those before it share with it."""
        active = [*self._running, *self._onboarding.values()]
        if sum(one.width for one in active) + request.width > self._config.running_count_max:
            return True
        return request.group is not None and any(
            one.group is request.group and one.pending_count > 1 for one in active
        )

    def _announce(self, request: Request) -> None:
        """Tell kvtier of the request, once."""
        is_told, request.is_announced = request.is_announced, True
        if self._connector is None or is_told:
            return
        # Not the block of the last token: it is computed here in any case.
        reusable = request.hashes[: self._reusable_count(request)]
        tokens_of = request.tokens_of if request.chain.is_plain else None
        self._connector.on_new_request(request.request_id, reusable, tokens_of)


def _make_index(config: EngineConfig) -> PrefixIndex:
    if config.prefix_index is IndexKind.RADIX:
        return RadixTree(config.block_tokens)
    return ChainedHashes()


def unfinished(requests: Sequence[Request]) -> bool:
    """Whether any of them will still give tokens."""
    return any(request.state is not RequestState.FINISHED for request in requests)
