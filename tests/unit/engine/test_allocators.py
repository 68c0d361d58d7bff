"""What each way of giving memory holds, reserves and wastes, to the token."""

from __future__ import annotations

import random

import pytest

from kvtier.engine.compared.allocators import (
    ContiguousAllocator,
    KvAllocator,
    Need,
    PagedAllocator,
    VirtualAllocator,
    Waste,
    exact,
    max_length,
    power_of_two,
)

CAPACITY, CONTEXT_MAX = 1024, 256
MAKERS = {
    "max-length": lambda: ContiguousAllocator(CAPACITY, max_length(CONTEXT_MAX)),
    "buddy": lambda: ContiguousAllocator(CAPACITY, power_of_two, is_buddy=True),
    "oracle": lambda: ContiguousAllocator(CAPACITY, exact),
    "paged": lambda: PagedAllocator(CAPACITY, 16),
    "virtual": lambda: VirtualAllocator(CAPACITY, CONTEXT_MAX, token_bytes=128),
}
REQUEST = Need(prompt_count=20, total_count=50)


def after(allocator: KvAllocator, tokens: int) -> Waste:
    assert allocator.admit("one", REQUEST)
    assert all(allocator.append("one") for _ in range(tokens))
    return allocator.waste(REQUEST)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max-length", Waste(30, 20, 206, 0)),
        ("buddy", Waste(30, 20, 14, 0)),
        ("oracle", Waste(30, 20, 0, 974 % 50)),
        ("paged", Waste(30, 2, 0, 0)),
        ("virtual", Waste(30, 2, 0, 0)),
    ],
)
def test_waste_is_told_apart(name: str, expected: Waste) -> None:
    assert after(MAKERS[name](), 10) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_no_place_is_given_twice_and_all_come_back(name: str) -> None:
    rng = random.Random(5)
    allocator: KvAllocator = MAKERS[name]()
    live: dict[str, list[int]] = {}
    for number in range(600):
        waste = allocator.waste(REQUEST)
        taken = waste.used_count + waste.reserved_count + waste.internal_count
        assert taken + waste.external_count <= CAPACITY
        assert waste.used_count == sum(used for used, _ in live.values())
        if name == "paged":
            assert taken - waste.used_count <= 15 * len(live), "more than each last block's rest"
        prompt = rng.randint(1, 100)
        need = Need(prompt, prompt + rng.randint(1, 100))
        if allocator.admit(str(number), need):
            live[str(number)] = [prompt, need.total_count]
        for one, counts in list(live.items()):
            if counts[0] < counts[1] and allocator.append(one):
                counts[0] += 1
            elif rng.random() < 0.3:
                allocator.release(one)
                del live[one]
    for one in live:
        allocator.release(one)
    assert allocator.waste(REQUEST) == Waste(0, 0, 0, CAPACITY % 50 if name == "oracle" else 0)


def test_runs_do_not_overlap_and_a_buddy_is_aligned() -> None:
    rng = random.Random(7)
    allocator = ContiguousAllocator(CAPACITY, power_of_two, is_buddy=True)
    for number in range(300):
        allocator.admit(str(number), Need(1, rng.randint(1, 120)))
        runs = sorted((held.start, held.held_count) for held in allocator._held.values())
        assert all(start % size == 0 for start, size in runs)
        ends = [start + size for start, size in runs]
        assert all(end <= start for end, (start, _) in zip(ends, runs[1:], strict=False))
        if rng.random() < 0.5:
            allocator.release(rng.choice(list(allocator._held)))


def test_holes_that_the_next_request_does_not_fit_into_are_external_waste() -> None:
    allocator = ContiguousAllocator(100, exact)
    for name, size in (("a", 30), ("b", 30), ("c", 30)):
        assert allocator.admit(name, Need(size, size))
    allocator.release("b")
    assert not allocator.admit("d", Need(1, 35))
    assert allocator.waste(Need(1, 35)).external_count == 40
    assert allocator.waste(Need(1, 30)).external_count == 10


def test_memory_that_is_full_refuses_and_changes_nothing() -> None:
    for allocator in (
        PagedAllocator(32, 16),
        VirtualAllocator(64, CONTEXT_MAX, token_bytes=128),
    ):
        assert allocator.admit("a", Need(32, 80))
        while allocator.append("a"):
            pass
        before = allocator.waste()
        assert not allocator.append("a")
        assert not allocator.admit("b", Need(1, 2))
        assert allocator.waste() == before


def test_virtual_memory_is_mapped_only_where_it_is_touched() -> None:
    def resident_kib() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))

    pages = 2048
    allocator = VirtualAllocator(pages * 64, 64 * pages * 8, token_bytes=64)
    before = resident_kib()
    assert allocator.admit("a", Need(64 * pages, 64 * pages))
    grown = resident_kib() - before
    assert pages * 4 * 0.9 < grown < pages * 4 * 2, "an eighth of the addresses is touched"
    allocator.release("a")
    assert resident_kib() - before < pages * 4 * 0.5
