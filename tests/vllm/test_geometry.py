"""Geometry and copies on tensors in all forms in which vLLM hands out its KV."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.connector.vllm.copier import GatheringCopier, StraightCopier, cpu_copier
from kvtier.connector.vllm.device import device_tensors
from kvtier.connector.vllm.geometry import BlockGeometry, geometry_of
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.cuda.device_layout import layout_of
from kvtier.errors import BadRequest

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 9, 2, 16, 8, 3
Caches = dict[str, torch.Tensor]


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(dtype)


def named(tensors: list[torch.Tensor]) -> Caches:
    return {f"model.layers.{i}.self_attn.attn": tensor for i, tensor in enumerate(tensors)}


def each_alone(*shape: int) -> Caches:
    return named([random_tensor(*shape) for _ in range(LAYERS)])


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> Caches:
    """Logical `shape` whose memory has the dimensions in another `order`."""
    back = [order.index(dim) for dim in range(len(order))]
    return named(
        [random_tensor(*(shape[dim] for dim in order)).permute(back) for _ in range(LAYERS)]
    )


def one_storage(order: str) -> Caches:
    """[L, B, H, N, C] in the memory order given by its letters, as views of one storage."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * SIZE}
    storage = random_tensor(*(sizes[letter] for letter in order))
    logical = storage.permute([order.index(letter) for letter in "LBHNC"])
    return named(list(logical.unbind(0)))


