"""The scheduler's half for models of several KV cache groups; see docs/decisions/0015.

As `SchedulerSide`, with these differences: how long a hit is comes from vLLM's own search over what
the daemon has; blocks are told of in the step that fills them, because vLLM gives up what lies
before a window as soon as the next step is scheduled, and copied behind that step's forward pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.client import Client
from kvtier.connector.grouped import GroupedConnector
from kvtier.connector.heads import Head
from kvtier.connector.jobs import FailReason, OffloadJob, StepPlan
from kvtier.connector.vllm.exchange import Handshake, StepOrder, UnstartedLoad
from kvtier.connector.vllm.facts import none_hash
from kvtier.connector.vllm.groups import OwnHits, group_forms, hash_tokens_of
from kvtier.connector.vllm.hints import HINTED_BLOCKS_MAX, hints_of
from kvtier.connector.vllm.options import Options
from kvtier.connector.vllm.plain import tokens_of
from kvtier.connector.vllm.scheduler_side import (
    ALL_BLOCKS,
    WEIGHTS_CHARS,
    SchedulerSide,
    Tracked,
    warn_of_seed,
)
from kvtier.namespace import NamespaceSpec


@dataclass(slots=True, eq=False)
class GroupedTracked(Tracked):
    """By group: how many blocks were told as full; of chains their hashes and device blocks."""

    full_counts: list[int] = field(default_factory=list)
    names: list[list[bytes]] = field(default_factory=list)
    filled: list[list[int]] = field(default_factory=list)

    def forget_blocks(self, group_count: int) -> None:
        self.has_run = False
        self.full_counts = [0] * group_count
        self.names = [[] for _ in range(group_count)]
        self.filled = [[] for _ in range(group_count)]


class GroupedSide(SchedulerSide):
    """Invariant as its parent's."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        super().__init__(vllm_config, kv_cache_config, options)
        self._forms = group_forms(kv_cache_config)
        self._hash_tokens = hash_tokens_of(kv_cache_config)
        self._manager: Any = None
        self._grouped: GroupedConnector | None = None

    # ------------------------------------------------------------------------------- beginning

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    @property
    def finder(self) -> OwnHits:
        assert self._manager is not None, "vLLM binds its manager when the scheduler is made"
        return OwnHits(self._manager.coordinator, self._hash_tokens)

    def _open(self, handshakes: Mapping[int, Handshake], client: Client) -> None:
        specs = handshakes[0].groups
        core = GroupedConnector(
            client, specs, self.finder, hash_tokens=self._hash_tokens, settings=self._settings
        )
        self.begin_grouped(core, client)

    def begin_grouped(self, core: GroupedConnector, client: Any) -> None:
        """Plan with these from now on."""
        self._grouped = core
        # Its calls that the parent makes are those of a SchedulerConnector.
        alike: Any = core
        self._core, self._client = alike, client
        self._spec = core.specs[0]

    def _check_seed(self, core: Any) -> None:
        self._is_seed_checked = True
        specs: Sequence[NamespaceSpec] = core.specs
        seed = none_hash(specs[0].hash_algorithm).hex()
        if seed != specs[0].hash_seed:
            warn_of_seed()
            core.reset([replace(spec, hash_seed=seed) for spec in specs])
            self._spec = core.specs[0]

    # ------------------------------------------------------------------------------- requests

    def _track(
        self, request: Any, hashes: Sequence[bytes], may_onboard: bool, may_offload: bool
    ) -> None:
        core = self._grouped
        assert core is not None, "nobody tracks before it is begun"
        tracked = GroupedTracked(request, hashes, may_onboard, may_offload, request.num_preemptions)
        tracked.forget_blocks(len(self._forms))
        self._requests[request.request_id] = tracked
        described = [tokens_of(request, form.block_tokens) for form in self._forms]
        limit = request.num_tokens - 1
        core.on_new_request(request.request_id, hashes, limit, described)

    def get_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        self._asked = request.request_id, local_tokens
        core, tracked = self._grouped, self._requests.get(request.request_id)
        if core is None or tracked is None or not tracked.may_onboard:
            return 0, False
        self._note_preemption(self._alike, tracked)
        if request.skip_reading_prefix_cache:
            return 0, False
        tracked.local_count = local_tokens // self._hash_tokens
        # The last token is computed in any case, and its window must then be there.
        limit = request.num_tokens - 1
        tokens = core.get_onboard_tokens(request.request_id, local_tokens, limit)
        if tokens is None:
            return None, False
        if tokens <= 0:
            self._note_miss(self._alike, tracked)
            return 0, False
        return tokens, True

    def on_allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        core, tracked = self._grouped, self._requests.get(request.request_id)
        asked, self._asked = self._asked, ("", 0)
        if core is None:
            return
        tables = [_device_blocks(table) for table in blocks.blocks]
        local_tokens = asked[1] if asked[0] == request.request_id else None
        if local_tokens is not None:
            self._note_written(tables, local_tokens)
        if tracked is None:
            return
        if external_tokens <= 0 or local_tokens is None:
            core.on_allocated(request.request_id, 0, 0, ())
            return
        loaded = [block for table in tables for block in table if block >= 0]
        self._loading[request.request_id] = self._untold[request.request_id] = tuple(loaded)
        self._meter.note_allocated(request.request_id, external_tokens)
        core.on_allocated(request.request_id, local_tokens, external_tokens, tables)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[Any, int]:
        """All from where most of it comes: groups may differ."""
        if self._grouped is None or external_tokens <= 0:
            return {}
        sources = self._grouped.sources(request.request_id)
        tier = max(sources, key=lambda one: one[1])[0] if sources else None
        return {self._source_of(tier): external_tokens}

    def on_finished_groups(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """`tables` are vLLM's to give away from now on."""
        core = self._grouped
        tracked = self._requests.pop(request.request_id, None)
        if core is None or not isinstance(tracked, GroupedTracked):
            return
        self._note_preemption(self._alike, tracked)
        if tracked.has_run and len(tables) == len(self._forms):  # None where it ended by an error.
            tables = [[block or -1 for block in table] for table in tables]
            self._tell_full(core, tracked, request.num_computed_tokens, tables)
        held = core.request_finished(request.request_id)
        for number, key in held.items():
            self._reuse.park(key, Head(tracked.filled[number], len(tracked.filled[number])))
        if hints := hints_of(request):
            chain = tracked.hashes[: min(len(tracked.hashes), HINTED_BLOCKS_MAX)]
            key = next(iter(held.values()), request.request_id)
            self._hints[key] = hints, chain
            if not held:
                self._tell_hints(self._alike, key)

    # ------------------------------------------------------------------------------- steps

    def build_order(self, output: Any) -> StepOrder:
        core = self._grouped
        if core is None:
            return StepOrder(None)
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._requests.get(request_id)) is not None:
                self._note_preemption(self._alike, tracked)
        self._note_device_blocks(output)
        if (token_seconds := self._meter.token_seconds) is not None:
            core.note_prefill(token_seconds)
        if self._reuse.is_parked_block_allocated():
            core.on_device_blocks_short(ALL_BLOCKS)
        # What was left of earlier steps: of its device blocks some may be written by this step.
        earlier = core.build_plans()
        good, fenced = self._reuse.begin_step([job for plan in earlier for job in plan.offloads])
        self._drop_others(earlier, good)
        for request_id, count in output.num_scheduled_tokens.items():
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.has_run = True
                self._tell_full(core, tracked, tracked.request.num_computed_tokens + count, None)
        # What this step fills, and reads nobody else's.
        fresh = core.build_plans()
        self._reuse.note_read([job for plan in fresh for job in plan.offloads])
        if core.has_outcome:
            self._take_outcome(self._alike, ())
        plans = _merged(earlier, fresh, kept={job.job_id for job in good})
        for plan in plans:
            for job in plan.onboards:
                self._untold.pop(job.request_id, None)
        unstarted = tuple(UnstartedLoad(*item) for item in self._untold.items())
        self._untold.clear()
        tokens = int(output.total_num_scheduled_tokens)
        self._note_step(plans, tokens)
        return StepOrder(None, fenced, unstarted, tokens, plans)

    def reset(self) -> bool:
        core = self._grouped
        if core is not None:
            mark = secrets.token_hex(8)
            core.reset(
                [
                    replace(spec, weights=f"{spec.weights[:WEIGHTS_CHARS]} reset {mark}")
                    for spec in core.specs
                ]
            )
            self._adapters.clear()
        return True

    # ------------------------------------------------------------------------------- details

    @property
    def _alike(self) -> Any:
        """For what the parent does with either kind of planning."""
        return self._grouped

    def _note_preemption(self, core: Any, tracked: Tracked) -> None:
        if tracked.preemption_count == tracked.request.num_preemptions:
            return
        tracked.preemption_count = tracked.request.num_preemptions
        assert isinstance(tracked, GroupedTracked), "made by _track"
        tracked.forget_blocks(len(self._forms))
        core.on_preempted(tracked.request.request_id)

    def _note_device_blocks(self, output: Any) -> None:
        """Which device blocks this step writes that others may have used before."""
        for new in output.scheduled_new_reqs:
            self._note_written(new.block_ids, new.num_computed_tokens)
        old = output.scheduled_cached_reqs
        for request_id, added, computed in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        ):
            if added:
                is_whole = request_id in old.resumed_req_ids
                self._note_written(added, computed if is_whole else 0)

    def _note_written(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> None:
        for form, table in zip(self._forms, tables, strict=True):
            first = computed_tokens // form.block_tokens
            self._reuse.note_allocated(block for block in table[first:] if block > 0)

    def _tell_full(
        self,
        core: GroupedConnector,
        tracked: Tracked,
        computed_tokens: int,
        tables: Sequence[Sequence[int]] | None,
    ) -> None:
        """Tell of blocks whose tokens are all known and, when this step has ended, computed.

        `tables`: of an ended request; else they are vLLM's own, where null blocks are -1.
        """
        if not tracked.may_offload:
            return
        assert isinstance(tracked, GroupedTracked), "made by _track"
        request_id, coordinator = tracked.request.request_id, self._manager.coordinator
        for form in self._forms:
            number, size = form.number, form.block_tokens
            factor = size // self._hash_tokens
            tokens = coordinator.get_num_cacheable_tokens(computed_tokens, number)
            first = tracked.full_counts[number]
            count = min(tokens // size, len(tracked.hashes) // factor)
            if count <= first:
                continue
            if tables is None:
                manager = coordinator.single_type_managers[number]
                table = _device_blocks(manager.req_to_blocks[request_id][first:count])
            else:
                table = list(tables[number][first:count])
            count = first + len(table)
            names = [bytes(tracked.hashes[(i + 1) * factor - 1]) for i in range(first, count)]
            tracked.full_counts[number] = count
            self._tell(core, tracked, form.number, names, table)

    def _tell(
        self,
        core: GroupedConnector,
        tracked: GroupedTracked,
        number: int,
        names: list[bytes],
        blocks: list[int],
    ) -> None:
        request_id = tracked.request.request_id
        if self._forms[number].chained:
            tracked.names[number] += names
            tracked.filled[number] += blocks
            told, filled = tracked.names[number], tracked.filled[number]
            core.on_chain_full(request_id, number, Head(told, len(told)), Head(filled, len(filled)))
            return
        kept = [(name, block) for name, block in zip(names, blocks, strict=True) if block >= 0]
        if kept:
            device_blocks = [block for _, block in kept]
            key = core.on_blocks_offered(request_id, number, [n for n, _ in kept], device_blocks)
            if key is not None:
                self._reuse.park(key, device_blocks)

    def _drop_others(self, plans: Sequence[StepPlan], good: Sequence[OffloadJob]) -> None:
        kept = {job.job_id for job in good}
        for plan in plans:
            for job in plan.offloads:
                if job.job_id not in kept:
                    self._drop(job.job_id, FailReason.WITHDRAWN)

    def _note_step(self, plans: Sequence[StepPlan], token_count: int) -> None:
        if plans:
            offloads = tuple(job for plan in plans for job in plan.offloads)
            self._meter.note_step(StepPlan(plans[0].spec, (), offloads), token_count)


def _device_blocks(table: Sequence[Any]) -> list[int]:
    return [-1 if block.is_null else int(block.block_id) for block in table]


def _merged(
    earlier: Sequence[StepPlan], fresh: Sequence[StepPlan], kept: set[int]
) -> tuple[StepPlan, ...]:
    return tuple(
        StepPlan(
            after.spec,
            before.onboards + after.onboards,
            tuple(job for job in before.offloads if job.job_id in kept) + after.offloads,
        )
        for before, after in zip(earlier, fresh, strict=True)
    )
