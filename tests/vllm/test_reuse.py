"""Device blocks that are overwritten while a copy reads them, or is yet to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.connector_rig import content_of
from tests.vllm.runner_v2 import RunnerV2Rig
from tests.vllm.scheduler_rig import BLOCK_TOKENS, JUNK, SchedulerRig, prompt_of, with_settings

pytestmark = pytest.mark.vllm


class OtherLoads:
    """A connector before ours that has the prompt of request "b", as MultiConnector shows it us.

    It loads within the step or between steps; the rig's device blocks hold its bytes then.
    """

    def __init__(self, rig: SchedulerRig, *, is_async: bool) -> None:
        self._rig, self._ours, self._is_async = rig, rig.side, is_async
        self._written: list[int] = []
        rig.connector.get_num_new_matched_tokens = self.matched
        rig.connector.update_state_after_alloc = self.allocated
        self._forward, rig._forward = rig._forward, self.forward  # type: ignore[method-assign]

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        ours = self._ours.get_matched_tokens(request, local_tokens)
        return (96, self._is_async) if request.request_id == "b" else ours

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        if request.request_id == "b":
            self._written += [
                block.block_id for block in blocks.blocks[0][: tokens // BLOCK_TOKENS]
            ]
            tokens = 0
        self._ours.on_allocated(request, blocks, tokens)

    def forward(self, output: Any) -> None:
        hashes = self._rig.scheduler.requests["b"].block_hashes if self._written else ()
        for device_block, block_hash in zip(self._written, hashes, strict=False):
            self._rig.copier.blocks[device_block] = content_of(bytes(block_hash))
        self._written = []
        self._forward(output)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wish", [None, False])
def test_blocks_that_another_connector_loads_into_are_not_read_any_more(
    tiny_llama: Path, is_async: bool, wish: bool | None
) -> None:
    """vLLM counts them as computed, and shows them to nobody but at their allocation."""
    rig = SchedulerRig(tiny_llama, device_block_count=10)
    OtherLoads(rig, is_async=is_async)
    rig.add("a", prompt_of(96), tokens=1)
    while rig.scheduler.requests:
        rig.step(copies=False)
    rig.step(copies=False)
    rig.lane.step(2)  # The first four blocks; the last two are still being read.
    assert len(rig.lane.copies) == 1
    rig.add("b", prompt_of(100, seed=7), tokens=1, **({} if wish is None else {"kvtier": wish}))
    for _ in range(6):
        rig.step()
    if is_async:
        rig.abort("b")
        rig.worker._received.add("b")
        rig.step()
    assert rig.core.stats().dropped_blocks == {"withdrawn": 2}
    rig.run()
    rig.check_nothing_left()


def lingering(rig: SchedulerRig, tokens: int) -> list[int]:
    """Request "a" ends with nothing planned; the slots that the daemon did not give."""
    free, rig.client.free = rig.client.free, []
    rig.add("a", prompt_of(tokens), tokens=1)
    while rig.scheduler.requests:
        rig.step()
    assert rig.core.lingering_count == 1
    return free


def slots_come(rig: SchedulerRig, free: list[int]) -> None:
    rig.client.free = free
    rig.clock.advance(0.06)
    for _ in range(10):
        rig.step()


def test_block_that_was_not_full_may_go_while_the_others_are_still_to_be_offloaded(
    tiny_llama: Path,
) -> None:
    """vLLM gives away first what nobody can use again."""
    rig = SchedulerRig(tiny_llama, settings=with_settings(finish_wait_seconds=5.0))
    free = lingering(rig, 100)
    rig.add("b", prompt_of(20, seed=3), tokens=1, kvtier=False)
    while rig.scheduler.requests:
        rig.step()
    slots_come(rig, free)
    assert rig.core.stats().committed_blocks == 6
    rig.check_nothing_left()


def test_blocks_of_an_ended_request_are_watched_when_another_one_of_its_id_ends(
    tiny_llama: Path,
) -> None:
    settings = with_settings(finish_wait_seconds=5.0)
    rig = SchedulerRig(tiny_llama, settings=settings, device_block_count=20)
    free = lingering(rig, 96)
    rig.add("a", prompt_of(32, seed=3), tokens=1)
    while rig.scheduler.requests:
        rig.step()
    assert rig.core.lingering_count == 1
    rig.add("over both", prompt_of(250, seed=5), tokens=1, kvtier=False)
    while rig.scheduler.requests:
        rig.step()
    slots_come(rig, free)
    assert rig.core.stats().dropped_blocks["blocks_short"] == 6
    rig.check_nothing_left()


class OtherFails:
    """A connector before ours that loads request "b" within its first step, and wrongly; it says so
    with that step's output, when the next step is under way."""

    def __init__(self, rig: RunnerV2Rig) -> None:
        self._rig, self._ours = rig, rig.side
        self._loaded: list[int] = []
        self._failed: set[int] = set()
        rig.connector.get_num_new_matched_tokens = self.matched
        rig.connector.update_state_after_alloc = self.allocated
        rig.worker_half.get_block_ids_with_load_errors = self.failed
        # One step builds on wrong KV before vLLM hears of it; its output is thrown away.
        rig._check_block = lambda *_: None  # type: ignore[method-assign]

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        ours = self._ours.get_matched_tokens(request, local_tokens)
        return (96, False) if request.request_id == "b" and not self._loaded else ours

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        if request.request_id == "b" and tokens:
            self._loaded = [block.block_id for block in blocks.blocks[0][: tokens // BLOCK_TOKENS]]
            self._failed = set(self._loaded)
            self._rig.copier.blocks[self._loaded] = JUNK
        self._ours.on_allocated(request, blocks, 0)

    def failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def test_what_was_computed_on_another_connectors_failed_load_is_not_offloaded(
    tiny_llama: Path,
) -> None:
    rig = RunnerV2Rig(tiny_llama)
    OtherFails(rig)
    rig.add("warm", prompt_of(20, seed=1), tokens=1)
    rig.run()
    rig.add("b", prompt_of(100, seed=7), tokens=20)
    rig.run()
    assert rig.core.stats().dropped_blocks == {"invalid": 6}
    rig.check_nothing_left()
