"""vLLM's real Scheduler with the connector's scheduler side; no model runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.types import TierName
from tests.vllm.scheduler_rig import BLOCK_TOKENS, SchedulerRig, prompt_of
from tests.vllm.versions import HAS_HIT_SOURCES

pytestmark = pytest.mark.vllm


def test_restarted_engine_loads_the_full_blocks_and_computes_the_rest(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    rig.add("a", prompt_of(100))
    rig.run()
    rig.check_nothing_left()
    rig.restart()
    rig.add("b", prompt_of(100))
    computed = 0
    while rig.scheduler.has_requests():
        computed += rig.step().total_num_scheduled_tokens
    assert rig.core.stats().onboarded_blocks == 6
    assert computed == 100 - 96 + 3
    rig.check_nothing_left()


def test_workers_hear_how_many_tokens_a_step_computes(tiny_llama: Path) -> None:
    """By it they compare steps with copies and without, and hold offloads back."""
    rig = SchedulerRig(tiny_llama)
    rig.add("a", prompt_of(100), tokens=3)
    counts = []
    while rig.scheduler.has_requests():
        output = rig.step()
        assert output.kv_connector_metadata.token_count == output.total_num_scheduled_tokens
        counts.append(output.total_num_scheduled_tokens)
    assert sum(counts) == 100 + 2


def stored(rig: SchedulerRig, prompt: list[int]) -> None:
    """Have the prompt's blocks in kvtier, and nothing in the engine."""
    rig.add("stored", prompt)
    rig.run()
    rig.restart()


def computed_by(rig: SchedulerRig) -> int:
    """Tokens the model sees until all is done."""
    count = 0
    while rig.scheduler.has_requests():
        count += rig.step().total_num_scheduled_tokens
    rig.check_nothing_left()
    return count


def test_prompt_that_is_stored_whole_computes_one_token(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(96))
    rig.add("again", prompt_of(96), tokens=1)
    assert computed_by(rig) == 1


def test_what_was_generated_is_stored_as_well(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    first = rig.add("first", prompt_of(40), tokens=30)
    rig.run()
    conversation = list(first.all_token_ids)
    rig.restart()
    rig.add("second", [*conversation, 5, 6, 7], tokens=1)
    # 70 tokens: the last one has no KV, and 64 are four full blocks.
    assert computed_by(rig) == len(conversation) + 3 - 64


def test_nothing_is_offloaded_twice(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    for name in ("a", "b", "c"):
        rig.add(name, prompt_of(100, seed=ord(name), shared=64))
    rig.run()
    hashes = [c.block_hash for c in rig.client.commits]
    assert len(hashes) == len(set(hashes)) == 4 + 3 * 2
    rig.check_nothing_left()


def test_long_prompt_in_parts_is_stored_whole(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama, scheduling={"max_num_batched_tokens": 24})
    stored(rig, prompt_of(170))
    rig.add("again", prompt_of(170), tokens=1)
    assert computed_by(rig) == 10


def test_own_cache_comes_first(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(160))
    rig.add("own", prompt_of(70, shared=64), tokens=1, kvtier=False)
    rig.run()
    rig.add("again", prompt_of(160), tokens=1)
    rig.run()
    assert rig.core.stats().onboarded_blocks == 10 - 4
    rig.check_nothing_left()


@pytest.mark.parametrize(
    ("wish", "offloaded", "onboarded"),
    [
        (False, 0, 0),
        ({"onboard": False}, 2, 0),
        ({"offload": False}, 0, 4),
        ({}, 2, 4),
        ({"onboard": "never"}, 2, 0),
        ({"onboard": "always"}, 2, 4),
    ],
)
def test_request_says_what_may_be_done_for_it(
    tiny_llama: Path, wish: object, offloaded: int, onboarded: int
) -> None:
    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(64))
    before = len(rig.client.commits)
    rig.add("again", prompt_of(100, seed=1, shared=64), tokens=1, kvtier=wish)
    rig.run()
    assert len(rig.client.commits) - before == offloaded
    assert rig.core.stats().onboarded_blocks == onboarded
    rig.check_nothing_left()


@pytest.mark.parametrize("params", ["yes", ["kvtier"], 1])
def test_params_of_another_form_than_ours_do_no_harm(tiny_llama: Path, params: object) -> None:
    """A server's user may write anything there."""
    rig = SchedulerRig(tiny_llama)
    request = rig.add("a", prompt_of(100), tokens=1, kvtier=False)
    request.kv_transfer_params = params
    rig.side.on_new_request(request)
    rig.run()
    assert rig.core.stats().committed_blocks == 6
    rig.check_nothing_left()


@pytest.mark.parametrize(("role", "onboarded"), [("kv_consumer", 6), ("kv_producer", 0)])
def test_role_allows_one_direction_alone(tiny_llama: Path, role: str, onboarded: int) -> None:
    from tests.vllm.scheduler_rig import transfer_config

    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(100))
    before = len(rig.client.commits)
    rig.transfer = rig.config.kv_transfer_config = transfer_config(role)
    rig.restart()
    rig.add("again", prompt_of(100), tokens=1)
    rig.add("new", prompt_of(100, seed=5), tokens=1)
    rig.run()
    assert rig.core.stats().onboarded_blocks == onboarded
    assert len(rig.client.commits) - before == (0 if role == "kv_consumer" else 6)
    assert (rig.core.stock_count == 0) == (role == "kv_consumer")  # Nor kept from others.
    rig.check_nothing_left()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_is_computed_or_ends_its_request_as_vllm_is_told(
    tiny_llama: Path, policy: str
) -> None:
    from tests.vllm.scheduler_rig import transfer_config

    rig = SchedulerRig(tiny_llama, transfer=transfer_config(policy=policy))
    stored(rig, prompt_of(100))
    rig.copier.failures = 1
    request = rig.add("again", prompt_of(100), tokens=2)
    rig.run()
    assert request.status.name == (
        "FINISHED_ERROR" if policy == "fail" else "FINISHED_LENGTH_CAPPED"
    )
    rig.check_nothing_left()
    # A load that failed is not tried again at once, or vLLM would go round for ever.
    assert rig.core.stats().onboard_failed_blocks == 6


