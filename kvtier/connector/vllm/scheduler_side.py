"""The half of the connector in vLLM's scheduler: its hooks, in the words of kvtier's planning.

Nothing here waits. vLLM frees a request's device blocks when it ends; `ReuseWatch` keeps copies
away from what is overwritten, so no request is ever held back for us.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.client import Client
from kvtier.connector.heads import Head
from kvtier.connector.jobs import FailReason, JobResult
from kvtier.connector.scheduler import SchedulerConnector
from kvtier.connector.sharding import Place, whole_namespace
from kvtier.connector.vllm.adapters import AdapterHashes, AdapterMarks
from kvtier.connector.vllm.exchange import Handshake, StepOrder, UnstartedLoad, WorkerReport
from kvtier.connector.vllm.facts import none_hash
from kvtier.connector.vllm.hints import HINTED_BLOCKS_MAX, Hint, hints_of, onboard_wish_of
from kvtier.connector.vllm.identity import engine_id_of, machine_id
from kvtier.connector.vllm.measuring import Meter
from kvtier.connector.vllm.metrics import KVTierStats
from kvtier.connector.vllm.options import CLIENT_SETTINGS, Options
from kvtier.connector.vllm.plain import tokens_of
from kvtier.connector.vllm.ranks import Reports, of_all_ranks, rank_count_of
from kvtier.connector.vllm.reuse import ReuseWatch
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.namespace import FACT_CHARS_MAX, NamespaceSpec
from kvtier.policy.load_or_recompute import OnboardWish
from kvtier.types import Role, TierName

log = logging.getLogger(__name__)

ALL_BLOCKS = 1 << 31
WEIGHTS_CHARS = FACT_CHARS_MAX - 32  # What a reset adds tells all versions apart.


@dataclass(slots=True, eq=False)
class Tracked:
    """What the adapter remembers of one request of vLLM's."""

    request: Any
    hashes: Sequence[bytes]  # vLLM's own list, which grows.
    may_onboard: bool
    may_offload: bool
    preemption_count: int = 0
    local_count: int = 0  # Blocks vLLM had itself when it last asked.
    device_blocks: list[int] = field(default_factory=list)
    has_run: bool = False  # Since it last had no blocks: what it counts as computed is there.
    full_count: int = 0  # Blocks told as computed.
    is_miss_noted: bool = False


