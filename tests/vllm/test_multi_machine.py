"""Anything in any order, as in test_machine, beside another connector in a MultiConnector."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.connector_rig import content_of
from tests.support.forms import rounds
from tests.vllm.scheduler_rig import BLOCK_TOKENS, JUNK, SchedulerRig
from tests.vllm.test_machine import Story

pytestmark = [pytest.mark.vllm, pytest.mark.full_form]


@dataclass
class Load:
    """The other connector's, under way."""

    request: Any
    first: int
    device_blocks: list[int]
    is_async: bool


class OtherRig(SchedulerRig):
    """The other connector comes first and has some blocks of some prompts.

    It loads within a step or between steps; some of the latter fail.
    """

    def begin(self) -> None:
        super().begin()
        self.random = random.Random(self.device_block_count)
        self.loads: list[Load] = []
        self._offers: dict[str, tuple[int, int, bool]] = {}  # First block, count, is_async.
        self.connector.get_num_new_matched_tokens = self.matched
        self.connector.update_state_after_alloc = self.allocated
        self._take_received, self.worker.take_received = self.worker.take_received, self.received

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        self._offers.pop(request.request_id, None)
        first, is_async = local_tokens // BLOCK_TOKENS, self.random.random() < 0.5
        # What is loaded within a step leaves a token to compute.
        count = (request.num_tokens - (not is_async)) // BLOCK_TOKENS - first
        offered = self.random.choice((0, 0, 0, 1, 100))
        ours, is_ours_async = self.side.get_matched_tokens(request, local_tokens)
        if ours is None:
            return None, False
        if (count := min(count, offered)) > 0:
            self._offers[request.request_id] = first, count, is_async
            return count * BLOCK_TOKENS, is_async
        return ours, is_ours_async

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        offer = self._offers.pop(request.request_id, None)
        if offer is not None:
            assert tokens == offer[1] * BLOCK_TOKENS
            first, count, is_async = offer
            table = [block.block_id for block in blocks.blocks[0]]
            self.loads.append(Load(request, first, table[first : first + count], is_async))
            tokens = 0
        self.side.on_allocated(request, blocks, tokens)

    def received(self) -> set[str]:
        received = self._take_received()
        for load in [load for load in self.loads if self.random.random() < 0.3]:
            self.loads.remove(load)
            received.add(load.request.request_id)
            if self.random.random() < 0.3:
                self.worker._bad_blocks.update(load.device_blocks)
                self.copier.blocks[load.device_blocks] = JUNK
            else:
                self._write(load)
        return set(received)

    def _forward(self, output: Any) -> None:
        for load in self.loads:
            if load.is_async:
                self.copier.blocks[load.device_blocks] = JUNK  # Half of it, so to say.
            else:
                self._write(load)
        self.loads = [load for load in self.loads if load.is_async]
        super()._forward(output)

    def _write(self, load: Load) -> None:
        for index, device_block in enumerate(load.device_blocks, load.first):
            content = content_of(self._hash_of(load.request, index), weights=self.weights)
            self.copier.blocks[device_block] = content


class OtherStory(Story):
    def make_rig(self, model: Path, **options: Any) -> SchedulerRig:
        return OtherRig(model, **options)


@pytest.mark.parametrize("seed", range(rounds(short=10, full=500)))
def test_no_wrong_kv_beside_another_connector(tiny_llama: Path, seed: int) -> None:
    OtherStory(tiny_llama, seed).run()
