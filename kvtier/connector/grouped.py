"""The scheduler side of an engine whose KV is in several groups; see docs/decisions/0015.

Each group is a namespace with a planning of its own for what goes out; what comes in is decided
once, over all of them. In a group that is no chain (a sliding window) the engine gives a block up
while its request goes on, so its blocks are planned as those of a request that has just ended:
they are read as long as the engine does not need them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

from kvtier.clock import Clock, SystemClock
from kvtier.connector.client_api import SchedulerClient
from kvtier.connector.control import Control, ControlThread
from kvtier.connector.desk import Desk
from kvtier.connector.grouped_call import Group, GroupedAnswer, GroupedAttempt, HitFinder
from kvtier.connector.grouped_onboarding import GroupedOnboarder
from kvtier.connector.heads import Head
from kvtier.connector.hooks import hook, nothing
from kvtier.connector.jobs import JobResult, StepOutcome, StepPlan
from kvtier.connector.requests import TokensOf
from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stats import ConnectorStats
from kvtier.namespace import NamespaceSpec
from kvtier.types import TierName

log = logging.getLogger(__name__)
Key = str  # What one group plans for: a request's chain, or some blocks of it.


class GroupedConnector:
    """Plans offload and onboard for one engine; one instance, used by one thread."""

    def __init__(
        self,
        client: SchedulerClient,
        specs: Sequence[NamespaceSpec],
        finder: HitFinder,
        *,
        hash_tokens: int,
        settings: ConnectorSettings,
        clock: Clock | None = None,
        control: Control | None = None,
    ) -> None:
        """`hash_tokens`: tokens that each hash of the engine's stands for."""
        clock = clock or SystemClock()
        control = control or ControlThread(
            background_max=settings.matches_queued_max, waiting_max=settings.waiting_acquires_max
        )
        job_ids = count(1)
        self._client = client
        self._hash_tokens = hash_tokens
        self._desk = Desk(client, specs[0], settings, clock, control, job_ids)
        self.cores = [
            SchedulerConnector(
                client, spec, settings=settings, clock=clock, control=control, job_ids=job_ids
            )
            for spec in specs
        ]
        self._onboarder = GroupedOnboarder(self._desk, self._groups(specs), finder, self._on_found)
        self._onboarder.learned = lambda: tuple(core.learned_count for core in self.cores)
        self._offer_count = 0
        client.set_recall_handler(self._on_recall)

    @property
    def specs(self) -> tuple[NamespaceSpec, ...]:
        return tuple(group.spec for group in self._onboarder.groups)

    @hook(without=nothing)
    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        token_limit: int,
        tokens_of: Sequence[TokensOf | None] = (),
    ) -> None:
        """A request arrived; `hashes` is the engine's list, which grows. At most `token_limit`
        tokens of it may be onboarded. `tokens_of`: by group, see SchedulerConnector."""
        self._onboarder.begin(request_id, hashes, token_limit)
        for number, core in enumerate(self.cores):
            if core.spec.chained:
                described = tokens_of[number] if tokens_of else None
                core.on_new_request(_key(number, request_id), (), described)

    @hook(without=lambda *_, **__: 0)
    def get_onboard_tokens(
        self, request_id: str, local_tokens: int, token_limit: int
    ) -> int | None:
        """See GroupedOnboarder.count."""
        return self._onboarder.count(request_id, local_tokens, token_limit)

    @hook(without=nothing)
    def on_allocated(
        self, request_id: str, local_tokens: int, tokens: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """The engine allocated; without tokens it declines. A load that stands in no plan after
        this has failed."""
        if tokens > 0:
            self._onboarder.allocated(request_id, local_tokens, tokens, tables)
        else:
            self._onboarder.give_up(request_id)

    @hook(without=nothing)
    def on_chain_full(
        self, request_id: str, number: int, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> None:
        """As SchedulerConnector.on_blocks_full, of one group that is a chain."""
        self._onboarder.give_up(request_id)  # It computes without what was asked for.
        self.cores[number].on_blocks_full(_key(number, request_id), hashes, device_blocks)

    @hook(without=lambda *_, **__: None)
    def on_blocks_offered(
        self, request_id: str, number: int, hashes: Sequence[bytes], device_blocks: Sequence[int]
    ) -> Key | None:
        """Blocks of a group that is no chain. The key, if they are to be read later than now:
        until `released` names it, unless the engine needs them (`on_device_blocks_short`)."""
        there = self._onboarder.present(request_id, number)
        kept = [i for i, one in enumerate(hashes) if one not in there]
        hashes, device_blocks = [hashes[i] for i in kept], [device_blocks[i] for i in kept]
        self._offer_count += 1
        core, key = self.cores[number], _key(number, request_id, self._offer_count)
        core.on_new_request(key, ())
        core.on_blocks_full(key, Head(hashes, len(hashes)), Head(device_blocks, len(device_blocks)))
        return key if core.request_finished(key) else None

    @hook(without=lambda *_, **__: ())
    def build_plans(self) -> tuple[StepPlan, ...]:
        """One plan for each group, once every step."""
        onboards = self._onboarder.take_plan()
        plans = [core.build_plan() for core in self.cores]
        return tuple(
            StepPlan(plan.spec, tuple(jobs), plan.offloads)
            for plan, jobs in zip(plans, onboards, strict=True)
        )

    @hook(without=lambda *_, **__: StepOutcome())
    def on_results(self, results: Sequence[JobResult]) -> StepOutcome:
        """The workers' reports. Only `released` is told; loads the workers tell the engine of."""
        for result in results:
            self._onboarder.report(result)
        released = [key for core in self.cores for key in core.on_results(results).released]
        return StepOutcome(released=tuple(released))

    @hook(without=lambda *_, **__: {})
    def request_finished(self, request_id: str) -> dict[int, Key]:
        """By group, chains of which device blocks are still to be read; see on_blocks_offered."""
        self._onboarder.end(request_id)
        found = {}
        for number, core in enumerate(self.cores):
            key = _key(number, request_id)
            if core.spec.chained and core.request_finished(key):
                found[number] = key
        return found

    @hook(without=nothing)
    def on_preempted(self, request_id: str) -> None:
        """The engine takes the request's device blocks away; it will start again at token 0."""
        self._onboarder.recount(request_id)
        for number, core in enumerate(self.cores):
            if core.spec.chained:
                core.on_preempted(_key(number, request_id))

    @hook(without=nothing)
    def on_device_blocks_short(self, block_count: int) -> None:
        for core in self.cores:
            core.on_device_blocks_short(block_count)

    @hook(without=nothing)
    def on_blocks_invalid(self, device_blocks: Collection[int]) -> None:
        for core in self.cores:
            core.on_blocks_invalid(device_blocks)

    def note_prefill(self, token_seconds: float) -> None:
        self._desk.token_seconds = token_seconds

    @hook(without=nothing)
    def reset(self, specs: Sequence[NamespaceSpec]) -> None:
        """The engine dropped its own KV: go on in other namespaces."""
        self._onboarder.reset()
        self._desk.begin_life(specs[0])
        for core, spec in zip(self.cores, specs, strict=True):
            core.reset(spec)
        self._onboarder.groups = self._groups(specs)

    @hook(without=nothing)
    def hint(
        self,
        hashes: Sequence[bytes],
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> None:
        """Of the chains; see SchedulerConnector.hint."""
        for core, group in zip(self.cores, self._onboarder.groups, strict=True):
            if core.spec.chained:
                core.hint(
                    group.hashes_of(hashes),
                    session_end=session_end,
                    paused_seconds=paused_seconds,
                    turn_kind=turn_kind,
                )

    def sources(self, request_id: str) -> tuple[tuple[TierName, int], ...]:
        return self._onboarder.sources(request_id)

    @property
    def has_work(self) -> bool:
        if self.is_disabled:
            return False
        return self._onboarder.has_work or any(core.has_work for core in self.cores)

    @property
    def has_outcome(self) -> bool:
        return any(core.has_outcome for core in self.cores)

    @property
    def is_disabled(self) -> bool:
        return bool(self._desk.stats.disabled_by) or any(core.is_disabled for core in self.cores)

    @property
    def request_count(self) -> int:
        return self._onboarder.request_count + sum(core.request_count for core in self.cores)

    @property
    def lease_count(self) -> int:
        return self._onboarder.open_count

    @property
    def stock_count(self) -> int:
        return sum(core.stock_count for core in self.cores)

    def stats(self) -> ConnectorStats:
        """Of all groups; the time of hooks is counted once."""
        total = self._desk.stats.copy()
        for core in self.cores:
            total.add_planning(core.stats())
        return total

    def close(self) -> None:
        self._onboarder.close()
        for core in self.cores:
            core.close()

    def check_invariants(self) -> list[str]:
        return [one for core in self.cores for one in core.check_invariants()]

    # ------------------------------------------------------------------------------- details

    def _groups(self, specs: Sequence[NamespaceSpec]) -> list[Group]:
        return [
            Group(spec, self._client.open_namespace(spec), spec.block_tokens // self._hash_tokens)
            for spec in specs
        ]

    def _on_found(self, attempt: GroupedAttempt, answer: GroupedAnswer) -> None:
        """What is believed to be there and is not is offloaded again."""
        for core, absent, learned in zip(
            self.cores, answer.absent, attempt.learned_counts, strict=True
        ):
            if not core.spec.chained:
                core.note_absent(absent, learned)

    def _on_recall(self, namespace: Any, slot_count: int) -> None:
        for core in self.cores:
            core.on_recall(namespace, slot_count)

    def _disable(self, name: str, error: Exception) -> None:
        self._desk.stats.disabled_by = f"{type(error).__name__} in {name}"
        log.error("internal error: this engine goes on without kvtier", exc_info=error)


def _key(number: int, request_id: str, offer: int | None = None) -> Key:
    return f"{number}:{request_id}" if offer is None else f"{number}:{request_id}:{offer}"
