"""Which shard each of vLLM's ranks holds, and under which id an engine is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.jobs import FailReason, JobResult
from kvtier.connector.sharding import Place
from kvtier.connector.vllm.exchange import Handshake
from kvtier.connector.vllm.identity import engine_id_of
from kvtier.connector.vllm.ranks import Reports, place_of
from kvtier.connector.vllm.unsupported import Unsupported
from tests.support.connector_rig import spec_of
from tests.vllm.scheduler_rig import SchedulerRig

pytestmark = pytest.mark.vllm


class FullAttentionSpec:
    def __init__(self, heads: int) -> None:
        self.num_kv_heads = heads


class MLAAttentionSpec(FullAttentionSpec):
    pass


def places(
    *specs: Any, heads: int, ranks: int, stages: int = 1, text: dict[str, Any] | None = None
) -> list[Place]:
    """Of all ranks of an engine."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: heads,
            hf_text_config=SimpleNamespace(
                to_dict=lambda: {"num_key_value_heads": heads} | (text or {})
            ),
        ),
    )
    by_layer = {f"layer {index}": spec for index, spec in enumerate(specs)}
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs=by_layer))
    caches = SimpleNamespace(kv_cache_groups=[group])
    return [place_of(config, caches, s, r) for s in range(stages) for r in range(ranks)]


def shards(found: list[Place]) -> list[int]:
    return [place.shard for place in found]


def test_every_rank_with_heads_of_its_own_holds_a_shard() -> None:
    found = places(FullAttentionSpec(2), heads=8, ranks=4)
    assert shards(found) == [0, 1, 2, 3]
    assert {place.replica_count for place in found} == {1}


def test_stages_have_shards_of_their_own_in_the_order_of_ranks() -> None:
    found = places(FullAttentionSpec(4), heads=8, ranks=2, stages=3)
    assert shards(found) == [0, 1, 2, 3, 4, 5]
    assert [place.rank for place in found] == [0, 1, 2, 3, 4, 5]
    assert len({place.part for place in found}) == 6


def test_latent_is_one_shard_for_all_ranks_of_a_stage() -> None:
    found = places(MLAAttentionSpec(1), MLAAttentionSpec(1), heads=1, ranks=4, stages=2)
    assert shards(found) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.replica for place in found] == [0, 1, 2, 3] * 2


def test_ranks_with_the_same_head_hold_one_shard_as_vllm_gives_heads_out() -> None:
    found = places(FullAttentionSpec(1), heads=2, ranks=8)
    assert shards(found) == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "found",
    [
        # Layers with other numbers of heads: a head of some is not a head of all.
        places(FullAttentionSpec(1), heads=2, ranks=8, text={"num_global_key_value_heads": 8}),
        places(FullAttentionSpec(1), heads=2, ranks=8, text={"num_kv_heads_by_layer": [2, 4]}),
        places(FullAttentionSpec(1), FullAttentionSpec(2), heads=2, ranks=8),
        places(FullAttentionSpec(1), MLAAttentionSpec(1), heads=3, ranks=8),
    ],
)
def test_where_it_is_not_certain_every_rank_stores_its_own(found: list[Place]) -> None:
    assert shards(found) == list(range(8))


def test_data_parallel_engines_are_engines_of_their_own_in_one_namespace() -> None:
    """Nothing of the rank among them is in a namespace: see `facts.py`."""
    configs = [
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="e"),
            instance_id="i",
            parallel_config=SimpleNamespace(data_parallel_rank=rank),
        )
        for rank in range(2)
    ]
    assert engine_id_of(configs[0]) != engine_id_of(configs[1])


def test_job_ends_when_its_last_rank_has_told_of_it_and_fails_when_any_has() -> None:
    reports = Reports(2)
    good, bad = JobResult(1, 0, None), JobResult(1, 1, FailReason.COPY)
    assert reports.take_ended([bad, JobResult(2, 0, None)]) == []
    assert reports.take_ended([good]) == [bad]
    assert reports.take_ended([JobResult(2, 1, None)]) == [JobResult(2, 1, None)]


def test_rank_that_tells_twice_does_not_stand_for_the_other() -> None:
    reports, told = Reports(2), JobResult(1, 0, None)
    assert reports.take_ended([told, told]) == []
    assert reports.take_ended([JobResult(1, 1, None)]) != []


def two_ranks(tiny_llama: Any) -> Any:
    side = SchedulerRig(tiny_llama).side
    side._rank_count, side._core = 2, None
    return side


def test_nothing_is_planned_before_all_ranks_are_met(tiny_llama: Any) -> None:
    side = two_ranks(tiny_llama)
    side.meet({0: Handshake(spec_of(), Place(0, 2, 0), "here")})
    assert side._core is None


def test_ranks_on_two_machines_are_refused(tiny_llama: Any) -> None:
    side = two_ranks(tiny_llama)
    side.meet({0: Handshake(spec_of(), Place(0, 2, 0), "here")})
    with pytest.raises(Unsupported, match="several machines"):
        side.meet({1: Handshake(spec_of(), Place(1, 2, 1), "there")})
