"""Where the engines of a test compute: in host memory, or on a fake GPU. A test need not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.engine.config import EngineConfig
from kvtier.engine.device import EngineDevice, HostDevice
from kvtier.engine.model import LlamaModel
from tests.support.fake_gpu import FakeGpu

if TYPE_CHECKING:
    from tests.support.device_worker import DeviceMemoryWorker


class HostForm:
    """As engines are by themselves."""

    def config_of(self, config: EngineConfig) -> EngineConfig:
        return config

    def make_device(self, model: LlamaModel, config: EngineConfig) -> EngineDevice:
        return HostDevice(model, config)

    def check(self) -> None:
        pass


class FakeGpuForm:
    """`seed`: of the order in which things happen; None: of a machine that is always the same.
    `by_layer`: engines that load compute beside their loads."""

    def __init__(self, seed: int | None = None, *, by_layer: bool = False) -> None:
        self.seed = seed
        self.by_layer = by_layer
        self.devices: list[FakeGpu] = []
        self.workers: list[DeviceMemoryWorker] = []

    def config_of(self, config: EngineConfig) -> EngineConfig:
        return replace(config, device="cuda", layerwise_loading=self.by_layer)

    def make_device(self, model: LlamaModel, config: EngineConfig) -> EngineDevice:
        self.devices.append(FakeGpu(model, config, seed=self.seed))
        return self.devices[-1]

    def check(self) -> None:
        waits = [device.cuda.synchronize_count for device in self.devices]
        assert not any(waits), "somebody waited for the device"
        for worker in self.workers:
            worker.close()
        for device in self.devices:
            device.cuda.assert_clean()


_forms: list[HostForm | FakeGpuForm] = [HostForm()]


def current_form() -> HostForm | FakeGpuForm:
    return _forms[-1]


@contextmanager
def engine_form(form: HostForm | FakeGpuForm) -> Iterator[None]:
    """Engines that tests make meanwhile are of this form."""
    _forms.append(form)
    try:
        yield
        form.check()
    finally:
        _forms.pop()
