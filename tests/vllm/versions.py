"""What the vLLM here has; `make test-vllm-versions` runs the tests on older ones too."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

HAS_TRANSFER_RESULTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
HAS_HIT_SOURCES = hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")
needs_transfer_results = pytest.mark.skipif(
    not HAS_TRANSFER_RESULTS, reason="the worker's calls that these tests make came after 0.28"
)
