"""How a worker on a GPU copies, on a stand-in for CUDA: by every path that is right there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.vllm.device import device_blocks
from kvtier.connector.vllm.geometry import geometry_of
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.kernel_copies import find_run_kernels
from tests.support.twin_kernels import copy_runs_twin

pytestmark = pytest.mark.vllm

MODULE = "kvtier.connector.vllm.device"


class StillCompiler:
    """What it makes is what the fake knows by its twin."""

    version = "none"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        return b"cubin"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCudart:
    cuda = FakeCudart(device=FakeDevice(device_bytes=1 << 30))
    cuda.add_twin("copy_runs", copy_runs_twin)
    monkeypatch.setattr(f"{MODULE}.open_cudart", lambda: cuda)
    monkeypatch.setattr(find_run_kernels, "__defaults__", (StillCompiler,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVTIER_KERNELS", raising=False)
    return cuda


def caches() -> dict[str, torch.Tensor]:
    return {"model.layers.0.attn": torch.zeros(2, 9, 16, 2, 8, dtype=torch.bfloat16)}


def test_a_worker_copies_short_runs_by_kernels_and_gives_them_up_with_its_lane(
    cuda: FakeCudart,
) -> None:
    free_bytes = cuda.free_bytes()
    blocks = device_blocks(geometry_of(caches(), 9), torch.device("cuda", 0), ConnectorSettings())
    assert blocks.streams.support.has_kernels
    blocks.make_lane().close()
    assert cuda.free_bytes() == free_bytes
    cuda.assert_clean()


def test_no_room_on_the_gpu_is_told_as_what_it_is(
    cuda: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FakeCudart(device=FakeDevice(device_bytes=1 << 20))
    monkeypatch.setattr(f"{MODULE}.open_cudart", lambda: full)
    with pytest.raises(Unsupported, match="run without kvtier"):
        device_blocks(geometry_of(caches(), 9), torch.device("cuda", 0), ConnectorSettings())
