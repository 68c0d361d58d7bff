"""What kernels are told of a step, by kernels in NumPy that believe it; and when none are used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.cuda.attention_kernels import DecodeStep, KvGeometry, NewTokens
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.runtime import LEGACY_STREAM, Ranges, Stream
from kvtier.engine.attention import TorchAttention, plan_attention
from kvtier.engine.config import EngineConfig, ModelConfig
from kvtier.engine.gpu.gpu_device import GpuDevice
from kvtier.engine.gpu.kernel_attention import KernelAttention, are_alike, engine_geometry
from kvtier.engine.model import LlamaModel
from tests.support.tiny_models import TINY, random_model

SHAPE = ModelConfig(
    layer_count=3,
    hidden_size=64,
    ffn_size=16,
    head_count=6,
    kv_head_count=2,
    head_size=64,
    vocab_size=50,
)
CONFIG = EngineConfig(block_tokens=4, device_block_count=16)
NAMES = ("write_kv", "paged_attention_bf16_64", "merge_splits_bf16_64")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the user's kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class FakeCompiler:
    version = "fake"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        return b"cubin"


class NearbyGpu(GpuDevice):
    """In host memory, and its kernels get the host's addresses."""

    def stream(self) -> Stream:
        return LEGACY_STREAM


def gpu_of(
    model: LlamaModel, cuda: FakeCudart | None = None, compiler: type[FakeCompiler] = FakeCompiler
) -> NearbyGpu:
    return NearbyGpu(
        model, CONFIG, cuda or FakeCudart(), torch.device("cpu"), make_compiler=compiler
    )


def model_of(dtype: torch.dtype = torch.bfloat16) -> LlamaModel:
    return random_model(SHAPE, 1, dtype=dtype)


def numbers(address: int, count: int, kind: type[np.generic]) -> np.ndarray:
    length = count * np.dtype(kind).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address)).view(kind)


