"""Daemons that are killed and adopt what is in memory while pools below it are read, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier.core import lower_tier
from tests.model.test_tiered_manager import TieredManagerMachine, chosen_by
from tests.support.adopting import hold_seconds, restart
from tests.support.machines import machine_settings


class TieredAdoptingMachine(TieredManagerMachine):
    """All that may happen with tiers below memory, and in between kill -9."""

    @rule(
        kept=st.integers(0, 2**16 - 1),
        unreadable=st.sampled_from([0, 0, 3]),
        pools_first=st.booleans(),
        is_table_written=st.booleans(),
    )
    def kill_and_adopt(
        self, kept: int, unreadable: int, pools_first: bool, is_table_written: bool
    ) -> None:
        if is_table_written:
            for disk in self.disks.values():
                disk.write_table()
                disk.sync()
        is_open = set(self.world.lower)
        for shell in self.world.lower.values():
            shell.cut_power(chosen_by(kept))
        self.world.lower.clear()
        for tier, disk in self.disks.items():
            if tier not in is_open:
                disk.cut_power(chosen_by(kept))
            disk.readable = True
        restart(
            self.world,
            self.engines,
            lambda slot: unreadable > 0 and slot % unreadable == 0,
            before=self.open_pools if pools_first else lambda: None,
        )
        if not pools_first:
            self.open_pools()
        for engine in self.engines:
            for process in engine.processes:
                engine.connect(process)
            self.read_all_mail(engine)

    @rule()
    def outlive_the_holds(self) -> None:
        self.tick(hold_seconds(self.world), None)


@pytest.fixture(scope="class", autouse=True)
def small_slices() -> Iterator[None]:
    """So that what is worked off in slices is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_tier, "RECOVERED_SLICE_BLOCKS", 2)
        yield


TestAdoptionTiers = TieredAdoptingMachine.TestCase
TestAdoptionTiers.settings = machine_settings(examples=8, steps=40, shrinks=False)
TestAdoptionTiers.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
