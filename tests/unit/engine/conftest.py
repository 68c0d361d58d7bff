"""One thread, because the models are tiny; torch's first-use costs are paid beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import kvtier.engine  # noqa: F401 - before torch, see there

# isort: split
import pytest
import torch

from tests.support.tiny_models import prompt_of, tiny_engine


@pytest.fixture(scope="package", autouse=True)
def warm_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.einsum("hd,thd->ht", torch.ones(2, 2), torch.ones(3, 2, 2))
    tiny_engine().generate([prompt_of(9)])
    yield
    torch.set_num_threads(threads)
