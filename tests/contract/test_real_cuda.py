"""The contract on a GPU: `KVTIER_GPU=1`, or `make gpu-check`."""

from __future__ import annotations

import os

import pytest

from kvtier.cuda.cudart import Cudart, open_cudart
from tests.contract.cuda_contract import CudaContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("KVTIER_GPU") != "1", reason="KVTIER_GPU is not 1"),
]


class TestCudart(CudaContract):
    def make_runtime(self) -> Cudart:
        return open_cudart()


class TestCudartWithoutBatches(CudaContract):
    def make_runtime(self) -> Cudart:
        os.environ["KVTIER_CUDA_BATCH"] = "0"
        try:
            return open_cudart()
        finally:
            del os.environ["KVTIER_CUDA_BATCH"]
