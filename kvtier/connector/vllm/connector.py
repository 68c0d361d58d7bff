"""The class that vLLM loads: every hook, handed to the side this object is.

vLLM makes one object in its scheduler's process and one in every worker. The interface has grown
from version to version (0.28 to 0.33) and never changed, so newer hooks are simply there: an older
vLLM does not call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvtier.connector.vllm.exchange import Handshake, StepOrder, WorkerReport
from kvtier.connector.vllm.grouped_side import GroupedSide
from kvtier.connector.vllm.grouped_worker import GroupedWorkerSide
from kvtier.connector.vllm.groups import is_grouped
from kvtier.connector.vllm.metrics import KVTierPromMetrics, KVTierStats
from kvtier.connector.vllm.options import parse_options
from kvtier.connector.vllm.refusals import check_supported, warn_of_failing_loads
from kvtier.connector.vllm.scheduler_side import SchedulerSide
from kvtier.connector.vllm.worker_side import WorkerSide


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Reuses KV from the node's kvtier daemon, and leaves what it computes there."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        grouped = is_grouped(kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            warn_of_failing_loads(vllm_config.kv_transfer_config)
            scheduler_side = GroupedSide if grouped else SchedulerSide
            self._scheduler = scheduler_side(vllm_config, kv_cache_config, options)
        else:
            worker_side = GroupedWorkerSide if grouped else WorkerSide
            self._worker = worker_side(vllm_config, kv_cache_config, options)

    # ------------------------------------------------------------------------------- what we are

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is lost on the way is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """KV memory that is given up and taken again is not followed yet."""
        return False

    # ------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        assert self._worker is not None
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert self._worker is not None
        if isinstance(kv_connector_metadata, StepOrder):
            self._worker.fence(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start at once, beside the forward pass; what it writes none of these copies touches."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        if isinstance(connector_metadata, StepOrder):
            self._worker.start(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.start_behind()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self._worker is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        assert self._worker is not None
        return self._worker.take_report()

    # ------------------------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        assert self._scheduler is not None
        self._scheduler.meet(metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        assert self._scheduler is not None
        self._scheduler.meet(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self._scheduler, GroupedSide):
            self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        assert self._scheduler is not None
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrder:
        assert self._scheduler is not None
        return self._scheduler.build_order(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.on_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.on_finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.on_finished_groups(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_work

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        return self._scheduler.reset()

    # ------------------------------------------------------------------------------- metrics

    def get_kv_connector_stats(self) -> KVTierStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------------------- both

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
