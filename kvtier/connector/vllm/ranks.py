"""Which shard of a block a rank of vLLM holds, and which ranks hold the same one.

Pipeline stages have layers of their own, in the order of the stages; within one, each share of the
KV heads is a shard. A model's latent (MLA) is the same on all ranks of a stage, and with fewer KV
heads than ranks vLLM gives consecutive ranks the same head. Where it is not certain that ranks
hold the same, each stores its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.connector.jobs import FailReason, JobResult
from kvtier.connector.sharding import Place
from kvtier.connector.vllm.unsupported import layer_specs


def rank_count_of(vllm_config: Any) -> int:
    """Workers of one engine; other data-parallel ranks are engines of their own."""
    parallel = vllm_config.parallel_config
    return int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size)


def place_of_this_rank(vllm_config: Any, kv_cache_config: Any) -> Place:
    """Called in a worker whose groups exist."""
    if rank_count_of(vllm_config) == 1:
        return Place()
    from vllm.distributed import get_pp_group, get_tp_group

    stage, rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    return place_of(vllm_config, kv_cache_config, stage, rank)


def place_of(vllm_config: Any, kv_cache_config: Any, stage: int, rank_in_stage: int) -> Place:
    parallel = vllm_config.parallel_config
    stages, ranks = int(parallel.pipeline_parallel_size), int(parallel.tensor_parallel_size)
    specs = layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    shares = _share_count(vllm_config.model_config, specs, ranks)
    share, replica = divmod(rank_in_stage, ranks // shares)
    return Place(
        rank=stage * ranks + rank_in_stage,
        rank_count=stages * ranks,
        shard=stage * shares + share,
        replica=replica,
        replica_count=ranks // shares,
        part=f"stage {stage} of {stages}, heads {share} of {shares}",
    )


def _share_count(model: Any, specs: Sequence[Any], ranks: int) -> int:
    """Into how many different parts the ranks of a stage divide its KV."""
    if all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs):
        return 1
    heads = _head_count(model)
    is_one_each = all(getattr(spec, "num_kv_heads", 0) == 1 for spec in specs)
    if heads is not None and is_one_each and heads < ranks and ranks % heads == 0:
        return heads
    return ranks


def _head_count(model: Any) -> int | None:
    """KV heads of the whole model; None where layers may differ in them."""
    total = int(model.get_total_num_kv_heads())
    text = model.hf_text_config.to_dict()
    told = [v for k, v in text.items() if "kv_heads" in k or "key_value_heads" in k]
    return total if told and all(count == total for count in told) else None


class Reports:
    """What the ranks tell of each job, until all have told it."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._told: dict[int, set[tuple[int, int]]] = {}  # By job: who has told.
        self._failed: dict[int, JobResult] = {}

    def take_ended(self, results: Sequence[JobResult]) -> list[JobResult]:
        """The jobs that no rank works at any more, one result each: a failure if there is one."""
        ended = []
        for result in results:
            job_id = result.job_id
            if result.failed is not None:
                self._failed.setdefault(job_id, result)
            told = self._told.setdefault(job_id, set())
            told.add(result.worker)  # Twice is once: it would stand for a rank that still copies.
            if len(told) >= self._rank_count:
                del self._told[job_id]
                ended.append(self._failed.pop(job_id, result))
        return ended


def of_all_ranks(job_id: int, failed: FailReason, places: Sequence[Place]) -> list[JobResult]:
    """Of a job that no rank was told of."""
    return [JobResult(job_id, place.shard, failed, replica=place.replica) for place in places]