def test_load_that_no_worker_was_told_of_fails_at_once(tiny_llama: Path) -> None:
    """Between the promise and the order the daemon goes."""
    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(100))
    request = rig.add("again", prompt_of(100), tokens=2)
    rig.step()
    plan = rig.core.build_plan
    rig.core.build_plan = lambda: (rig.client.disconnect(), plan())[1]  # type: ignore[method-assign]
    rig.step()
    rig.core.build_plan = plan  # type: ignore[method-assign]
    rig.run()
    assert request.status.name == "FINISHED_LENGTH_CAPPED"
    assert rig.core.stats().onboarded_blocks == 0
    assert any(order.unstarted for order in rig.orders)


def test_abort_while_a_load_runs_frees_its_blocks_when_it_ends(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama)
    stored(rig, prompt_of(100))
    rig.add("again", prompt_of(100))
    while not rig.lane.copies:
        rig.step(copies=False)
    rig.abort("again")
    for _ in range(3):
        rig.step(copies=False)
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < rig.device_block_count - 1, "given away while written to"
    rig.run()
    rig.check_nothing_left()


def test_blocks_overwritten_before_their_copy_are_not_offloaded(tiny_llama: Path) -> None:
    """Few device blocks, and copies that never get to run: every block is given away at once."""
    rig = SchedulerRig(tiny_llama, device_block_count=8)
    for number in range(6):
        rig.add(f"r{number}", prompt_of(90, seed=number), tokens=2)
    for _ in range(200):
        rig.step(copies=False)
    rig.run()
    assert rig.core.stats().dropped_blocks["withdrawn"] > 0
    rig.check_nothing_left()
    rig.restart()
    for number in range(6):
        rig.add(f"again{number}", prompt_of(90, seed=number), tokens=2)
    rig.run()  # Checks what it builds on.
    rig.check_nothing_left()


def test_reset_succeeds_right_after_a_request_and_opens_another_namespace(
    tiny_llama: Path,
) -> None:
    rig = SchedulerRig(tiny_llama)
    rig.add("old", prompt_of(100))
    while not rig.finished:
        rig.step(copies=False)
    rig.weights = "v2"
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    rig.add("new", prompt_of(100))
    rig.run()  # Checks that nothing of v1 is built on.
    assert rig.core.stats().onboarded_blocks == 0
    rig.check_nothing_left()
    assert rig.core.spec.weights.startswith("v1 reset ")


def test_preempted_request_comes_back_with_what_it_had_offloaded(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama, device_block_count=14)
    requests = [rig.add(f"r{n}", prompt_of(60, seed=n), tokens=80) for n in range(3)]
    rig.run()
    assert sum(r.num_preemptions for r in requests) > 0
    assert 0 < rig.core.stats().onboarded_blocks <= rig.core.stats().asked_blocks
    rig.check_nothing_left()


def test_thousand_waiting_requests_pin_less_than_half_the_pool(tiny_llama: Path) -> None:
    rig = SchedulerRig(tiny_llama, slot_count=128, scheduling={"max_num_seqs": 2})
    for number in range(10):
        rig.add(f"store{number}", prompt_of(160, seed=number), tokens=1)
    rig.run()
    rig.restart()
    for number in range(1000):
        rig.add(f"r{number}", prompt_of(160, seed=number % 10), tokens=1)
    pinned = 0
    for _ in range(60):
        rig.step(copies=False)
        pinned = max(pinned, len({s for slots in rig.client.leases.values() for s in slots}))
    assert 0 < pinned <= rig.slot_count // 2
    rig.run(limit=5000)
    rig.check_nothing_left()
    # Nobody's turn was so long in coming that it computed what was there.
    assert rig.core.stats().deadline_missed_requests == 0


@pytest.mark.skipif(not HAS_HIT_SOURCES, reason="vLLM asks for sources since 0.32")
def test_every_tier_has_its_source_in_vllms_words(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    rig = SchedulerRig(tiny_llama)
    rig.step()
    runs = ((TierName.DRAM, 1), (TierName.CXL, 1), (TierName.NVME, 2), (TierName.REMOTE, 3))
    monkeypatch.setattr(rig.core, "onboard_sources", lambda request_id: runs)
    found = rig.side.hit_sources(SimpleNamespace(request_id="r"), 8 * BLOCK_TOKENS)
    blocks = {source: tokens // BLOCK_TOKENS for source, tokens in found.items()}
    assert blocks == {
        CacheHitSource.HOST: 3,  # One that could not be planned among them.
        CacheHitSource.DISK: 2,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 3,
    }
