"""One thread, because the models are tiny; torch's first-use costs are paid beforehand."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(params=["in host memory", "on a fake GPU", "on a fake GPU of chance"])
def everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with its engines in each of these places."""
    forms: dict[str, HostForm | FakeGpuForm] = {
        "in host memory": HostForm(),
        "on a fake GPU": FakeGpuForm(),
        "on a fake GPU of chance": FakeGpuForm(seed=1),
    }
    with engine_form(forms[request.param]):
        yield
