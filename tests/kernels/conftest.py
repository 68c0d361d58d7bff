"""The kernels' host twin, built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel_twin import KernelTwin, build, has_compiler


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelTwin]:
    if not has_compiler():
        pytest.skip("no g++ to build the kernels' host twin with")
    twin = KernelTwin(build(tmp_path_factory.mktemp("twin")))
    yield twin
    twin.close()
