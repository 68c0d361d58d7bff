"""The keeper of the NVMe tier, over disks in memory and a core that writes down what it hears."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.pools import nvme_table
from kvtier.pools.nvme import NvmePool
from kvtier.server import nvme
from kvtier.server.nvme import NvmeKeeper
from kvtier.types import NamespaceId
from tests.support.crashing_file import Fault, FaultyDriver
from tests.support.nvme_pools import hash_of, make_drivers
from tests.support.nvme_rig import EPOCH, SECONDS_MAX, SEGMENT_COUNT, Rig, next_life, run, slots

DONE, CORRUPT = ev.TransferOutcome.DONE, ev.TransferOutcome.CORRUPT
FAILED, REFUSED = ev.TransferOutcome.FAILED, ev.TransferOutcome.REFUSED


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    faults: dict[int, Fault] = {}
    return Rig(tmp_path, [FaultyDriver(driver, faults) for driver in make_drivers()], faults)


def test_block_goes_down_and_comes_up_in_another_slot(rig: Rig) -> None:
    async def test() -> None:
        rig.bind()
        demoted = await rig.demote(["a", "b"], [None, hash_of("a")])
        assert demoted.outcomes.tolist() == [DONE, DONE]
        assert demoted.checksums.tolist() == rig.dram.checksums(slots(0, 1)).tolist()
        rig.instruct(ins.Promote(NamespaceId(1), slots(1, 0), slots(40, 41)))
        [promoted] = await rig.heard(ev.Promoted)
        assert promoted.outcomes.tolist() == [DONE, DONE]
        assert promoted.checksums.tolist() == demoted.checksums[::-1].tolist()
        assert rig.holds(40, "b")
        assert rig.holds(41, "a")
        samples = rig.metrics.samples()
        assert samples['kvtier_nvme_written_bytes_total{content="blocks"}'] == 8192
        assert samples["kvtier_nvme_read_bytes_total"] == 8192
        done = 'kvtier_transferred_blocks_total{{direction="{}",outcome="done"}}'
        assert samples[done.format("demote")] == samples[done.format("promote")] == 2

    run(rig, test)


def test_core_is_told_of_a_batch_in_a_later_turn_even_if_the_disk_is_done_at_once(
    rig: Rig,
) -> None:
    """The manager must not be called while its instructions are run."""

    async def test() -> None:
        rig.bind()
        rig.fill(0, "a")
        rig.instruct(ins.Demote(NamespaceId(1), slots(0), slots(0)))
        assert rig.manager.of(ev.Demoted) == []
        await rig.heard(ev.Demoted)

    run(rig, test)


def test_slot_scribbled_over_after_its_checksum_is_corrupt_and_not_written(rig: Rig) -> None:
    async def test() -> None:
        rig.bind()
        rig.fill(0, "a")
        rig.dram.views(0)[0][7] ^= 1
        rig.instruct(ins.Demote(NamespaceId(1), slots(0), slots(0)))
        [demoted] = await rig.heard(ev.Demoted)
        assert demoted.outcomes.tolist() == [CORRUPT]
        assert rig.metrics.samples()["kvtier_corrupt_blocks_total"] == 1
        assert rig.metrics.samples()['kvtier_nvme_written_bytes_total{content="blocks"}'] == 0
        assert rig.keeper.state == "on"

    run(rig, test)


def test_bytes_that_changed_on_the_disk_come_up_corrupt_and_blame_nobody(rig: Rig) -> None:
    async def test() -> None:
        rig.bind()
        await rig.demote(["a"], [None])
        rig.faults[rig.drivers[0].access_count] = Fault.BIT_FLIP
        rig.instruct(ins.Promote(NamespaceId(1), slots(0), slots(40)))
        [promoted] = await rig.heard(ev.Promoted)
        assert promoted.outcomes.tolist() == [CORRUPT]
        assert rig.metrics.samples()["kvtier_corrupt_blocks_total"] == 0

    run(rig, test)


@pytest.mark.parametrize(
    ("fault", "state", "readable"),
    [
        (Fault.EIO, "read_only", True),
        (Fault.NO_SPACE, "read_only", True),
        (Fault.GONE, "off", False),
    ],
)
def test_disk_in_trouble_is_told_once_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture, fault: Fault, state: str, readable: bool
) -> None:
    async def test() -> None:
        rig.bind()
        await rig.demote(["a"], [None])
        await asyncio.sleep(0.05)  # The table is on the disk.
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                rig.faults[rig.drivers[0].access_count] = fault
                rig.instruct(ins.Promote(NamespaceId(1), slots(0), slots(40)))
            first, second = await rig.heard(ev.Promoted, 2)
            [changed] = await rig.heard(ev.LowerChanged)
        assert changed.readable is readable
        assert rig.keeper.state == state
        assert first.outcomes.tolist() == [FAILED]
        assert second.outcomes.tolist() == [FAILED if readable else REFUSED]
        assert len(caplog.records) == 1
        demoted = await rig.demote(["b"], [None])
        assert demoted.outcomes.tolist() == [REFUSED]

    run(rig, test)


def test_nothing_is_answered_while_a_call_is_under_way_and_an_end_does_not_wait_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "END_SECONDS", 0.05)

    async def test() -> None:
        rig.bind()
        rig.fill(0, "a")
        await asyncio.sleep(0.05)
        rig.faults[rig.drivers[0].access_count] = Fault.STALL
        rig.instruct(ins.Demote(NamespaceId(1), slots(0), slots(0)))
        await asyncio.sleep(0.05)
        assert rig.manager.of(ev.Demoted) == []
        assert rig.keeper.block_counts["demote"] == 1
        await rig.keeper.stop()
        assert not await rig.keeper.close(), "memory must stay where it is"
        rig.drivers[0].release()
        await asyncio.sleep(0.01)
        assert rig.manager.of(ev.Demoted) == [], "nobody listens any more"

    run(rig, test)
    assert not NvmePool(next_life(rig).drivers).was_clean


def test_table_is_written_when_it_changed_and_only_then(rig: Rig) -> None:
    async def test() -> None:
        rig.bind()
        await asyncio.sleep(0.05)
        before = rig.drivers[0].access_count
        await asyncio.sleep(0.05)
        assert rig.drivers[0].access_count == before
        await rig.demote(["a"], [None])
        await asyncio.sleep(0.05)
        assert rig.drivers[0].access_count == before + 2  # The block, and its page of the table.

    run(rig, test)


def test_table_is_on_its_way_before_a_segment_is_written_over(rig: Rig) -> None:
    """Or a kill would cost a block that went again from there both its copies."""
    rig.table_seconds = 60.0

    async def write() -> None:
        rig.bind()
        await rig.demote(["a"], [None])
        rig.bind(segment=1)

    run(rig, write)
    life = next_life(rig)

    async def read() -> None:
        assert life.keeper.recovered_count == 1

    run(life, read)


def test_many_changes_are_written_part_by_part_without_waiting_for_the_timer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_table, "WRITE_PAGES_MAX", 1)
    rig.table_seconds = 0.2

    async def test() -> None:
        await asyncio.sleep(0.25)
        rig.bind()
        rig.instruct(ins.WriteLowerGone(slots(0, 32, 64, 96)))  # Each on a page of its own.
        assert rig.keeper.dirty_page_count == 5
        await asyncio.sleep(0.35)
        assert rig.drivers[0].access_count >= 5
        assert rig.keeper._write_table(), "nothing is left"

    run(rig, test)


def test_blocks_of_a_former_life_go_to_whoever_opens_their_namespace_then_or_later(
    rig: Rig,
) -> None:
    async def write() -> None:
        rig.bind()
        await rig.demote(["a", "b", "orphan"], [None, hash_of("a"), hash_of("absent")])
        rig.manager.recency_slots = [1, 0]
        await rig.keeper.stop()

    run(rig, write)

    for is_open_before in (True, False):
        life = next_life(rig)

        async def read(life: Rig = life, is_open_before: bool = is_open_before) -> None:
            if is_open_before:
                await life.open_namespace()
            [told] = await life.heard(ev.LowerOpened)
            assert (told.segment_count, told.lane_count) == (SEGMENT_COUNT, 1)
            assert told.is_writable
            assert [(header.segment, rows.tolist()) for header, rows in told.lives] == [(0, [0, 1])]
            if not is_open_before:
                assert life.manager.of(ev.BlocksRecovered) == []
                await life.open_namespace()
            [found] = await life.heard(ev.BlocksRecovered)
            assert (found.namespace, found.epoch) == (NamespaceId(1), EPOCH)
            assert found.packed == hash_of("a") + hash_of("b")
            assert found.parents.tolist() == [-1, 0]
            assert found.lower_slots.tolist() == [0, 1]
            assert (found.sequences == told.lives[0][0].sequence).all()
            events = life.manager.events
            assert events.index(told) < events.index(found)
            assert life.keeper.recovered_count == 2
            if is_open_before:  # The life after the orderly end: b was used less recently.
                assert found.used_at is not None
                assert found.used_at[1] < found.used_at[0]
            await life.keeper.stop()

        run(life, read, opened=False)


def test_pool_that_was_closed_in_order_is_clean_and_after_a_failure_it_is_not(rig: Rig) -> None:
    async def write() -> None:
        rig.bind()
        await rig.demote(["a"], [None])
        rig.manager.recency_slots = [0]
        await rig.keeper.stop()
        assert await rig.keeper.close()

    async def fail() -> None:
        return

    run(rig, write)
    life = next_life(rig)
    run(life, fail)
    assert life.keeper._pool.was_clean
    life = next_life(rig)
    run(life, fail)
    assert not life.keeper._pool.was_clean


def test_an_orderly_end_waits_for_a_table_that_is_being_written(rig: Rig) -> None:
    async def test() -> None:
        rig.bind()
        await asyncio.sleep(0.05)
        rig.faults[rig.drivers[0].access_count] = Fault.STALL
        rig.instruct(ins.WriteLowerGone(slots(0)))
        await asyncio.sleep(0.05)
        assert rig.keeper._pool.dirty_page_count == 1
        asyncio.get_running_loop().call_later(0.05, rig.drivers[0].release)
        await rig.keeper.stop()

    run(rig, test)
    assert NvmePool(next_life(rig).drivers).was_clean


def test_table_that_cannot_be_read_turns_the_tier_off_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with caplog.at_level(logging.ERROR):
            for _ in range(int(SECONDS_MAX / 0.01)):
                await asyncio.sleep(0.01)
                if caplog.records:
                    break
            await asyncio.sleep(0.01)
        assert rig.keeper.state == "off"
        assert len(caplog.records) == 1
        await rig.open_namespace()
        assert not rig.manager.of(ev.LowerOpened) + rig.manager.of(ev.BlocksRecovered)

    opening = NvmeKeeper.open

    async def open_badly(keeper: NvmeKeeper) -> None:
        await opening(keeper)
        rig.faults[rig.drivers[0].access_count] = Fault.EIO

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeKeeper, "open", open_badly)
        run(rig, test, opened=False)


def test_what_is_asked_for_after_the_end_began_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        rig.bind()
        rig.fill(0, "a")
        rig.keeper._transfers.refuse()
        rig.instruct(ins.Demote(NamespaceId(1), slots(0), slots(0)))
        [demoted] = await rig.heard(ev.Demoted)
        assert demoted.outcomes.tolist() == [REFUSED]
        await rig.keeper.stop()
        rig.instruct(ins.WriteLowerGone(slots(0)))  # The pool is closed: nothing happens.

    run(rig, test)
