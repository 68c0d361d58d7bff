"""As test_machine.py, for models of one to three KV cache groups; and some of it by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forms import rounds
from tests.vllm.grouped_rig import GroupedRig, full, local, window
from tests.vllm.scheduler_rig import prompt_of, transfer_config
from tests.vllm.test_machine import Story

pytestmark = [pytest.mark.vllm, pytest.mark.full_form]

FORMS = (
    lambda: [window(40), full()],
    lambda: [full(), window(33), window(100)],
    lambda: [window(50)],
    lambda: [window(40), full(32)],
    lambda: [local(64), full()],
    lambda: [full(), full(eagle=True)],
)


class GroupedStory(Story):
    def make_rig(self, model: Path, **options: Any) -> GroupedRig:
        options["device_block_count"] += 20  # Each group takes blocks of its own.
        return GroupedRig(model, groups=self.random.choice(FORMS)(), **options)


@pytest.mark.parametrize("seed", range(rounds(short=10, full=600)))
def test_no_wrong_kv_and_nothing_left_behind(tiny_llama: Path, seed: int) -> None:
    GroupedStory(tiny_llama, seed).run()


def test_window_loads_its_last_blocks_alone(tiny_llama: Path) -> None:
    rig = GroupedRig(tiny_llama, groups=[window(40), full()])
    rig.add("a", prompt_of(200))
    rig.run()
    rig.restart()
    rig.add("b", prompt_of(200))
    rig.run()
    assert rig.core.stats().onboarded_blocks == 12 + 3
    rig.check_nothing_left()


def test_hit_ends_where_the_window_was_evicted(tiny_llama: Path) -> None:
    rig = GroupedRig(tiny_llama, groups=[window(40), full()])
    request = rig.add("a", prompt_of(200))
    rig.run()
    namespace = rig.core._onboarder.groups[0].namespace
    rig.client.evict(namespace, request.block_hashes[10])
    rig.restart()
    rig.add("b", prompt_of(200))
    rig.run()
    assert rig.core.stats().onboarded_blocks == 10 + 3
    rig.check_nothing_left()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_is_told_by_request_and_not_tried_again(tiny_llama: Path, policy: str) -> None:
    rig = GroupedRig(tiny_llama, transfer=transfer_config(policy=policy))
    rig.add("a", prompt_of(200))
    rig.run()
    rig.restart()
    rig.copier.failures = 1
    rig.add("b", prompt_of(200))
    rig.run()
    stats = rig.core.stats()
    assert (stats.onboarded_blocks, stats.onboard_failed_blocks) == (0, 15)
    assert rig.finished == ["a", "b"]
    rig.check_nothing_left()


def test_blocks_on_nvme_are_waited_for_in_all_groups(tiny_llama: Path) -> None:
    rig = GroupedRig(tiny_llama)
    request = rig.add("a", prompt_of(200))
    rig.run()
    for namespace in rig.client.namespaces.values():
        for name in request.block_hashes:
            rig.client.demote(namespace, name)
    rig.restart()
    rig.add("b", prompt_of(200))
    rig.run()
    assert rig.core.stats().onboarded_blocks == 12 + 3
    assert rig.core.stats().waiting_acquires > 0
    rig.check_nothing_left()
