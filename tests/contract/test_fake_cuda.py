"""The fake as the contract's member, on each kind of machine that it plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.cuda.fake import FakeCudart, FakeDevice
from tests.contract.cuda_contract import CudaContract, Rig


class TestFakeCudart(CudaContract):
    def make_runtime(self) -> FakeCudart:
        return FakeCudart()

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        runtime = self.make_runtime()
        rig = Rig(runtime)
        yield rig
        rig.close()
        runtime.assert_clean()
        assert runtime.memory.device.allocation_count == 0


class TestFakeCudartWithAliases(TestFakeCudart):
    """As under WSL2 and ROCm: registered memory has another address on the device."""

    def make_runtime(self) -> FakeCudart:
        return FakeCudart(device=FakeDevice(is_aliased=True))


class TestFakeCudartWithoutBatches(TestFakeCudart):
    """CUDA before 12.8."""

    def make_runtime(self) -> FakeCudart:
        return FakeCudart(device=FakeDevice(has_batches=False))


class TestFakeCudartOutOfOrder(TestFakeCudart):
    """Any order that streams and events allow."""

    def make_runtime(self) -> FakeCudart:
        return FakeCudart(seed=20)
