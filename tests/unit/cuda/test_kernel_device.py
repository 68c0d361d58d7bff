"""What runs the kernels' tests on a GPU, tried on a fake one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.fake_memory import FakeMemory
from tests.support.kernel_device import GUARD_BYTES, KernelDevice
from tests.support.kernel_twin import HostMemory
from tests.support.twin_kernels import copy_runs_twin


def device_of(twin: object = copy_runs_twin) -> tuple[FakeCudart, KernelDevice]:
    cuda = FakeCudart()
    cuda.add_twin("copy_runs", twin)  # type: ignore[arg-type]
    return cuda, KernelDevice(cuda, lambda source: source.encode())


def test_memory_goes_to_the_device_and_what_was_written_comes_back() -> None:
    cuda, device = device_of()
    source = HostMemory(np.arange(100, dtype=np.uint8), misalignment=3)
    target = HostMemory.zeros(100, misalignment=9)
    table = HostMemory.table([target.at(10), target.at(60)], [source.at(0), source.at(50)], [40, 7])
    for _ in range(2):
        device.launch("copy_runs", table.at(), 2, 1)
    expected = np.zeros(100, np.uint8)
    expected[10:50], expected[60:67] = source.data[:40], source.data[50:57]
    np.testing.assert_array_equal(target.data, expected)
    device.close()
    cuda.assert_clean()
    assert cuda.memory.device.allocation_count == 0


@pytest.mark.parametrize("beside", [-1, 16])
def test_a_write_beside_the_memory_is_found_out(beside: int) -> None:
    def stray(memory: FakeMemory, arguments: Sequence[int]) -> None:
        FakeMemory(memory.host, memory.device).on_device(arguments[0] + beside, 1)[0] ^= 1

    _, device = device_of(stray)
    assert abs(beside) < GUARD_BYTES
    with pytest.raises(AssertionError, match="beside"):
        device.launch("copy_runs", HostMemory.zeros(16).at())
