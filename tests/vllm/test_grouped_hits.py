"""What kvtier has for a hybrid model is as long as vLLM itself would find it.

The reference is vLLM's own coordinator on its own block pool, filled with what the daemon holds at
that moment; nothing of ours stands between the two.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvtier.connector.grouped_call import Hit
from tests.support.forms import rounds
from tests.vllm.grouped_rig import GroupedRig, full, local, window
from tests.vllm.scheduler_rig import prompt_of, with_settings

pytestmark = [pytest.mark.vllm, pytest.mark.full_form]

FORMS: dict[str, Any] = {
    "window and full": lambda: [window(40), full()],
    "full and two windows": lambda: [full(), window(33), window(100)],
    "window alone": lambda: [window(50)],
    "large full blocks": lambda: [window(40), full(32)],
    "large window blocks": lambda: [window(60, 32), full(16)],
    "chunks and full": lambda: [local(64), full()],
    "drafter with full attention": lambda: [window(40), full(), full(eagle=True)],
    "drafter with a window": lambda: [full(), window(40, eagle=True)],
}


def reference_hit(rig: GroupedRig, hashes: Sequence[bytes], token_limit: int) -> Hit:
    """By vLLM alone, of what the fake daemon holds."""
    pool_of = get_kv_cache_coordinator(
        kv_cache_config=replace(rig.kv_caches, num_blocks=2 * rig.slot_count),
        max_model_len=512,
        max_in_flight_tokens=512,
        use_eagle=any(group.is_eagle_group for group in rig.groups),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=rig.scheduler.block_size,
        hash_block_size=rig.hash_tokens,
    )
    pool = pool_of.block_pool
    for number, group in enumerate(rig.core._onboarder.groups):
        held = group.namespace
        for name in [*held.resident, *held.nvme]:
            [block] = pool.get_new_blocks(1)
            key = make_block_hash_with_group_id(name, number)
            pool.cached_block_hash_to_block.insert(key, block)
    blocks, tokens, *_ = pool_of.find_longest_cache_hit(list(hashes), token_limit)
    wanted = tuple(
        tuple(index for index, block in enumerate(group) if not block.is_null) for group in blocks
    )
    return Hit(tokens, wanted)


class Watched:
    """Our finder, compared at every question; counts hits."""

    def __init__(self, rig: GroupedRig) -> None:
        self._rig, self._finder = rig, rig.side.finder
        self.hits: list[int] = []

    def find(
        self, hashes: Sequence[bytes], present: Sequence[Collection[bytes]], token_limit: int
    ) -> Hit:
        found = self._finder.find(hashes, present, token_limit)
        wanted = reference_hit(self._rig, hashes, token_limit)
        assert found == wanted, f"vLLM would find {wanted}, we found {found}"
        self.hits.append(found.token_count)
        return found


class Schedule:
    """One random run: requests come and go, blocks are evicted, the engine forgets its own."""

    def __init__(self, model: Path, seed: int, groups: Any) -> None:
        self.random = random.Random(seed)
        # Room in the daemon, and time: what is not found is not there.
        self.rig = GroupedRig(
            model,
            groups=groups(),
            device_block_count=self.random.choice((40, 64, 120)),
            slot_count=1000,
            scheduling={"max_num_batched_tokens": self.random.choice((32, 64, 256))},
            settings=with_settings(
                stock_blocks=300, onboard_wait_seconds=100.0, nvme_wait_seconds_max=200.0
            ),
        )
        self.watched = Watched(self.rig)
        self.rig.core._onboarder._finder = self.watched
        self.onboarded = self.added = 0

    def run(self) -> None:
        for _ in range(3):
            for _ in range(self.random.randint(1, 4)):
                self.add()
            for _ in range(self.random.randint(1, 30)):
                self.rig.step()
            self.evict()
            self.rig.run()
            self.rig.scheduler.reset_prefix_cache()
        self.ask_once_more()
        self.rig.check_nothing_left()

    def add(self) -> Any:
        self.added += 1
        shared = self.random.choice((0, 32, 64, 128))
        length = self.random.randint(20, 200)
        prompt = prompt_of(length, seed=self.random.randint(0, 2), shared=shared)
        return self.rig.add(f"r{self.added}", prompt, tokens=self.random.randint(1, 24))

    def evict(self) -> None:
        leave = (self.rig.client.evict, self.rig.client.demote)
        for namespace in self.rig.client.namespaces.values():
            for _ in range(self.random.choice((0, 1, 4))):
                if namespace.resident:
                    name = self.random.choice(sorted(namespace.resident))
                    self.random.choice(leave)(namespace, name)

    def ask_once_more(self) -> None:
        """A request alone, with nothing in the engine: it gets all that vLLM would find."""
        request = self.add()
        wanted = reference_hit(self.rig, request.block_hashes, request.num_tokens - 1)
        before = self.rig.core.stats().onboarded_blocks
        self.rig.run()
        loaded = self.rig.core.stats().onboarded_blocks - before
        assert loaded == sum(len(group) for group in wanted.wanted), self.rig.core.stats()
        self.onboarded += loaded


@pytest.mark.parametrize("name", FORMS)
def test_hits_are_those_of_vllms_own_search_on_a_cache_of_the_same_contents(
    tiny_llama: Path, name: str
) -> None:
    hits = onboarded = 0
    for seed in range(rounds(short=4, full=150)):
        schedule = Schedule(tiny_llama, seed, FORMS[name])
        schedule.run()
        hits += sum(found > 0 for found in schedule.watched.hits)
        onboarded += schedule.onboarded
    assert hits > 4
    assert onboarded > 0
