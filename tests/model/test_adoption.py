"""Daemons that are killed and adopt what is in memory, against the model of the block manager."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model.test_block_manager import BlockManagerMachine, paths, picks
from tests.support.adopting import hold_seconds, restart
from tests.support.machines import machine_settings
from tests.support.world import chain


class AdoptingMachine(BlockManagerMachine):
    """All that engines may do, and in between kill -9: no read under a lease of whatever life and
    no write of a process that is not quiet ever meets a slot of somebody else's."""

    @rule(unreadable=st.sampled_from([0, 0, 3, 7]))
    def kill_and_adopt(self, unreadable: int) -> None:
        restart(
            self.world,
            self.engines,
            lambda slot: unreadable > 0 and slot % unreadable == 0,
        )

    @rule(pick=picks, namespace=picks, path=paths)
    def run_short_under_an_older_lease(self, pick: int, namespace: int, path: str) -> None:
        """All slots are asked for while a lease of the life before may still be read under."""
        engine = self.engine(pick)
        mine = self.namespace_of(engine, namespace)
        engine.acquire(mine, chain(path), seconds=60.0)
        self.world.finish_turns()
        restart(self.world, self.engines)
        self.world.finish_turns()
        self.connect_all(pick)
        self.tick(5.0, None)
        engine.reserve(mine, 100)
        self.world.finish_turns()

    @rule()
    def outlive_the_holds(self) -> None:
        self.tick(hold_seconds(self.world), None)

    @rule(pick=picks)
    def connect_all(self, pick: int) -> None:
        engine = self.engine(pick)
        for process in engine.processes:
            engine.connect(process)
        self.read_all_mail(engine)


TestAdoption = AdoptingMachine.TestCase
TestAdoption.settings = machine_settings(examples=15, steps=40)
TestAdoption.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
