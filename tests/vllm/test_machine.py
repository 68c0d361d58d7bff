"""vLLM's real Scheduler and our connector under anything that may happen, in any order.

The rig asserts at every step that each block built on holds the KV its hash stands for, and that
each block in the daemon does; at the end nothing may be left of any request, on either side. A
failing run is replayed by its seed: `-k "test_… and [17]"`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forms import rounds
from tests.vllm.scheduler_rig import SchedulerRig, prompt_of, transfer_config, with_settings

pytestmark = [pytest.mark.vllm, pytest.mark.full_form]

ACTIONS_PER_RUN = 400


class Story:
    """One engine's life, drawn from a seed."""

    def __init__(self, model: Path, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.rig = self.make_rig(
            model,
            device_block_count=pick((10, 14, 24, 64)),
            slot_count=pick((12, 40, 200)),
            transfer=transfer_config(policy=pick(("recompute", "recompute", "fail"))),
            scheduling={"max_num_batched_tokens": pick((24, 64, 256))},
            settings=with_settings(stock_blocks=8, failed_seconds=0.01, offload_slice_blocks=2),
        )
        self.added = 0
        self.resets = 0
        self.is_slow = pick((True, False))  # Copies and answers come late, mostly.

    def make_rig(self, model: Path, **options: Any) -> SchedulerRig:
        return SchedulerRig(model, **options)

    def run(self) -> None:
        """Each action as often as its number says, of their sum."""
        actions: dict[Callable[[], None], int] = {
            self.add: 20,
            self.step: 60,
            self.copy_a_slice: 10,
            self.abort: 5,
            self.fail_a_copy: 2,
            self.lose_the_daemon: 1,
            self.evict: 4,
            self.wait: 1,
            self.reset: 1,
        }
        names, weights = list(actions), list(actions.values())
        for action in self.random.choices(names, weights, k=ACTIONS_PER_RUN):
            action()
        self.rig.copier.failures = 0
        self.rig.run(limit=5000)
        self.rig.client.quiet()
        self.rig.check_nothing_left()

    def add(self) -> None:
        pick = self.random.choice
        if len(self.rig.scheduler.requests) > 12:
            return
        self.added += 1
        wish = pick((None, None, None, None, False, {"onboard": False}, {"offload": False}))
        wishes = {} if wish is None else {"kvtier": wish}
        length = self.random.randint(1, min(120, 16 * (self.rig.device_block_count - 5)))
        prompt = prompt_of(length, seed=self.random.randint(0, 4), shared=pick((0, 16, 50, 96)))
        self.rig.add(f"r{self.added}", prompt, tokens=self.random.randint(1, 40), **wishes)

    def step(self) -> None:
        chance = 0.2 if self.is_slow else 0.8
        self.rig.step(
            answers=self.random.random() < max(chance, 0.5),
            copies=self.random.random() < chance,
            early=self.random.random() < chance / 2,
        )

    def copy_a_slice(self) -> None:
        self.rig.lane.step(1)

    def abort(self) -> None:
        live = [r.request_id for r in self.rig.scheduler.requests.values() if not r.is_finished()]
        if live:
            self.rig.abort(self.random.choice(live))

    def fail_a_copy(self) -> None:
        self.rig.copier.failures += 1

    def lose_the_daemon(self) -> None:
        self.rig.client.disconnect()
        for _ in range(self.random.randint(0, 3)):
            self.rig.step()
        self.rig.lane.step()  # Or the worker would not say that it is quiet.
        self.rig.client.reconnect(restarted=self.random.random() < 0.5)
        self.rig.client.quiet()

    def evict(self) -> None:
        leave = self.random.choice((self.rig.client.demote, self.rig.client.evict))
        for namespace in self.rig.client.namespaces.values():
            if namespace.resident:
                leave(namespace, self.random.choice(sorted(namespace.resident)))

    def wait(self) -> None:
        self.rig.clock.advance(self.random.choice((0.02, 0.2, 3.0, 40.0)))
        self.rig.client.expire()

    def reset(self) -> None:
        """New weights: vLLM refuses it while loads are under way, or wait for room once loaded."""
        scheduler = self.rig.scheduler
        requests = scheduler.requests.values()
        waiting = [r for r in requests if r not in scheduler.running]
        if any(any(scheduler.kv_cache_manager.get_block_ids(r.request_id)) for r in waiting):
            return
        # Aborted while they were loaded: their blocks come back when that has ended.
        if any(r.is_finished() for r in requests):
            return
        self.resets += 1
        self.rig.weights = f"v1 and {self.resets}"
        assert self.rig.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )


@pytest.mark.parametrize("seed", range(rounds(short=16, full=1000)))
def test_no_wrong_kv_and_nothing_left_behind(tiny_llama: Path, seed: int) -> None:
    Story(tiny_llama, seed).run()
