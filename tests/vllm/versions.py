"""What the vLLM here has; `make test-vllm-versions` runs the tests on older ones too.

`make test-vllm-033` runs them on a newer one's Python alone, of which no engine can be made.
"""

from __future__ import annotations

import importlib.util

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

HAS_TRANSFER_RESULTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
HAS_HIT_SOURCES = hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")
needs_transfer_results = pytest.mark.skipif(
    not HAS_TRANSFER_RESULTS, reason="the worker's calls that these tests make came after 0.28"
)
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("vllm._C") is None, reason="needs vLLM's compiled half"
)
