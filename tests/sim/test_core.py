"""The core under load and faults; `make sim SEED=n` replays one run."""

from __future__ import annotations

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.policy.arc import ArcPolicy
from kvtier.policy.curves import CurvesPolicy
from kvtier.policy.eviction import PolicyMaker
from kvtier.policy.lru import LruPolicy
from kvtier.types import Cut
from tests.sim.simulation import Hits, Simulation
from tests.support.forms import is_torture, sim_seeds
from tests.support.world import slots_of

SEEDS = range(2000) if is_torture() else range(10)


def simulate(seed: int) -> Hits:
    try:
        return Simulation(seed).run()
    except Exception as error:
        raise AssertionError(f"replay this with: make sim SEED={seed}") from error


@pytest.mark.slow
@pytest.mark.full_form
@pytest.mark.parametrize("seed", sim_seeds(SEEDS))
def test_right_bytes_or_a_miss_and_no_slot_lost(seed: int) -> None:
    simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("make_policy", [CurvesPolicy, ArcPolicy])
def test_other_policies_lose_no_slot_either(make_policy: PolicyMaker) -> None:
    Simulation(3, lambda config: BlockManager(config, make_policy=make_policy)).run()


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(1) == simulate(1) != simulate(2)


@pytest.mark.slow
def test_a_manager_that_never_hits_is_not_good_enough() -> None:
    class MissingManager(BlockManager):
        def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
            if isinstance(event, ev.Acquire):
                epoch = self.namespace_epoch(event.namespace)
                none = slots_of([])
                return [ins.LeaseGranted(None, 0, none, event.deadline, Cut.MISS, epoch, ())]
            return super().handle(event, now)

    def make(config: ManagerConfig) -> BlockManager:
        return MissingManager(config, make_policy=LruPolicy)

    with pytest.raises(AssertionError, match="misses"):
        Simulation(1, make).run()


@pytest.mark.slow
def test_a_manager_that_keeps_nothing_is_not_good_enough() -> None:
    class ForgettingManager(BlockManager):
        def handle(self, event: ev.Event, now: float) -> list[ins.Instruction]:
            if isinstance(event, ev.Commit):
                abort = ev.Abort(event.session, event.namespace, event.slots)
                done = super().handle(abort, now)
                return [*done[:-1], ins.Committed(bytes(len(event.hashes)), event.epoch)]
            return super().handle(event, now)

    def make(config: ManagerConfig) -> BlockManager:
        return ForgettingManager(config, make_policy=LruPolicy)

    with pytest.raises(AssertionError, match="hardly anything to hit"):
        Simulation(1, make).run()