class SchedulerSide:
    """Invariant: vLLM hears exactly once of every load it was promised, through a worker."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._vllm_config = vllm_config
        # More than the device blocks hold cannot be loaded at once.
        settings = options.settings
        room = min(settings.leased_blocks_max, max(1, int(kv_cache_config.num_blocks)))
        transfer = vllm_config.kv_transfer_config
        self._may_onboard, self._may_offload = transfer.is_kv_consumer, transfer.is_kv_producer
        self._rank_count = rank_count_of(vllm_config)
        self._settings = replace(
            settings,
            leased_blocks_max=room,
            may_offload=self._may_offload,
            worker_count=self._rank_count,
        )
        self._handshakes: dict[int, Handshake] = {}  # By rank.
        self._places: tuple[Place, ...] = ()
        self._reports = Reports(self._rank_count)
        self._is_plan_told = False  # Workers of several learn the namespace from the first one.
        self._options = options
        self._block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._client: Any = None
        self._core: SchedulerConnector | None = None
        self._spec: NamespaceSpec | None = None  # Of the weights that the engine started with.
        self._is_alone = False  # In a namespace that no other engine can have.
        self._is_seed_checked = False
        self._requests: dict[str, Tracked] = {}
        self._reuse = ReuseWatch()
        # The request that vLLM asked about last, and how many blocks it had itself.
        self._asked: tuple[str, int] = "", 0
        # Of requests that got blocks since the last step, none of them for a load of ours: the
        # first new one, and their tables.
        self._allotted: dict[str, tuple[int, Any]] = {}
        self._meter = Meter()
        self._adapters = AdapterMarks()
        # Of ended requests, until their blocks are stored: what they say, and of which chain.
        self._hints: dict[str, tuple[list[Hint], Sequence[bytes]]] = {}
        # Loads vLLM waits for, with their blocks: until a worker has reported them as received.
        self._loading: dict[str, tuple[int, ...]] = {}
        self._untold: dict[str, tuple[int, ...]] = {}  # Of these, not handed to a worker yet.
        self._failed_loads: set[str] = set()  # Of these, some rank has told blocks as bad.
        self._own_results: list[JobResult] = []  # Of jobs that no worker was told of.

    # ------------------------------------------------------------------------------- beginning

    def meet(self, handshakes: Mapping[Any, Any]) -> None:
        """The workers know the namespace, each its part; nothing is asked for before.

        Told by vLLM before the first step, or by the first report. Raises ConfigError.
        """
        told = [h for h in handshakes.values() if isinstance(h, Handshake)]
        self._handshakes |= {handshake.place.rank: handshake for handshake in told}
        if not told or self._core is not None or len(self._handshakes) < self._rank_count:
            return
        known = self._handshakes.values()
        if any(handshake.machine != machine_id() for handshake in known):
            raise Unsupported(
                "kvtier: the ranks of this engine are on several machines; run each engine on one,"
                " or without kvtier"
            )
        client = Client(
            self._options.socket,
            settings=CLIENT_SETTINGS,
            engine_id=engine_id_of(self._vllm_config),
            role=Role.SCHEDULER,
            name="vllm scheduler",
        )
        self._open(self._handshakes, client)

    def _open(self, handshakes: Mapping[int, Handshake], client: Client) -> None:
        known = handshakes.values()
        spec = whole_namespace({handshake.place: handshake.spec for handshake in known})
        core = SchedulerConnector(client, spec, settings=self._settings)
        self.begin(core, client, spec, tuple(handshake.place for handshake in known))

    def begin(
        self,
        core: SchedulerConnector,
        client: Any,
        spec: NamespaceSpec,
        places: tuple[Place, ...] = (Place(),),
    ) -> None:
        """Plan with these from now on; until then every request is a miss."""
        self._core, self._client, self._spec, self._places = core, client, spec, places

    def _check_seed(self, core: SchedulerConnector) -> None:
        """The hashes are made in this process; a worker's seed may be another one."""
        self._is_seed_checked = True
        assert self._spec is not None, "the core is made from it"
        seed = none_hash(self._spec.hash_algorithm).hex()
        if seed != self._spec.hash_seed:
            warn_of_seed()
            self._spec = replace(self._spec, hash_seed=seed)
            core.reset(self._spec)

    # ------------------------------------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        core = self._core
        if core is None:
            return
        if not self._is_seed_checked:
            self._check_seed(core)
        may_onboard, may_offload = self._wishes(request)
        hashes = request.block_hashes
        if getattr(request, "lora_request", None) is not None:
            mark = self._adapters.mark_of(request.lora_request)
            if mark is None:
                return
            hashes = AdapterHashes(hashes, mark)
        if may_onboard or may_offload:
            self._track(request, hashes, may_onboard, may_offload)

    def _track(
        self, request: Any, hashes: Sequence[bytes], may_onboard: bool, may_offload: bool
    ) -> None:
        assert self._core is not None, "nobody tracks before it is begun"
        self._requests[request.request_id] = Tracked(
            request, hashes, may_onboard, may_offload, request.num_preemptions
        )
        head, described = Head(hashes, len(hashes)), tokens_of(request, self._block_tokens)
        wish = onboard_wish_of(request)
        self._core.on_new_request(request.request_id, head, described, wish)

    def get_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own; always loaded between steps, never within one."""
        self._asked = request.request_id, local_tokens // self._block_tokens
        core, tracked = self._core, self._requests.get(request.request_id)
        if core is None or tracked is None or not tracked.may_onboard:
            return 0, False
        self._note_preemption(core, tracked)
        if request.skip_reading_prefix_cache:
            return 0, False
        tracked.local_count = local_tokens // self._block_tokens
        count = core.get_onboard_count(request.request_id, tracked.local_count)
        if count is None:
            return None, False
        tokens = (tracked.local_count + count) * self._block_tokens - local_tokens
        if count == 0 or tokens <= 0:
            self._note_miss(core, tracked)
            return 0, False
        return tokens, True

    def on_allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        core, tracked = self._core, self._requests.get(request.request_id)
        asked, self._asked = self._asked, ("", 0)
        if core is None:
            return
        if external_tokens <= 0 and asked[0] == request.request_id:
            self._allotted[request.request_id] = asked[1], blocks
        if tracked is None:
            return
        if external_tokens <= 0:
            core.on_allocated(request.request_id, (), 0)
            return
        # All from the first missing block on are new; it may be more than are loaded.
        first, count = tracked.local_count, -(-external_tokens // self._block_tokens)
        device_blocks = [int(block.block_id) for block in blocks.blocks[0][first:]]
        self._reuse.note_allocated(device_blocks)
        loaded = tuple(device_blocks[:count])
        self._loading[request.request_id] = self._untold[request.request_id] = loaded
        self._meter.note_allocated(request.request_id, external_tokens)
        core.on_allocated(request.request_id, loaded, len(loaded))

    def hit_sources(self, request: Any, external_tokens: int) -> dict[Any, int]:
        """Where the tokens just promised come from; called after `on_allocated`."""
        if self._core is None or external_tokens <= 0:
            return {}
        sources: dict[Any, int] = {}
        for tier, count in self._core.onboard_sources(request.request_id):
            name = self._source_of(tier)
            sources[name] = sources.get(name, 0) + count * self._block_tokens
        left = external_tokens - sum(sources.values())
        if left > 0:  # A load that could not be planned: vLLM will hear that it failed.
            name = self._source_of(None)
            sources[name] = sources.get(name, 0) + left
        return sources

    @staticmethod
    def _source_of(tier: TierName | None) -> Any:
        """vLLM's word for it."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        named = {
            TierName.NVME: CacheHitSource.DISK,
            TierName.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
        }
        return CacheHitSource.HOST if tier is None else named.get(tier, CacheHitSource.HOST)

    def on_finished_groups(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        self.on_finished(request, tables[0] if tables else ())

    def on_finished(self, request: Any, device_blocks: Sequence[int]) -> None:
        """`device_blocks` are vLLM's to give away from now on."""
        core = self._core
        tracked = self._requests.pop(request.request_id, None)
        if core is None or tracked is None:
            return
        self._note_preemption(core, tracked)
        # While it is being loaded, by us or by another connector beside us, its blocks count as
        # computed, but are not.
        if tracked.has_run:
            self._note_full(core, tracked, device_blocks)
        if hints := hints_of(request):
            count = min(request.num_computed_tokens // self._block_tokens, len(tracked.hashes))
            chain = tracked.hashes[: min(count, HINTED_BLOCKS_MAX)]
            self._hints[request.request_id] = hints, chain
        is_held = core.request_finished(request.request_id)
        if not is_held:
            self._tell_hints(core, request.request_id)
        else:
            # The last block is seldom full: nobody reads it, and vLLM gives it away first.
            blocks = device_blocks or tracked.device_blocks
            read_count = min(tracked.full_count, len(blocks))
            self._reuse.park(request.request_id, Head(blocks, read_count))

    # ------------------------------------------------------------------------------- steps

    def build_order(self, output: Any) -> StepOrder:
        core = self._core
        if core is None:
            return StepOrder(None)
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._requests.get(request_id)) is not None:
                self._note_preemption(core, tracked)
        self._note_device_blocks(output)
        if (token_seconds := self._meter.token_seconds) is not None:
            core.note_prefill(token_seconds)
        if self._reuse.is_parked_block_allocated():
            core.on_device_blocks_short(ALL_BLOCKS)
        started = _started_in(output)
        for request_id in output.num_scheduled_tokens:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            tracked.has_run = True
            if request_id not in started:
                self._note_full(core, tracked, tracked.device_blocks)
        plan = core.build_plan()
        if core.has_outcome:  # Some versions tell of a step's end only what workers report.
            self._take_outcome(core, ())
        good, fenced = self._reuse.begin_step(plan.offloads)
        if len(good) < len(plan.offloads):
            kept = {job.job_id for job in good}
            for job_id in {job.job_id for job in plan.offloads} - kept:
                self._drop(job_id, FailReason.WITHDRAWN)
            plan = replace(plan, offloads=tuple(good))
        for job in plan.onboards:
            self._untold.pop(job.request_id, None)
        unstarted = tuple(UnstartedLoad(*item) for item in self._untold.items())
        self._untold.clear()
        token_count = output.total_num_scheduled_tokens
        self._meter.note_step(plan, token_count)
        self._is_plan_told = True
        return StepOrder(plan, fenced, unstarted, token_count)

    def on_output(self, output: Any) -> None:
        core, report = self._core, output.kv_connector_worker_meta
        if core is None:
            if isinstance(report, WorkerReport):
                self.meet(dict(enumerate(report.handshakes)))
            return
        results, self._own_results = self._own_results, []
        if isinstance(report, WorkerReport):
            results = results + report.results
        bad_blocks = output.invalid_block_ids or ()
        if bad_blocks:  # A rank tells them at once; as received vLLM counts what all have told.
            self._failed_loads |= {
                request_id
                for request_id, loaded in self._loading.items()
                if not set(loaded).isdisjoint(bad_blocks)
            }
        self._failed_loads |= set(getattr(output, "failed_recving", None) or ())
        for request_id in output.finished_recving or ():
            loaded = self._loading.pop(request_id, ())
            is_good = request_id not in self._failed_loads
            self._failed_loads.discard(request_id)
            self._meter.note_received(request_id, is_good=is_good)
            if loaded and is_good and (tracked := self._requests.get(request_id)) is not None:
                tracked.is_miss_noted = True  # Whatever becomes of it, it got something.
        ended = self._reports.take_ended(results)
        self._meter.note_output(ended)
        self._reuse.note_results(ended)
        if bad_blocks:  # Another connector's: in the step that loaded them they counted as good.
            core.on_blocks_invalid(bad_blocks)
        self._take_outcome(core, results)

    def _drop(self, job_id: int, reason: FailReason) -> None:
        """No rank is told of the job."""
        self._own_results += of_all_ranks(job_id, reason, self._places)

    def _take_outcome(self, core: SchedulerConnector, results: Sequence[JobResult]) -> None:
        for request_id in core.on_results(results).released:
            self._reuse.unpark(request_id)
            self._tell_hints(core, request_id)

    def _tell_hints(self, core: SchedulerConnector, request_id: str) -> None:
        """After the commits of what they are about, which are asked for by now."""
        hints, chain = self._hints.pop(request_id, ((), ()))
        for hint in hints if chain else ():
            core.hint(chain, **hint)

    @property
    def has_work(self) -> bool:
        """Whether an idle engine should go on stepping, so that copies and commits end."""
        if self._core is None:
            return False
        is_untold = self._rank_count > 1 and not self._is_plan_told
        return self._core.has_work or bool(self._own_results) or is_untold

    def take_stats(self) -> KVTierStats | None:
        return None if self._core is None else self._meter.take(self._core.stats())

    def reset(self) -> bool:
        """vLLM dropped its KV, for new weights perhaps: nobody must use the old KV for them."""
        core, spec = self._core, self._spec
        if core is not None and spec is not None:
            weights = f"{spec.weights[:WEIGHTS_CHARS]} reset {secrets.token_hex(8)}"
            own = replace(spec, weights=weights)
            if self._is_alone:
                core.clear(own)
            else:
                core.reset(own)
            self._is_alone = True
            self._adapters.clear()
        return True

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------------------------- details

    def _wishes(self, request: Any) -> tuple[bool, bool]:
        """What may be done for it: by role, by the request's own word, by what is understood."""
        if getattr(request, "resumable", False):
            return False, False  # Its tokens may be taken back when its input goes on.
        may_onboard, may_offload = self._may_onboard, self._may_offload
        params = request.kv_transfer_params  # Whatever a user wrote.
        wish = params.get("kvtier") if isinstance(params, dict) else None
        if wish is False:
            return False, False
        onboard = onboard_wish_of(request) or self._settings.onboard
        may_onboard = may_onboard and onboard is not OnboardWish.NEVER
        if isinstance(wish, dict):
            may_offload = may_offload and wish.get("offload") is not False
        return may_onboard, may_offload

    def _note_miss(self, core: SchedulerConnector, tracked: Tracked) -> None:
        """Once a request, if there was anything to ask for."""
        if tracked.is_miss_noted or len(tracked.hashes) <= tracked.local_count:
            return
        tracked.is_miss_noted = True
        is_connected = self._client is not None and self._client.connected
        self._meter.note_miss(core.stats(), is_connected=is_connected)

    def _note_preemption(self, core: SchedulerConnector, tracked: Tracked) -> None:
        """It lost its blocks, and starts again at token 0; noticed whoever sees it first."""
        if tracked.preemption_count == tracked.request.num_preemptions:
            return
        tracked.preemption_count = tracked.request.num_preemptions
        tracked.device_blocks = []
        tracked.has_run = False
        tracked.full_count = 0
        core.on_preempted(tracked.request.request_id)

    def _note_device_blocks(self, output: Any) -> None:
        """Follow every request's block table, and which of its blocks are new in this step."""
        for new in output.scheduled_new_reqs:
            self._set_table(new.req_id, new.block_ids[0], new.num_computed_tokens)
        old = output.scheduled_cached_reqs
        for request_id, added, computed in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        ):
            if not added:
                continue
            if request_id in old.resumed_req_ids:
                self._set_table(request_id, added[0], computed)
                continue
            self._reuse.note_allocated(added[0])
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.device_blocks += added[0]
        for first, blocks in self._allotted.values():  # Another connector loads them meanwhile.
            self._reuse.note_allocated(int(block.block_id) for block in blocks.blocks[0][first:])
        self._allotted.clear()

    def _set_table(self, request_id: str, device_blocks: list[int], computed_tokens: int) -> None:
        # Those before hold KV already, computed for others or loaded by us; what another connector
        # loads within this step counts as computed as well.
        first = -(-computed_tokens // self._block_tokens)
        own_count, _ = self._allotted.pop(request_id, (first, None))
        self._reuse.note_allocated(device_blocks[min(first, own_count) :])
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.device_blocks = list(device_blocks)
            tracked.full_count = 0

    def _note_full(
        self, core: SchedulerConnector, tracked: Tracked, device_blocks: Sequence[int]
    ) -> None:
        """Tell of blocks that earlier steps have filled.

        Steps run in order, so when a worker gets this step's order all that is counted in
        `num_computed_tokens` is computed, unless this step is the request's first: vLLM lets it
        build on blocks that other requests fill in the same step. A hash stands for tokens that
        were really sampled; a block of guesses has none.
        """
        if not tracked.may_offload:
            return
        computed_count = tracked.request.num_computed_tokens // self._block_tokens
        count = min(computed_count, len(tracked.hashes), len(device_blocks))
        if count > tracked.full_count:
            tracked.full_count = count
            hashes, filled = Head(tracked.hashes, count), Head(device_blocks, count)
            core.on_blocks_full(tracked.request.request_id, hashes, filled)


def warn_of_seed() -> None:
    log.warning(
        "kvtier: this engine's block hashes have a seed of their own, so nothing is kept"
        " for other engines or the next start; set PYTHONHASHSEED to the same number for"
        " all, or use --prefix-caching-hash-algo sha256"
    )


def _started_in(output: Any) -> set[str]:
    """Requests that had no blocks before this step."""
    return {new.req_id for new in output.scheduled_new_reqs} | set(
        output.scheduled_cached_reqs.resumed_req_ids
    )
