"""What these tests run on: a node without processors, a dax device, both real (or emulated below).

`make test-cxl` brings a virtual machine with them. On a machine that has such memory:

    KVTIER_CXL_NODE=1 KVTIER_CXL_DAX=/dev/dax0.0 pytest -m cxl tests/cxl

The device is overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def given(variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        pytest.skip(f"{variable} is not set: `make test-cxl` brings a machine with CXL memory")
    return value


@pytest.fixture
def node() -> int:
    """A NUMA node that has memory and no processors."""
    return int(given("KVTIER_CXL_NODE"))


@pytest.fixture
def device_path() -> Path:
    """A dax device whose bytes nobody needs."""
    return Path(given("KVTIER_CXL_DAX"))
