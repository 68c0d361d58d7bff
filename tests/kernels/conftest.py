"""What runs the kernels: their host twin always, a GPU in `make gpu-check`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.kernel_device import open_device
from tests.support.kernel_twin import KernelLauncher, KernelTwin, build, has_compiler


@pytest.fixture(scope="session")
def host_twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelTwin]:
    if not has_compiler():
        pytest.skip("no g++ to build the kernels' host twin with")
    twin = KernelTwin(build(tmp_path_factory.mktemp("twin")))
    yield twin
    twin.close()


@pytest.fixture(scope="session")
def gpu() -> Iterator[KernelLauncher]:
    if os.environ.get("KVTIER_GPU") != "1":
        pytest.skip("KVTIER_GPU is not 1")
    device = open_device()
    yield device
    device.close()


@pytest.fixture(params=["host_twin", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> KernelLauncher:
    launcher: KernelLauncher = request.getfixturevalue(request.param)
    return launcher
