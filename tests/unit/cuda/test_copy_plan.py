"""Planning: every byte once, in few runs, in small pieces, by the right path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cuda.copy_paths import CopyPath, PathLimits, PathSupport, choose_path
from kvtier.cuda.copy_plan import CopyRuns, Piece, SlabView, merged, pieces_of, runs_of, split
from kvtier.cuda.device_layout import DeviceTensor, dims_by_stride, in_memory_order, layout_of
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.runtime import Direction
from kvtier.errors import BadRequest
from tests.support.kv_layouts import LAYOUTS, Sizes

UP, DOWN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
KIB, MIB = 1 << 10, 1 << 20
ALL = PathSupport(has_batches=True, has_kernels=True)


def numbers(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def runs(*rows: tuple[int, int, int, int]) -> CopyRuns:
    """(device, host, size, slab) each."""
    columns = np.array(rows, np.uint64).reshape(-1, 4)
    return CopyRuns(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3].astype(np.int64))


def bytes_of(found: CopyRuns) -> dict[int, int]:
    """Host address by device address, byte for byte."""
    pairs: dict[int, int] = {}
    for device, host, size in zip(
        found.device.tolist(), found.host.tolist(), found.sizes.tolist(), strict=True
    ):
        for offset in range(size):
            assert device + offset not in pairs, "a byte is copied twice"
            pairs[device + offset] = host + offset
    return pairs


# ----------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("direction", "run_bytes", "run_count", "path"),
    [
        (UP, 2 * MIB, 1, CopyPath.BATCH),
        (UP, 28 * KIB, 1000, CopyPath.BATCH),
        (UP, 28 * KIB - 1, 1000, CopyPath.KERNEL),
        (UP, 28 * KIB - 1, 16, CopyPath.KERNEL),
        (UP, 28 * KIB - 1, 15, CopyPath.BATCH),
        (DOWN, 28 * KIB, 1000, CopyPath.BATCH),
        (DOWN, 8 * KIB, 1000, CopyPath.STAGED),
        (DOWN, 8 * KIB, 3, CopyPath.BATCH),
    ],
)
def test_direction_length_and_number_decide_the_path(
    direction: Direction, run_bytes: int, run_count: int, path: CopyPath
) -> None:
    for support, expected in [
        (ALL, path),
        (PathSupport(True, False), CopyPath.BATCH),
        (PathSupport(False, False), CopyPath.PLAIN),
    ]:
        chosen = choose_path(
            direction,
            run_bytes=run_bytes,
            run_count=run_count,
            is_registered=True,
            support=support,
        )
        assert chosen is expected


def test_memory_that_is_not_pinned_is_copied_by_plain_copies() -> None:
    for run_bytes in (8, 2 * MIB):
        chosen = choose_path(
            UP, run_bytes=run_bytes, run_count=99, is_registered=False, support=ALL
        )
        assert chosen is CopyPath.PLAIN


# ------------------------------------------------------------------------------------------ runs


def test_neighbours_on_both_sides_are_one_run_and_others_are_not() -> None:
    found = merged(
        runs(
            (300, 9300, 100, 0),
            (100, 9100, 100, 0),
            (200, 9200, 100, 0),
            (400, 9500, 100, 0),  # Neighbour on the device only.
            (600, 9600, 100, 0),  # Neighbour on the host only.
            (700, 9700, 100, 1),  # Neighbour on both, in another slab.
        )
    )
    assert found.device.tolist() == [100, 400, 600, 700]
    assert found.sizes.tolist() == [300, 100, 100, 100]


ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 2), st.integers(0, 1)),
    max_size=8,
    unique_by=(lambda row: row[0], lambda row: row[1]),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 7))
def test_merging_and_splitting_move_the_same_bytes(
    rows: list[tuple[int, int, int, int]], bytes_max: int
) -> None:
    given_runs = runs(*((d * 2, 1000 + h * 2, size, slab) for d, h, size, slab in rows))
    found = split(merged(given_runs), bytes_max)
    assert bytes_of(found) == bytes_of(given_runs)
    assert not len(found.sizes) or int(found.sizes.max()) <= bytes_max


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_s_runs_are_the_block_s_bytes_in_their_order(name: str) -> None:
    kv = LAYOUTS[name](FakeCudart(), Sizes(layers=3, blocks=5, heads=3, tokens=5, width=7))
    np.copyto(kv.memory, np.random.default_rng(1).integers(0, 256, len(kv.memory), np.uint8))
    for block in range(5):
        found = np.concatenate(
            [
                kv.cuda.device_bytes(address + block * step, size)
                for address, step, size in zip(
                    kv.layout.addresses.tolist(),
                    kv.layout.steps.tolist(),
                    kv.layout.sizes.tolist(),
                    strict=True,
                )
            ]
        )
        assert (found == kv.block_bytes(block)).all()


@pytest.mark.parametrize(
    ("name", "run_count"),
    [
        ("split", 2 * 3),
        ("packed LBHNC", 3),
        ("packed LBNHC", 3 * 2 * 4),  # The slot's order is by head: a run for each head and token.
        ("heads outside LHBNC", 3 * 2),
        ("block-outermost BLHNC", 1),
        ("block-outermost BHLNC", 3 * 2),
        ("cross-layer tensor", 1),
        ("MLA", 3),
    ],
)
def test_a_block_lies_in_as_few_runs_as_its_layout_allows(name: str, run_count: int) -> None:
    kv = LAYOUTS[name](FakeCudart(), Sizes())
    assert len(kv.layout.sizes) == run_count


def test_dimensions_in_memory_order_make_the_fewest_runs() -> None:
    kv = LAYOUTS["packed LBNHC"](FakeCudart(), Sizes())
    np.copyto(kv.memory, np.random.default_rng(1).integers(0, 256, len(kv.memory), np.uint8))
    assert {dims_by_stride(tensor) for tensor in kv.tensors} == {(0, 2, 1, 3)}
    layout = layout_of([in_memory_order(tensor) for tensor in kv.tensors])
    assert len(layout.sizes) == len(kv.tensors)
    address = int(layout.addresses[1] + layout.steps[1] * np.uint64(5))
    by_tokens = kv.views(5)[1].swapaxes(0, 1).reshape(-1)
    assert (kv.cuda.device_bytes(address, int(layout.sizes[1])) == by_tokens).all()


def test_blocks_in_a_row_into_slots_in_a_row_are_one_run() -> None:
    kv = LAYOUTS["block-outermost BLHNC"](FakeCudart(), Sizes(blocks=8))
    size = kv.layout.shard_bytes
    slots = numbers(*(1 << 30 | index * size for index in range(8)))
    blocks, slabs = np.arange(8), np.zeros(8, np.int64)
    shuffled = np.random.default_rng(2).permutation(8)
    found = runs_of(kv.layout, blocks[shuffled], slots[shuffled], slabs)
    assert found.sizes.tolist() == [8 * size]
    two_slabs = runs_of(kv.layout, blocks, slots, np.array([0] * 3 + [1] * 5))
    assert two_slabs.sizes.tolist() == [3 * size, 5 * size]


@pytest.mark.parametrize("blocks", [[0, 7], [-1, 2], [3, 3]])
def test_a_block_that_is_not_there_or_is_named_twice_is_refused(blocks: list[int]) -> None:
    kv = LAYOUTS["MLA"](FakeCudart(), Sizes(blocks=7))
    with pytest.raises(BadRequest):
        runs_of(kv.layout, np.array(blocks), numbers(4096, 8192), np.zeros(2, np.int64))


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [DeviceTensor(4096, (4, 8), (8, 1), 2)],  # Elements overlap.
        [DeviceTensor(4096, (4, 8), (4, 1), 1)],  # Blocks overlap.
        [DeviceTensor(4096, (4, 8), (0, 1), 1)],  # An expanded dimension.
        [DeviceTensor(4096, (4, 8), (-8, 1), 1)],
        [DeviceTensor(4096, (4, 8), (8, 1, 1), 1)],
        [DeviceTensor(4096, (4, 8), (8, 1), 1), DeviceTensor(9000, (5, 8), (8, 1), 1)],
        [DeviceTensor(4096, (4, 8), (8, 1), 1), DeviceTensor(4100, (4, 8), (8, 1), 1)],
        [DeviceTensor(4096, (2, 1 << 20), (1 << 21, 2), 1)],  # A run for each byte.
    ],
)
def test_tensors_that_are_not_understood_are_refused(tensors: list[DeviceTensor]) -> None:
    with pytest.raises(BadRequest):
        layout_of(tensors)


def test_a_part_of_the_layers_keeps_its_places() -> None:
    kv = LAYOUTS["packed LBHNC"](FakeCudart(), Sizes(layers=3))
    part = kv.layout.part(1, 3)
    assert part.places.tolist() == kv.layout.places.tolist()[1:]
    assert part.shard_bytes * 3 == kv.layout.shard_bytes * 2


@pytest.mark.parametrize("name", ["cross-layer tensor", "block-outermost BLHNC", "packed LBHNC"])
def test_layers_are_cut_out_of_runs_and_are_the_block_together(name: str) -> None:
    kv = LAYOUTS[name](FakeCudart(), Sizes(layers=3))
    layers = kv.layout.by_layer(3)
    assert [layer.shard_bytes * 3 for layer in layers] == [kv.layout.shard_bytes] * 3
    blocks, slots = np.array([4, 1]), numbers(1 << 20, 2 << 20)
    whole = bytes_of(runs_of(kv.layout, blocks, slots, np.zeros(2, np.int64)))
    found: dict[int, int] = {}
    for index, layer in enumerate(layers):
        one = bytes_of(runs_of(layer, blocks, slots, np.zeros(2, np.int64)))
        assert {place % (1 << 20) // layer.shard_bytes for place in one.values()} == {index}
        found.update(one)
    assert found == whole


def test_a_block_that_is_no_number_of_equal_layers_is_refused() -> None:
    kv = LAYOUTS["cross-layer tensor"](FakeCudart(), Sizes(layers=3))
    with pytest.raises(BadRequest, match="7 layers of one size"):
        kv.layout.by_layer(7)


# ---------------------------------------------------------------------------------------- pieces

SLABS = [SlabView(alias=1 << 40, is_registered=True), SlabView(alias=0, is_registered=False)]


def test_pieces_are_bounded_in_bytes_and_runs_and_hold_every_byte() -> None:
    limits = PathLimits(
        small_run_bytes=100, kernel_count_min=2, piece_bytes_max=1000, piece_runs_max=3
    )
    given_runs = runs(
        (0, 50_000, 2500, 0),
        *((10_000 + 50 * index, 70_000 + 90 * index, 40, 0) for index in range(7)),
        (30_000, 90_000, 1001, 1),
    )
    pieces = pieces_of(given_runs, SLABS, UP, ALL, limits)
    assert [piece.path for piece in pieces] == (
        [CopyPath.BATCH] * 3 + [CopyPath.KERNEL] * 3 + [CopyPath.PLAIN] * 2
    )
    for piece in pieces:
        assert piece.bytes_count <= 1000
        assert len(piece.sizes) <= 3
    assert bytes_of(joined(pieces)) == bytes_of(given_runs)


def joined(pieces: list[Piece]) -> CopyRuns:
    device, host, sizes = (
        np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("device", "host", "sizes")
    )
    return CopyRuns(device, host, sizes, np.zeros(len(sizes), np.int64))


def test_batches_and_kernels_are_given_the_device_s_address() -> None:
    [piece] = pieces_of(runs((0, 50_000, 64, 0)), SLABS, DOWN, ALL)
    assert piece.seen.tolist() == [50_000 + (1 << 40)]
    assert piece.host.tolist() == [50_000]


def test_an_alias_below_the_host_s_address_is_right_too() -> None:
    slab = SlabView(alias=-4096, is_registered=True)
    [piece] = pieces_of(runs((0, 50_000, 64, 0)), [slab], DOWN, ALL)
    assert piece.seen.tolist() == [50_000 - 4096]


def test_no_piece_is_longer_than_a_load_may_wait_for() -> None:
    pieces = pieces_of(runs((0, 1 << 40, 100 * MIB, 0)), SLABS, DOWN, ALL)
    assert [piece.bytes_count for piece in pieces] == [32 * MIB] * 3 + [4 * MIB]


def test_the_first_piece_of_many_runs_is_short_so_that_the_link_is_soon_busy() -> None:
    many = runs(*((index << 17, index << 18, 1 << 16, 0) for index in range(500)))
    pieces = pieces_of(many, SLABS, DOWN, ALL)
    assert [len(piece.sizes) for piece in pieces] == [64, 128, 256, 52]


def test_nothing_to_copy_is_no_piece() -> None:
    assert pieces_of(runs(), [], UP, ALL) == []
