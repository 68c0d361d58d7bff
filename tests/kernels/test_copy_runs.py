"""Runs of any size and alignment: every byte arrives, and no other byte is touched."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cuda import kernel_copies
from tests.support.kernel_twin import KERNELS, HostMemory, KernelLauncher, KernelTwin, TwinDied

TILE_BYTES = 2048
# Around a word, a warp's round, a tile; and what only bytes can copy.
SIZES = [0, 1, 3, 4, 15, 16, 17, 31, 255, 496, 511, 512, 1008, 2047, 2048, 2049, 6144, 8191, 28671]


def random_bytes(length: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


@pytest.mark.parametrize(
    ("to", "start"), [(0, 0), (16, 32), (5, 5), (3, 11), (4, 8), (2, 6), (1, 2), (15, 7)]
)
def test_every_alignment_and_size_is_copied_and_nothing_beside_it(
    kernels: KernelLauncher, to: int, start: int
) -> None:
    places = np.cumsum([0, *(size + 96 for size in SIZES)])
    places -= places % 32
    source = HostMemory.of(random_bytes(int(places[-1]) + 64))
    target = HostMemory.of(random_bytes(int(places[-1]) + 64, seed=1))
    expected = target.data.copy()
    for place, size in zip(places.tolist(), SIZES, strict=False):
        expected[place + to : place + to + size] = source.data[place + start : place + start + size]
    table = HostMemory.table(
        target.column(places[:-1] + to), source.column(places[:-1] + start), SIZES
    )
    kernels.launch("copy_runs", table.at(), len(SIZES), 3)
    np.testing.assert_array_equal(target.data, expected)


@pytest.mark.parametrize("misalignment", [0, 1, 8, 15])
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_run_that_is_all_of_its_memory_is_copied_within_it(
    kernels: KernelLauncher, size: int, misalignment: int
) -> None:
    """The sanitizer watches the bytes on both sides."""
    source = HostMemory(random_bytes(size), misalignment)
    target = HostMemory.zeros(size, 15 - misalignment)
    table = HostMemory.table([target.at()], [source.at()], [size])
    kernels.launch("copy_runs", table.at(), 1, 1, grid_count=1, block_threads=32)
    np.testing.assert_array_equal(target.data, source.data)


@pytest.mark.parametrize("tiles_per_run", [1, 2, 5, 100])
@pytest.mark.parametrize(("grid_count", "block_threads"), [(1, 32), (3, 96), (4, 1024)])
def test_neither_the_grid_nor_the_tiles_decide_what_is_copied(
    kernels: KernelLauncher, tiles_per_run: int, grid_count: int, block_threads: int
) -> None:
    sizes = [100, 4 * TILE_BYTES + 5, TILE_BYTES, 0, 3 * TILE_BYTES]
    places = np.cumsum([0, *sizes])
    source = HostMemory.of(random_bytes(int(places[-1])))
    target = HostMemory.zeros(len(source.data))
    table = HostMemory.table(target.column(places[:-1]), source.column(places[:-1]), sizes)
    kernels.launch(
        "copy_runs",
        table.at(),
        len(sizes),
        tiles_per_run,
        grid_count=grid_count,
        block_threads=block_threads,
    )
    np.testing.assert_array_equal(target.data, source.data)


def test_python_and_the_kernels_mean_the_same_tile() -> None:
    text = (KERNELS / "kv_core.cuh").read_text(encoding="utf-8")
    assert f"TILE_BYTES = {kernel_copies.TILE_BYTES};" in text
    assert kernel_copies.TILE_BYTES == TILE_BYTES


def test_a_table_of_no_runs_copies_nothing(kernels: KernelLauncher) -> None:
    kernels.launch("copy_runs", HostMemory.table([]).at(), 0, 1)


def test_a_byte_beyond_the_memory_is_seen_by_the_sanitizer(host_twin: KernelTwin) -> None:
    """That the tests above can fail."""
    source, target = HostMemory.zeros(48), HostMemory.zeros(47)
    table = HostMemory.table([target.at()], [source.at()], [48])
    with pytest.raises(TwinDied, match="AddressSanitizer"):
        host_twin.launch("copy_runs", table.at(), 1, 1)


def test_a_byte_before_a_misaligned_memory_is_seen_by_the_sanitizer(host_twin: KernelTwin) -> None:
    source, target = HostMemory.zeros(48), HostMemory.zeros(48, misalignment=8)
    table = HostMemory.table([target.at(-1)], [source.at()], [8])
    with pytest.raises(TwinDied, match="AddressSanitizer"):
        host_twin.launch("copy_runs", table.at(), 1, 1)


def test_a_kernel_with_wrong_arguments_is_refused(host_twin: KernelTwin) -> None:
    with pytest.raises(TwinDied, match="arguments"):
        host_twin.launch("copy_runs", 1, 2)
    with pytest.raises(TwinDied, match="no kernel"):
        host_twin.launch("copy", 1, 2)
