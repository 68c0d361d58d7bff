"""Slabs come populated and sealed, never more than allowed, and a refusal is a value."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.memory import HUGE_BYTES
from kvtier.pools import slabs
from kvtier.pools.slabs import PageKind, PopulateCancelled, Slab, populate_slab, punch_slab
from kvtier.pools.stock import Outcome, PopulateRefused, SlabStock
from kvtier.types import SlabId
from tests.support.clock import ManualClock

SLAB_BYTES = 2 * HUGE_BYTES
WAIT_SECONDS = 20


def slab_files() -> set[str]:
    """The slabs' files this process has open: name and inode."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {
        f"{os.readlink(link)} {os.stat(link).st_ino}"
        for link in links
        if os.path.islink(link) and "kvtier-slab" in os.readlink(link)
    }


@pytest.fixture(autouse=True)
def memory_files() -> Callable[[], int]:
    """How many slabs' files are open that were not before the test."""
    before = slab_files()
    return lambda: len(slab_files() - before)


@pytest.fixture
def outcomes() -> queue.Queue[Outcome]:
    return queue.Queue()


@pytest.fixture
def make_stock(outcomes: queue.Queue[Outcome]) -> Iterator[Callable[..., SlabStock]]:
    stocks: list[SlabStock] = []

    def make(**options: object) -> SlabStock:
        options = {"slab_count_max": 2, "reserve_bytes": 0, **options}
        stock = SlabStock(
            slab_bytes=SLAB_BYTES,
            on_outcome=outcomes.put,
            clock=ManualClock(),
            **options,  # type: ignore[arg-type]
        )
        stocks.append(stock)
        return stock

    yield make
    for stock in stocks:
        stock.stop()
    while not outcomes.empty():
        if isinstance(slab := outcomes.get(), Slab):
            punch_slab(slab)


def test_a_slab_arrives_with_all_its_pages_and_its_length_fixed(make_stock, outcomes) -> None:
    make_stock().request(1)
    slab = outcomes.get(timeout=WAIT_SECONDS)
    assert os.fstat(slab.fd).st_blocks * 512 == SLAB_BYTES == slab.length_bytes
    assert not slab.mapping.array.any()
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, 0)
    punch_slab(slab)


def test_no_more_slabs_than_allowed_until_one_is_given_back(make_stock, outcomes) -> None:
    stock = make_stock()
    assert stock.request(5) == 2
    assert stock.request(1) == 0
    first, second = (outcomes.get(timeout=WAIT_SECONDS) for _ in range(2))
    stock.give_back(first)
    assert stock.request(5) == 1
    third = outcomes.get(timeout=WAIT_SECONDS)
    assert len({first.id, second.id, third.id}) == 3, "a slab's id was used twice"
    stock.give_back(second)
    stock.give_back(third)
    assert stock.slab_count == 0


def test_a_slab_that_would_take_the_others_reserve_is_refused(
    make_stock, outcomes, memory_files: Callable[[], int]
) -> None:
    stock = make_stock(reserve_bytes=1 << 60)
    stock.request(1)
    refused = outcomes.get(timeout=WAIT_SECONDS)
    assert isinstance(refused, PopulateRefused)
    assert "MiB needed" in refused.reason
    assert stock.slab_count == 0
    assert memory_files() == 0


def test_a_slab_that_the_system_refuses_is_a_value(
    make_stock, outcomes, monkeypatch, memory_files: Callable[[], int]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(slabs.pages, "populate", refuse)
    stock = make_stock()
    stock.request(2)
    found = [outcomes.get(timeout=WAIT_SECONDS) for _ in range(2)]
    assert all(isinstance(one, PopulateRefused) for one in found)
    assert "Cannot allocate memory" in found[0].reason
    assert stock.slab_count == 0
    assert memory_files() == 0
    monkeypatch.undo()
    assert stock.request(1) == 1
    slab = outcomes.get(timeout=WAIT_SECONDS)
    assert isinstance(slab, Slab)
    stock.give_back(slab)


def test_after_stop_nothing_arrives_and_no_memory_is_held(
    make_stock, outcomes, memory_files: Callable[[], int]
) -> None:
    holding, go_on = threading.Event(), threading.Event()

    class SlowClock(ManualClock):
        def now(self) -> float:
            holding.set()
            assert go_on.wait(WAIT_SECONDS), "nobody stopped the stock"
            return super().now()

    stock = SlabStock(
        slab_bytes=SLAB_BYTES,
        slab_count_max=4,
        on_outcome=outcomes.put,
        clock=SlowClock(),
        parallel=1,
    )
    stock.request(4)
    assert holding.wait(WAIT_SECONDS), "no slab was begun"
    stopping = threading.Thread(target=stock.stop)
    stopping.start()
    while not stock._stopped.is_set():
        stopping.join(0.001)
    go_on.set()
    stopping.join(WAIT_SECONDS)
    assert outcomes.empty()
    assert memory_files() == 0


def test_populating_can_be_given_up_between_two_steps(memory_files: Callable[[], int]) -> None:
    asked = iter([False, True])
    with pytest.raises(PopulateCancelled):
        populate_slab(
            SlabId(1),
            2 * slabs.POPULATE_STEP_BYTES,
            PageKind.BASE,
            clock=ManualClock(),
            is_cancelled=lambda: next(asked),
        )
    assert memory_files() == 0


def test_a_reserve_of_huge_pages_that_is_used_up_gives_the_next_best() -> None:
    if slabs.pages.hugetlb_works():
        pytest.skip("huge pages are reserved here")
    slab = populate_slab(SlabId(1), SLAB_BYTES, PageKind.HUGETLB, clock=ManualClock())
    assert slab.page_kind is not PageKind.HUGETLB
    assert os.fstat(slab.fd).st_blocks * 512 == SLAB_BYTES
    punch_slab(slab)


def test_the_kind_told_is_the_kernels_not_the_wish(monkeypatch) -> None:
    monkeypatch.setattr(slabs.pages, "collapse", lambda *_: False)
    slab = populate_slab(SlabId(1), SLAB_BYTES, PageKind.COLLAPSED, clock=ManualClock())
    assert (slab.page_kind, slab.huge_bytes) == (PageKind.BASE, 0)
    punch_slab(slab)


def test_huge_pages_that_ran_out_on_the_way_are_called_mixed(monkeypatch) -> None:
    if not slabs.pages.collapse_may_work():
        pytest.skip("no MADV_COLLAPSE here")
    collapse = slabs.pages.collapse

    def collapse_half(mapping, first, length_bytes):
        return collapse(mapping, first, length_bytes // 2)

    monkeypatch.setattr(slabs.pages, "collapse", collapse_half)
    slab = populate_slab(SlabId(1), SLAB_BYTES, PageKind.COLLAPSED, clock=ManualClock())
    if slab.huge_bytes == 0:
        pytest.skip("the kernel refuses MADV_COLLAPSE")
    assert (slab.page_kind, slab.huge_bytes) == (PageKind.MIXED, SLAB_BYTES // 2)
    assert os.fstat(slab.fd).st_blocks * 512 == SLAB_BYTES, "the other half has base pages"
    punch_slab(slab)


def test_a_punched_slab_reads_zeros_for_a_view_that_is_left() -> None:
    slab = populate_slab(SlabId(1), SLAB_BYTES, PageKind.BASE, clock=ManualClock())
    view = slab.mapping.array
    view[:] = 1
    assert not punch_slab(slab)
    assert not np.any(view)