FORMS: dict[str, Callable[[], Caches]] = {
    "LBHNC": lambda: one_storage("LBHNC"),
    "LBNHC": lambda: one_storage("LBNHC"),
    "LHBNC": lambda: one_storage("LHBNC"),
    "BLHNC": lambda: one_storage("BLHNC"),
    "BLNHC": lambda: one_storage("BLNHC"),
    "BHLNC": lambda: one_storage("BHLNC"),
    "keys and values apart": lambda: each_alone(2, BLOCKS, TOKENS, HEADS, SIZE),
    "keys and values apart, heads first": lambda: permuted(
        (2, BLOCKS, TOKENS, HEADS, SIZE), (0, 1, 3, 2, 4)
    ),
    "keys and values in a block": lambda: each_alone(BLOCKS, 2, TOKENS, HEADS, SIZE),
    "blocks innermost but one": lambda: permuted((2, BLOCKS, TOKENS * HEADS * SIZE), (0, 2, 1)),
    "latent": lambda: each_alone(BLOCKS, TOKENS, 72),
    "latent of one head": lambda: each_alone(BLOCKS, 1, TOKENS, 72),
    "kernel blocks": lambda: each_alone(2, BLOCKS * 4, TOKENS // 4, HEADS, SIZE),
    "unlike layers": lambda: named(
        [random_tensor(BLOCKS, HEADS, TOKENS, 2 * SIZE), random_tensor(BLOCKS, 1, TOKENS, 4)]
    ),
    "float8": lambda: named(
        [random_tensor(BLOCKS, HEADS, TOKENS, 6, dtype=torch.float8_e4m3fn) for _ in range(2)]
    ),
    "large": lambda: each_alone(BLOCKS, 8, TOKENS, 128),
}


def block_bytes(caches: Caches, geometry: BlockGeometry, block: int) -> bytes:
    """By the plainest way: element by element, layer by layer."""
    found = b""
    for tensor in caches.values():
        dim = 0 if tensor.shape[0] % BLOCKS == 0 else 1
        split = tensor.shape[dim] // BLOCKS
        part = tensor.narrow(dim, block * split, split).movedim(dim, 0)
        # In the order of memory; a dimension of size 1 has no place there.
        steps = [part.stride(d) if part.shape[d] > 1 else 1 << 60 for d in range(part.dim())]
        part = part.permute(sorted(range(part.dim()), key=lambda d: -steps[d]))
        found += part.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(found) == geometry.shard_bytes
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_block_goes_out_byte_by_byte_and_comes_back_into_another(form: str) -> None:
    caches = FORMS[form]()
    geometry = geometry_of(caches, BLOCKS)
    copier = cpu_copier(geometry)
    slots = [np.zeros(geometry.shard_bytes, dtype=np.uint8) for _ in range(3)]
    copier.copy_out([7, 2, 5], slots)
    wanted = [block_bytes(caches, geometry, block) for block in (7, 2, 5)]
    assert [slot.tobytes() for slot in slots] == wanted
    others = [block_bytes(caches, geometry, block) for block in (0, 2, 6, 7, 8)]
    copier.copy_in([1, 4, 3], slots)
    assert [block_bytes(caches, geometry, block) for block in (1, 4, 3)] == wanted
    assert [block_bytes(caches, geometry, block) for block in (0, 2, 6, 7, 8)] == others


@pytest.mark.parametrize("form", [form for form in FORMS if form != "blocks innermost but one"])
def test_a_gpu_would_copy_the_same_bytes_in_few_runs(form: str) -> None:
    caches = FORMS[form]()
    geometry = geometry_of(caches, BLOCKS)
    layout = layout_of(device_tensors(geometry))
    assert layout.shard_bytes == geometry.shard_bytes
    # Heads outside of blocks are a run each, keys and values two; tokens are never.
    assert len(layout.sizes) <= 2 * LAYERS * HEADS
    found = b""
    columns = (layout.addresses + np.uint64(5) * layout.steps, layout.sizes, layout.places)
    for address, size, place in zip(*map(np.ndarray.tolist, columns), strict=True):
        assert place == len(found)
        found += ctypes.string_at(address, size)
    assert found == block_bytes(caches, geometry, 5)


def test_a_layout_of_a_run_for_each_element_is_refused() -> None:
    caches = permuted((2, BLOCKS, 1 << 17), (0, 2, 1))
    with pytest.raises(BadRequest, match="runs"):
        layout_of(device_tensors(geometry_of(caches, BLOCKS)))


def test_large_parts_go_straight_and_small_ones_are_gathered() -> None:
    assert isinstance(cpu_copier(geometry_of(FORMS["large"](), BLOCKS)), StraightCopier)
    assert isinstance(cpu_copier(geometry_of(FORMS["LBHNC"](), BLOCKS)), GatheringCopier)


def test_more_blocks_than_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = FORMS["LBHNC"]()
    geometry = geometry_of(caches, BLOCKS)
    monkeypatch.setattr("kvtier.connector.vllm.copier.GATHER_BYTES", 2 * geometry.shard_bytes)
    slots = [np.zeros(geometry.shard_bytes, dtype=np.uint8) for _ in range(BLOCKS)]
    copier = GatheringCopier(geometry)
    copier.copy_out(list(range(BLOCKS)), slots)
    wanted = [block_bytes(caches, geometry, block) for block in range(BLOCKS)]
    assert [slot.tobytes() for slot in slots] == wanted
    copier.copy_in(list(reversed(range(BLOCKS))), slots)
    assert [block_bytes(caches, geometry, b) for b in reversed(range(BLOCKS))] == wanted


def test_layers_in_other_order_are_the_same_block() -> None:
    caches = FORMS["LBHNC"]()
    turned = dict(reversed(caches.items()))
    assert geometry_of(turned, BLOCKS).layout == geometry_of(caches, BLOCKS).layout
    first = geometry_of(caches, BLOCKS).planes[0].blocks.data_ptr()
    assert geometry_of(turned, BLOCKS).planes[0].blocks.data_ptr() == first


def test_layers_that_share_a_tensor_are_copied_once() -> None:
    caches = FORMS["LBHNC"]()
    shared = caches | {"model.layers.3.self_attn.attn": caches["model.layers.2.self_attn.attn"]}
    assert geometry_of(shared, BLOCKS).shard_bytes == geometry_of(caches, BLOCKS).shard_bytes


def test_a_layout_is_named_by_the_order_of_a_blocks_bytes() -> None:
    def layout_of(form: str) -> str:
        return geometry_of(FORMS[form](), BLOCKS).layout

    # Outside the block their keys and values lie apart, or next to each other: not within.
    assert layout_of("keys and values apart") == layout_of("keys and values in a block")
    assert layout_of("LBHNC") == layout_of("BLHNC")
    others = (
        *("LBHNC", "LBNHC", "keys and values apart", "kernel blocks", "latent"),
        "keys and values apart, heads first",
    )
    assert len({layout_of(form) for form in others}) == len(others)


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({}, "no KV cache"),
        (named([random_tensor(7, 5, 16)]), "surely counts"),
        (named([random_tensor(2, 2, 16)]), "surely counts"),
        ({"mamba": [random_tensor(BLOCKS, 4)]}, "not KV in blocks"),
    ],
)
def test_tensors_that_are_not_understood_are_refused_in_one_line(
    caches: Caches, words: str
) -> None:
    block_count = 2 if caches and next(iter(caches.values()))[0].shape[0] == 2 else BLOCKS
    with pytest.raises(Unsupported, match=words) as refused:
        geometry_of(caches, block_count)
    assert "\n" not in str(refused.value)
