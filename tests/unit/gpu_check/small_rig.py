"""A stage's rig on a fake GPU: virtual time, kernels by their twins, compute of given lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.rig import Rig
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.kernel_cache import KernelCache
from kvtier.cuda.runtime import Stream
from tests.support.twin_kernels import TwinKernels

GEMM_SECONDS, DECODE_SECONDS, PREFILL_SECONDS_A_TOKEN = 2e-3, 1e-3, 1e-5


class FakeCompiler:
    version = "fake"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        return b"cubin"


class FakeWork:
    def __init__(self, cuda: FakeCudart) -> None:
        self._cuda = cuda

    def gemm(self, stream: Stream) -> None:
        self._cuda.compute(stream, GEMM_SECONDS, name="gemm")

    def decode_step(self, stream: Stream) -> None:
        self._cuda.compute(stream, DECODE_SECONDS, name="decode")

    def prefill(self, stream: Stream, token_count: int) -> None:
        self._cuda.compute(stream, token_count * PREFILL_SECONDS_A_TOKEN, name="prefill")


def _fake_gpu(cuda: FakeCudart, model: Any, config: Any) -> Any:
    from tests.support.fake_gpu import FakeGpu  # Torch, which one stage of many needs.

    return FakeGpu(model, config, cuda=cuda)


def rig_of(cuda: FakeCudart, *, with_kernels: bool = True, seconds: float = float("inf")) -> Rig:
    return Rig(
        cuda,
        make_work=lambda: FakeWork(cuda),
        make_kernels=lambda: TwinKernels(cuda) if with_kernels else None,
        kernel_cache=KernelCache(None, FakeCompiler()),
        now=lambda: cuda.now,
        rest=cuda.advance,
        deadline=seconds,
        stand_in=True,
        make_engine_device=lambda model, config: _fake_gpu(cuda, model, config),
    )