def row(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(numbers(address, count, np.int16)).view(torch.bfloat16)


class NumpyKernels:
    """Does what kernels/README.md says, with the numbers that it is given."""

    def __init__(self, geometry: KvGeometry) -> None:
        self.geometry = geometry

    def write(self, tokens: NewTokens, layer: int, written: Ranges, stream: Stream) -> None:
        count = self.geometry.head_count * self.geometry.head_size
        for token, place in enumerate(numbers(tokens.places, tokens.count, np.int64).tolist()):
            block, offset = divmod(place, self.geometry.block_tokens)
            for source, step, side in (
                (tokens.keys, tokens.key_step, 0),
                (tokens.values, tokens.value_step, 1),
            ):
                new = row(source + token * step, count).view(self.geometry.head_count, -1)
                for head in range(self.geometry.head_count):
                    self.kv(layer, block, head, offset, side)[:] = new[head]

    def attend(self, step: DecodeStep, layer: int, read: Ranges, stream: Stream) -> None:
        geometry = self.geometry
        table_numbers = numbers(step.tables, step.request_count * step.table_blocks, np.int32)
        tables = table_numbers.reshape(step.request_count, -1)
        counts = numbers(step.kv_counts, step.request_count, np.int32).tolist()
        assert step.kv_count_max >= max(counts)
        out, queries = (
            row(address, step.request_count * SHAPE.head_count * geometry.head_size).view(
                step.request_count, SHAPE.head_count, -1
            )
            for address in (step.out, step.queries)
        )
        for request, kv_count in enumerate(counts):
            for head in range(SHAPE.head_count):
                keys, values = (
                    torch.stack(
                        [
                            self.kv(
                                layer,
                                int(tables[request][token // geometry.block_tokens]),
                                head // SHAPE.group_size,
                                token % geometry.block_tokens,
                                side,
                            ).float()
                            for token in range(kv_count)
                        ]
                    )
                    for side in range(2)
                )
                scores = keys @ queries[request, head].float() * geometry.head_size**-0.5
                out[request, head] = (scores.softmax(0) @ values).to(torch.bfloat16)

    def kv(self, layer: int, block: int, head: int, token: int, side: int) -> torch.Tensor:
        geometry = self.geometry
        address = (
            geometry.base
            + layer * geometry.layer_step
            + block * geometry.block_step
            + head * geometry.head_step
            + token * geometry.token_step
            + side * geometry.value_step
        )
        return row(address, geometry.head_size)


def kernels_of(gpu: NearbyGpu) -> NumpyKernels:
    return NumpyKernels(engine_geometry(gpu.kv_cache, gpu.address_of(gpu.kv_cache)))


SPANS = {
    "decodes of unequal length": [(3, 4), (6, 7), (12, 13)],
    "a prompt, a rest and decodes": [(0, 6), (5, 6), (4, 9), (11, 12)],
    "a prompt alone": [(0, 7)],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_a_step_by_kernels_is_a_step_by_torch(spans: list[tuple[int, int]]) -> None:
    gpu = gpu_of(model_of())
    torch.manual_seed(3)
    gpu.kv_cache.normal_()
    before = gpu.kv_cache.clone()
    blocks = iter([5, 14, 2, 9, 11, 0, 7, 3, 8, 1, 4, 6])
    tables = [[next(blocks) for _ in range(-(-end // 4))] for _, end in spans]
    plan = plan_attention(tables, spans, CONFIG.block_tokens, gpu.put)
    token_count = sum(end - first for first, end in spans)
    # As the model has them: parts of wider rows.
    rows = torch.randn(token_count, 10, 64).to(torch.bfloat16)
    queries, keys, values = rows[:, :6], rows[:, 6:8], rows[:, 8:]
    found = []
    for attention in (KernelAttention(gpu, kernels_of(gpu)), TorchAttention(gpu.kv_cache)):
        gpu.kv_cache.copy_(before)
        for layer in range(SHAPE.layer_count):
            attention.write(layer, keys, values, plan)
        found.append((gpu.kv_cache.clone(), attention.attend(1, queries, plan).float()))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], before)
    torch.testing.assert_close(found[0][1], found[1][1], atol=2e-2, rtol=2e-2)


def test_numbers_of_another_step_are_made_anew() -> None:
    gpu = gpu_of(model_of())
    gpu.kv_cache.normal_()
    by_kernels = KernelAttention(gpu, kernels_of(gpu))
    queries = torch.randn(1, 6, 64).to(torch.bfloat16)
    outs = [
        by_kernels.attend(0, queries, plan_attention([[block]], [(3, 4)], 4)) for block in (1, 2)
    ]
    assert not torch.equal(*outs)


def forget_a_token(kernels: NumpyKernels) -> None:
    kernels.attend = lambda step, layer, read, stream: None  # type: ignore[method-assign]


def write_elsewhere(kernels: NumpyKernels) -> None:
    write = kernels.write
    kernels.write = (  # type: ignore[method-assign]
        lambda tokens, layer, written, stream: write(tokens, 0, written, stream)
    )


def test_kernels_are_tried_and_the_cache_is_as_empty_as_before() -> None:
    gpu = gpu_of(model_of())
    by_torch = TorchAttention(gpu.kv_cache)
    assert are_alike(gpu, KernelAttention(gpu, kernels_of(gpu)), by_torch)
    assert not gpu.kv_cache.any()


@pytest.mark.parametrize("spoil", [forget_a_token, write_elsewhere])
def test_kernels_with_other_numbers_are_found(spoil: Callable[[NumpyKernels], None]) -> None:
    gpu = gpu_of(model_of())
    kernels = kernels_of(gpu)
    spoil(kernels)
    assert not are_alike(gpu, KernelAttention(gpu, kernels), TorchAttention(gpu.kv_cache))


def test_kernels_that_do_nothing_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCudart()
    for name in NAMES:
        cuda.add_twin(name, lambda memory, arguments: None)
    gpu = gpu_of(model_of(), cuda)
    assert isinstance(gpu.attention, TorchAttention)
    assert "give other numbers" in caplog.text


def refused(caplog: pytest.LogCaptureFixture) -> str:
    [record] = caplog.records
    return record.getMessage()


def test_without_kernels_torch_computes_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(gpu_of(model_of()).attention, TorchAttention)  # No such function.
    assert "without kernels" in refused(caplog)
    caplog.clear()
    assert isinstance(gpu_of(model_of(torch.float32)).attention, TorchAttention)
    assert "not torch.float32" in refused(caplog)
    caplog.clear()
    small = gpu_of(random_model(TINY, 1, dtype=torch.bfloat16))
    assert isinstance(small.attention, TorchAttention)
    assert "head sizes" in refused(caplog)
    caplog.clear()
    monkeypatch.setenv("KVTIER_KERNELS", "0")
    assert isinstance(gpu_of(model_of()).attention, TorchAttention)
    assert not caplog.records
