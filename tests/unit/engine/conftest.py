"""One thread, because the models are tiny; torch's first-use costs are paid beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import kvtier.engine  # noqa: F401 - before torch, see there

# isort: split
import pytest
import torch

from tests.support.engine_form import FakeGpuForm, HostForm, engine_form
from tests.support.tiny_models import prompt_of, tiny_engine


@pytest.fixture(scope="package", autouse=True)
def warm_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.einsum("hd,thd->ht", torch.ones(2, 2), torch.ones(3, 2, 2))
    tiny_engine().generate([prompt_of(9)])
    yield
    torch.set_num_threads(threads)


FORMS: dict[str, Callable[[], HostForm | FakeGpuForm]] = {
    "in host memory": HostForm,
    "on a fake GPU": FakeGpuForm,
    "on a fake GPU of chance": lambda: FakeGpuForm(seed=1),
}
LAYERWISE = "on a fake GPU, by layer"


@pytest.fixture(params=FORMS)
def everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with its engines in each of these places."""
    with engine_form(FORMS[request.param]()):
        yield


@pytest.fixture(params=[*FORMS, LAYERWISE])
def every_load(request: pytest.FixtureRequest) -> Iterator[None]:
    """As `everywhere`, and with an engine that computes beside its loads."""
    make = FORMS.get(request.param, lambda: FakeGpuForm(seed=2, by_layer=True))
    with engine_form(make()):
        yield
