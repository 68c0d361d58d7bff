"""Whole blocks between the KV tensor and slot views."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.copier import HostBlockCopier
from kvtier.engine.kv_cache import block_bytes, make_kv_cache, namespace_spec
from tests.support.tiny_models import TINY, random_model, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_travels_out_and_in_unchanged(dtype: torch.dtype) -> None:
    model, config = random_model(TINY, 0, dtype=dtype), EngineConfig(device_block_count=8)
    kv_cache = make_kv_cache(model, config)
    kv_cache.normal_()
    before = kv_cache.clone()
    copier = HostBlockCopier(kv_cache)
    assert copier.block_bytes == block_bytes(model, config)
    views = [np.empty(copier.block_bytes, np.uint8) for _ in range(2)]
    copier.copy_out([5, 2], views)
    copier.copy_in([1, 7], views)
    assert torch.equal(kv_cache[1], before[5])
    assert torch.equal(kv_cache[7], before[2])
    untouched = [0, 2, 3, 4, 5, 6]
    assert torch.equal(kv_cache[untouched], before[untouched])


def test_a_view_of_another_size_is_refused() -> None:
    copier = HostBlockCopier(make_kv_cache(tiny_model(), EngineConfig(device_block_count=2)))
    with pytest.raises(ValueError, match="broadcast"):
        copier.copy_out([0], [np.empty(copier.block_bytes + 1, np.uint8)])


def test_namespace_differs_by_weights_dtype_block_tokens_and_seed() -> None:
    config = EngineConfig()
    specs = [
        namespace_spec(tiny_model(), config),
        namespace_spec(random_model(TINY, 1), config),
        namespace_spec(random_model(TINY, 0, dtype=torch.bfloat16), config),
        namespace_spec(tiny_model(), EngineConfig(block_tokens=8)),
        namespace_spec(tiny_model(), EngineConfig(hash_seed="other")),
        namespace_spec(tiny_model(), config, tenant="t"),
        namespace_spec(tiny_model(), config, salt="s"),
    ]
    for spec in specs:
        spec.validate()
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert namespace_spec(random_model(TINY, 0), config).fingerprint() == specs[0].fingerprint()
