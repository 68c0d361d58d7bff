"""The engine's own scheduler in virtual time: no model, no bytes, and what each step costs is set.

A step takes a constant and so much a token; the tier is a link each way that carries one block
after another. What a decision costs is seen without noise; the speed of a machine is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvtier.connector.jobs import JobResult, StepOutcome, StepPlan
from kvtier.engine.config import EngineConfig, SamplingParams
from kvtier.engine.hashing import HashChain
from kvtier.engine.request import Request
from kvtier.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Costs:
    """Virtual seconds."""

    step_seconds: float = 2e-3
    token_seconds: float = 50e-6


@dataclass(frozen=True, slots=True)
class Work:
    """A request: when it comes, its prompt, and how many tokens it generates."""

    arrives_at: float
    prompt: tuple[int, ...]
    output_count: int
    sample_count: int = 1


@dataclass(slots=True)
class _Flight:
    ends_at: float
    request_id: str
    hashes: Sequence[bytes]
    is_onboard: bool


class VirtualTier:
    """kvtier as the scheduler knows it: `blocks_per_second` each way, and room for all."""

    def __init__(self, blocks_per_second: float) -> None:
        self.blocks_per_second = blocks_per_second
        self.now = 0.0
        self.resident: set[bytes] = set()
        self.onboarded_count = 0
        self._prompts: dict[str, Sequence[bytes]] = {}
        self._chains: dict[str, Sequence[bytes]] = {}
        self._sent: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._promised: set[bytes] = set()
        self._flights: list[_Flight] = []
        self._free_at = {True: 0.0, False: 0.0}
        self._held: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._flights)

    @property
    def next_end(self) -> float:
        return min((flight.ends_at for flight in self._flights), default=float("inf"))

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self._prompts[request_id] = tuple(hashes)

    def get_onboard_count(self, request_id: str, local_block_count: int) -> int | None:
        """What is still on its way there is waited for, as a real daemon's answer would be."""
        count = 0
        for one in self._prompts[request_id][local_block_count:]:
            if one not in self.resident:
                if one in self._promised:
                    return None
                break
            count += 1
        self._asked[request_id] = local_block_count
        return count

    def on_allocated(
        self, request_id: str, device_blocks: Sequence[int], onboard_count: int
    ) -> None:
        first = self._asked[request_id]
        self._send(request_id, self._prompts[request_id][first : first + onboard_count], True)
        self.onboarded_count += onboard_count

    def on_blocks_full(
        self, request_id: str, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        self._chains[request_id] = hashes
        known = self._sent.get(request_id, 0)  # Nothing leaves the tier.
        fresh = [
            one for one in hashes[known:] if one not in self.resident and one not in self._promised
        ]
        self._sent[request_id] = len(hashes)
        if fresh:
            self._promised.update(fresh)
            self._send(request_id, fresh, False)

    def note_prefill(self, token_seconds: float) -> None:
        pass

    def build_plan(self) -> StepPlan:
        raise AssertionError("there are no bytes to copy")

    def on_results(self, results: Sequence[JobResult]) -> StepOutcome:
        ended = [flight for flight in self._flights if flight.ends_at <= self.now]
        self._flights = [flight for flight in self._flights if flight.ends_at > self.now]
        onboarded, released = [], []
        for flight in ended:
            if not flight.is_onboard:
                self.resident.update(flight.hashes)
                self._promised.difference_update(flight.hashes)
            elif flight.request_id not in self._held:
                onboarded.append(flight.request_id)
            if flight.request_id in self._held and not self._is_flying(flight.request_id):
                self._held.remove(flight.request_id)
                released.append(flight.request_id)
        return StepOutcome(tuple(onboarded), (), tuple(released))

    def request_finished(self, request_id: str) -> bool:
        return self.on_preempted(request_id)

    def on_preempted(self, request_id: str) -> bool:
        if len(chain := self._chains.get(request_id, ())) > len(self._prompts[request_id]):
            self._prompts[request_id] = tuple(chain)
        if self._is_flying(request_id):
            self._held.add(request_id)
        return request_id in self._held

    def on_device_blocks_short(self, block_count: int) -> None:
        """What it holds is being copied."""

    def _is_flying(self, request_id: str) -> bool:
        return any(flight.request_id == request_id for flight in self._flights)

    def _send(self, request_id: str, hashes: Sequence[bytes], is_onboard: bool) -> None:
        begins_at = max(self.now, self._free_at[is_onboard])
        self._free_at[is_onboard] = begins_at + len(hashes) / self.blocks_per_second
        self._flights.append(_Flight(self._free_at[is_onboard], request_id, hashes, is_onboard))


@dataclass(slots=True)
class Run:
    """What became of it."""

    seconds: float = 0.0
    step_count: int = 0
    token_count: int = 0  # Generated.
    computed_count: int = 0
    preempted_count: int = 0
    batch_sum: int = 0
    held_sum: int = 0  # Device blocks, over the steps,
    table_sum: int = 0  # and what they would be if nothing were shared.
    tail_sum: int = 0  # Tokens that the blocks held have room for beyond what they hold.
    latencies: list[float] = field(default_factory=list)  # Of a request, for each of its tokens.

    slot_sum: int = 0  # Tokens that the blocks in all tables have room for.

    @property
    def shared_share(self) -> float:
        """Of the blocks in tables, those saved."""
        return 1 - self.held_sum / self.table_sum

    @property
    def tail_share(self) -> float:
        """Of the room in blocks, that which nothing is in."""
        return self.tail_sum / self.slot_sum


class VirtualEngine:
    """Takes works, plays them to their ends."""

    def __init__(
        self, config: EngineConfig, costs: Costs = Costs(), tier: VirtualTier | None = None
    ) -> None:
        self.config = config
        self.costs = costs
        self.tier = tier
        self.now = 0.0
        self.scheduler = Scheduler(config, tier, lambda: self.now)
        self._generator = torch.Generator()

    def run(self, works: Iterable[Work]) -> Run:
        coming = sorted(works, key=lambda work: work.arrives_at)[::-1]
        count = len(coming)
        run = Run()
        while coming or self.scheduler.unfinished_count:
            while coming and coming[-1].arrives_at <= self.now:
                self._add(coming.pop(), f"r{count - len(coming)}")
            if not self._step(run):
                self._sleep(coming)
        run.seconds = self.now
        run.computed_count = self.scheduler.computed_token_count
        run.preempted_count = sum(self.scheduler.preemption.counts.values())
        assert self.scheduler.check_invariants() == []
        return run

    def _add(self, work: Work, name: str) -> None:
        config = self.config
        chain = HashChain(seed="virtual", block_tokens=config.block_tokens)
        chain.extend(work.prompt)
        params = SamplingParams(tokens_max=work.output_count, sample_count=work.sample_count)
        request = Request(
            request_id=name,
            token_ids=list(work.prompt),
            prompt_count=len(work.prompt),
            params=params,
            chain=chain,
            generator=self._generator,
            arrived_at=self.now,
            width=work.sample_count,
        )
        self.scheduler.add(request)

    def _step(self, run: Run) -> bool:
        scheduler = self.scheduler
        self._exchange()
        batch = scheduler.schedule()
        scheduler.tables.take_copies()
        if not batch:
            return False
        token_count = sum(scheduled.count for scheduled in batch)
        seconds = self.costs.step_seconds + token_count * self.costs.token_seconds
        self.now += seconds
        if token_count > 4 * len(batch):
            scheduler.preemption.note_prefill(seconds / token_count)
        for scheduled in batch:
            scheduler.on_computed(scheduled)
        self._note(run, len(batch))
        for scheduled in batch:
            if scheduled.request.pending_count == 0:
                self._append(scheduled.request, run)
        return True

    def _append(self, request: Request, run: Run) -> None:
        heirs = [request]
        heirs += [self.scheduler.fork(request) for _ in range(request.width - 1)]
        for heir in heirs:
            run.token_count += 1
            token_id = hash((heir.request_id, len(heir.token_ids))) & 0xFFFF
            if heir.append(token_id, self.now) is not None:
                self.scheduler.finish(heir)
                run.latencies.append((self.now - heir.arrived_at) / len(heir.generated_ids))

    def _note(self, run: Run, batch_count: int) -> None:
        active, block_tokens = self.scheduler.active, self.config.block_tokens
        table_count = sum(len(request.device_blocks) for request in active)
        pool = self.scheduler.pool
        held_count = pool.block_count - pool.free_count - self.scheduler.tables.kept_count
        run.step_count += 1
        run.batch_sum += batch_count
        run.held_sum += held_count
        run.table_sum += table_count
        run.slot_sum += block_tokens * table_count
        run.tail_sum += block_tokens * table_count - sum(one.computed_count for one in active)

    def _exchange(self) -> None:
        if self.tier is not None:
            self.tier.now = self.now
            self.scheduler.on_outcome(self.tier.on_results(()))

    def _sleep(self, coming: Sequence[Work]) -> None:
        next_end = float("inf") if self.tier is None else self.tier.next_end
        wakes_at = min(next_end, coming[-1].arrives_at if coming else float("inf"))
        assert wakes_at < float("inf"), "requests wait for nothing"
        self.now = max(self.now, wakes_at)
