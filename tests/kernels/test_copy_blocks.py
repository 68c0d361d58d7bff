"""Whole blocks in every layout: gathered, scattered and copied, the bytes are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kernel_kv import LAYOUTS, TwinKv, slot_column
from tests.support.kernel_twin import HostMemory, KernelLauncher
from tests.support.kv_layouts import Sizes

SIZES = {
    "even": Sizes(),
    "odd": Sizes(layers=2, blocks=5, heads=3, tokens=3, width=5),
    "one": Sizes(layers=1, blocks=1, heads=1, tokens=1, width=1),
    "wide": Sizes(layers=2, blocks=5, heads=2, tokens=16, width=128),
}
TILES_PER_RUN = 2

layouts = pytest.mark.parametrize("layout", LAYOUTS)
all_sizes = pytest.mark.parametrize("size", SIZES)


def some_blocks(kv: TwinKv, count: int) -> list[int]:
    """Not in order, as a block table has them."""
    blocks = np.random.default_rng(count).permutation(kv.layout.block_count)
    return [int(block) for block in blocks[:count]]


def slots_for(kv: TwinKv, count: int, seed: int = 3) -> tuple[HostMemory, int]:
    """Slots in a row, each with room to spare that nothing may touch."""
    slot_bytes = kv.layout.shard_bytes + 48
    data = np.random.default_rng(seed).integers(0, 256, slot_bytes * count, np.uint8)
    return HostMemory(data), slot_bytes


@layouts
@all_sizes
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_gathered_blocks_hold_every_byte_in_order(
    kernels: KernelLauncher, layout: str, size: str, count: int
) -> None:
    kv = LAYOUTS[layout](SIZES[size])
    blocks = some_blocks(kv, count)
    slots, slot_bytes = slots_for(kv, len(blocks))
    expected = slots.data.copy()
    for row, block in enumerate(blocks):
        start = row * slot_bytes
        expected[start : start + kv.layout.shard_bytes] = kv.block_bytes(block)
    before = kv.memory.data.copy()
    move(kernels, "gather_blocks", kv, blocks, (slots, slot_bytes))
    np.testing.assert_array_equal(slots.data, expected)
    np.testing.assert_array_equal(kv.memory.data, before)


@layouts
@all_sizes
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_scattered_blocks_are_what_was_gathered_and_others_stay(
    kernels: KernelLauncher, layout: str, size: str, count: int
) -> None:
    kv = LAYOUTS[layout](SIZES[size])
    blocks = some_blocks(kv, count)
    slots, slot_bytes = slots_for(kv, len(blocks))
    before = kv.memory.data.copy()
    others = [block for block in range(kv.layout.block_count) if block not in blocks]
    kept = [kv.block_bytes(block) for block in others]
    wanted = slots.data.copy()
    move(kernels, "scatter_blocks", kv, blocks, (slots, slot_bytes))
    for row, block in enumerate(blocks):
        start = row * slot_bytes
        np.testing.assert_array_equal(
            kv.block_bytes(block), wanted[start : start + kv.layout.shard_bytes]
        )
    for block, bytes_ in zip(others, kept, strict=True):
        np.testing.assert_array_equal(kv.block_bytes(block), bytes_)
    # What belongs to no block (other requests of a contiguous cache) stays too.
    mine = np.zeros(len(before), bool)
    mark_bytes(kv, mine)
    np.testing.assert_array_equal(kv.memory.data[~mine], before[~mine])


@layouts
@all_sizes
def test_copied_blocks_equal_their_sources(kernels: KernelLauncher, layout: str, size: str) -> None:
    kv = LAYOUTS[layout](SIZES[size])
    blocks = some_blocks(kv, 4)
    sources, targets = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :][:2]
    pairs = list(zip(sources, targets, strict=False))
    wanted = {block: kv.block_bytes(block) for block in range(kv.layout.block_count)}
    wanted.update({target: wanted[source] for source, target in pairs})
    kernels.launch(
        "copy_blocks",
        kv.runs().at(),
        len(kv.layout.sizes),
        HostMemory.table([source for source, _ in pairs]).at(),
        HostMemory.table([target for _, target in pairs]).at(),
        len(pairs),
        TILES_PER_RUN,
    )
    for block, bytes_ in wanted.items():
        np.testing.assert_array_equal(kv.block_bytes(block), bytes_)


def test_groups_of_layers_share_slots_one_after_another(kernels: KernelLauncher) -> None:
    """A hybrid model: two groups with layouts and block numbers of their own in one slot each."""
    wide = LAYOUTS["packed LBHNC"](Sizes(layers=3, blocks=6, heads=2, tokens=4, width=8))
    narrow = LAYOUTS["split L2BNHC"](Sizes(layers=2, blocks=9, heads=1, tokens=8, width=4))
    length = wide.layout.shard_bytes + narrow.layout.shard_bytes
    slot = HostMemory.zeros(length)
    for kv, block, start in ((wide, 4, 0), (narrow, 7, wide.layout.shard_bytes)):
        kernels.launch(
            "gather_blocks",
            kv.runs().at(),
            len(kv.layout.sizes),
            HostMemory.table([block]).at(),
            HostMemory.table([slot.at(start)]).at(),
            1,
            TILES_PER_RUN,
        )
    np.testing.assert_array_equal(
        slot.data, np.concatenate([wide.block_bytes(4), narrow.block_bytes(7)])
    )


def test_some_of_the_layers_fill_their_part_of_the_slot(kernels: KernelLauncher) -> None:
    """A load layer by layer: `DeviceLayout.part` is a table with fewer rows."""
    kv = LAYOUTS["split L2BNHC"](SIZES["even"])
    slots, slot_bytes = slots_for(kv, 1)
    part = kv.layout.part(2, 4)  # Keys and values of the second layer.
    runs = HostMemory.table(kv.memory.column(part.addresses), part.steps, part.sizes, part.places)
    expected = kv.block_bytes(3)
    first, last = int(part.places[0]), int(part.places[-1] + part.sizes[-1])
    before = slots.data.copy()
    kernels.launch(
        "gather_blocks",
        runs.at(),
        2,
        HostMemory.table([3]).at(),
        HostMemory.table(slot_column(slots, slot_bytes, 1)).at(),
        1,
        TILES_PER_RUN,
    )
    before[first:last] = expected[first:last]
    np.testing.assert_array_equal(slots.data, before)


def move(
    kernels: KernelLauncher, name: str, kv: TwinKv, blocks: list[int], into: tuple[HostMemory, int]
) -> None:
    slots, slot_bytes = into
    kernels.launch(
        name,
        kv.runs().at(),
        len(kv.layout.sizes),
        HostMemory.table(blocks).at(),
        HostMemory.table(slot_column(slots, slot_bytes, len(blocks))).at(),
        len(blocks),
        TILES_PER_RUN,
        grid_count=3,
    )


def mark_bytes(kv: TwinKv, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    layout = kv.layout
    for address, step, size in zip(layout.addresses, layout.steps, layout.sizes, strict=True):
        for block in range(layout.block_count):
            start = int(address) + block * int(step)
            mine[start : start + int(size)] = True
