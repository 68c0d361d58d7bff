"""The reference engine on a GPU beside itself in host memory: `KVTIER_GPU=1`, or `make gpu-check`.

Needs torch alone: no daemon and no connector, whose stage is `engine`.
"""

from __future__ import annotations

import os

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("KVTIER_GPU") != "1", reason="KVTIER_GPU is not 1"),
]


def test_tokens_on_a_gpu_are_those_of_host_memory() -> None:
    from kvtier.engine.config import EngineConfig, SamplingParams
    from kvtier.engine.engine import Engine
    from tests.support.tiny_models import prompt_of, tiny_model, tokens_alone

    prompts = [prompt_of(count, seed=count) for count in (1, 4, 13, 22, 40)]
    params = SamplingParams(tokens_max=8)
    # Few device blocks and small steps: prompts in parts, preemption, decodes of unequal length.
    config = EngineConfig(
        block_tokens=4,
        device_block_count=24,
        step_tokens_max=16,
        running_count_max=8,
        device="cuda",
    )
    engine = Engine(tiny_model(), config)
    for _ in range(2):  # Computed, then with a cached prefix.
        results = engine.generate(prompts, params)
        expected = [tokens_alone(prompt, params) for prompt in prompts]
        assert [result.token_ids for result in results] == expected
    assert engine.check_invariants() == []


@pytest.mark.parametrize("head_size", [64, 128])
def test_kernels_of_ours_decode_as_torch_does(head_size: int) -> None:
    import torch

    from kvtier.engine.attention import TorchAttention
    from kvtier.engine.config import EngineConfig, ModelConfig
    from kvtier.engine.device import open_device
    from kvtier.engine.gpu.gpu_device import GpuDevice
    from kvtier.engine.gpu.kernel_attention import KernelAttention, are_alike
    from tests.support.tiny_models import random_model

    pytest.importorskip("cupy")
    shape = ModelConfig(
        layer_count=2,
        hidden_size=64,
        ffn_size=64,
        head_count=8,
        kv_head_count=2,
        head_size=head_size,
        vocab_size=97,
    )
    for block_tokens in (8, 16, 32):
        config = EngineConfig(block_tokens=block_tokens, device_block_count=16, device="cuda")
        device = open_device(random_model(shape, 1, dtype=torch.bfloat16), config)
        assert isinstance(device, GpuDevice)
        assert isinstance(device.attention, KernelAttention), "see the log for why"
        assert are_alike(device, device.attention, TorchAttention(device.kv_cache))
