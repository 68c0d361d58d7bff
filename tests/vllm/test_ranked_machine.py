"""The random stories of `test_machine.py` with two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forms import rounds
from tests.vllm.ranked_rig import RankedRig
from tests.vllm.scheduler_rig import SchedulerRig
from tests.vllm.test_machine import Story

pytestmark = [pytest.mark.vllm, pytest.mark.full_form]


class RankedStory(Story):
    """Either rank may be late, or fail."""

    rig: RankedRig

    def make_rig(self, model: Path, **options: Any) -> SchedulerRig:
        return RankedRig(model, **options)

    def copy_a_slice(self) -> None:
        self.random.choice(self.rig.lanes).step(1)

    def fail_a_copy(self) -> None:
        self.random.choice(self.rig.copiers).failures += 1

    def lose_the_daemon(self) -> None:
        self.rig.client.disconnect()
        for _ in range(self.random.randint(0, 3)):
            self.rig.step()
        self.end_copies()
        self.rig.client.reconnect(restarted=self.random.random() < 0.5)
        self.rig.client.quiet()

    def end_copies(self) -> None:
        for lane in self.rig.lanes:
            lane.step()


@pytest.mark.parametrize("seed", range(rounds(short=20, full=500)))
def test_no_wrong_kv_and_nothing_left_behind_on_two_ranks(tiny_llama: Path, seed: int) -> None:
    RankedStory(tiny_llama, seed).run()
