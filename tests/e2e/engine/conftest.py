"""The engine's say about OpenMP must come before torch, which the tests import first."""

import kvtier.engine  # noqa: F401

# isort: split

import pytest
import torch
from transformers import LlamaForCausalLM

from kvtier.engine.files.smollm2 import load_smollm2
from kvtier.engine.files.tokenizer import Tokenizer
from kvtier.engine.model import LlamaModel
from tests.support.transformers_twin import to_transformers


@pytest.fixture(scope="package")
def smollm2() -> tuple[LlamaModel, Tokenizer]:
    """Loaded once: it takes seconds."""
    torch.set_num_threads(2)
    return load_smollm2()


@pytest.fixture(scope="package")
def smollm2_twin(smollm2: tuple[LlamaModel, Tokenizer]) -> LlamaForCausalLM:
    return to_transformers(smollm2[0])
