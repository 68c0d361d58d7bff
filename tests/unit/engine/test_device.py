"""Where an engine computes: what is refused, what goes there, how its copies are made."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.connector import ConnectorSettings
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.cuda.errors import CudaUnavailable
from kvtier.cuda.fake import FakeCudart
from kvtier.engine.config import EngineConfig
from kvtier.engine.connect import connected_engine
from kvtier.engine.device import HostDevice, open_device
from kvtier.engine.engine import Engine
from kvtier.engine.gpu.gpu_device import GpuDevice, kv_layout, model_on
from kvtier.engine.kv_cache import block_bytes, make_kv_cache
from tests.support.clock import ManualClock
from tests.support.fake_client import FakeClient
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import TINY, random_model, tiny_model
from tests.support.twin_kernels import copy_runs_twin

CONFIG = EngineConfig(block_tokens=4, device_block_count=8)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="it must be cpu, cuda or cuda:N"):
        EngineConfig(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu_an_engine_for_one_says_so(device: str) -> None:
    with pytest.raises(CudaUnavailable, match="torch finds no GPU"):
        Engine(tiny_model(), EngineConfig(device=device))


def test_an_engine_computes_in_host_memory_by_itself() -> None:
    assert isinstance(open_device(tiny_model(), CONFIG), HostDevice)


def test_integers_arrive_as_they_were() -> None:
    gpu = GpuDevice(tiny_model(), CONFIG, FakeCudart(), torch.device("cpu"))
    columns = [torch.arange(5), torch.empty(0, dtype=torch.int64), torch.arange(6).view(2, 3)]
    placed = gpu.put(columns)
    assert all(torch.equal(*pair) for pair in zip(columns, placed, strict=True))


def test_weights_that_move_keep_their_name_and_what_is_tied() -> None:
    model = random_model(TINY, 7)
    assert model_on(model, torch.device("cpu")) is model
    moved = model_on(model, torch.device("meta"))
    assert moved.weights.layers[1].down.device.type == "meta"
    assert moved.cosines.device.type == "meta"
    assert moved.weights.output is moved.weights.embedding
    assert make_kv_cache(moved, CONFIG).device.type == "meta"


def test_a_block_is_one_run_of_bytes_as_in_host_memory() -> None:
    layout = kv_layout(make_kv_cache(tiny_model(), CONFIG), 4096)
    assert layout.addresses.tolist() == [4096]
    assert layout.sizes.tolist() == layout.steps.tolist() == [block_bytes(tiny_model(), CONFIG)]


class CarefulGpu(FakeGpu):
    _try_paths = GpuDevice._try_paths


def test_ways_of_copying_are_tried_before_the_first_copy() -> None:
    gpu = CarefulGpu(tiny_model(), CONFIG)
    assert gpu.cuda.copies.copied_bytes == 0
    gpu.make_blocks(ConnectorSettings())
    assert gpu.cuda.copies.copied_bytes > 0
    gpu.cuda.assert_clean()


class StillCompiler:
    """What it makes is what the fake knows by its twin."""

    version = "none"

    def compile(self, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        return b"cubin"


@pytest.mark.slow
def test_short_runs_go_by_kernels_where_there_are_any_and_the_lane_gives_them_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVTIER_KERNELS", raising=False)
    gpu = CarefulGpu(tiny_model(), CONFIG)
    assert not gpu.make_blocks(ConnectorSettings()).streams.support.has_kernels
    gpu.cuda.add_twin("copy_runs", copy_runs_twin)
    gpu._make_compiler = StillCompiler
    free_bytes = gpu.cuda.free_bytes()
    blocks = gpu.make_blocks(ConnectorSettings())
    assert blocks.streams.support.has_kernels
    assert gpu.cuda.free_bytes() < free_bytes
    blocks.make_lane().close()
    assert gpu.cuda.free_bytes() == free_bytes
    gpu.cuda.assert_clean()


def test_a_gpu_that_cannot_copy_leaves_no_half_of_the_connector_behind() -> None:
    class Deaf(FakeGpu):
        def make_blocks(self, settings: ConnectorSettings) -> DeviceBlocks:
            raise CudaUnavailable("plain copies move wrong bytes")

    model = tiny_model()
    client: Any = FakeClient(ManualClock(), slot_count=4, shard_bytes=block_bytes(model, CONFIG))
    before = set(threading.enumerate())
    with (
        pytest.raises(CudaUnavailable),
        connected_engine(model, CONFIG, client, device=Deaf(model, CONFIG)),
    ):
        pass
    assert set(threading.enumerate()) == before
