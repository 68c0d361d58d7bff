"""Set-ups that are not supported: refused when the engine starts, in one line that says what to do.

To go on in a set-up that is not understood could load wrong KV, or crash in the middle of a day.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtier.connector.vllm.groups import check_grouped, is_grouped
from kvtier.connector.vllm.unsupported import refuse

log = logging.getLogger(__name__)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported; both sides ask, whichever is made first."""
    parallel = vllm_config.parallel_config
    for name, text in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            refuse(f"{text} ({name}={size}) is not supported yet", "set it to 1")
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1:
        refuse(f"an engine on {nodes} nodes is not supported", "run each engine on one node")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        refuse("sleep mode is not supported", "run without --enable-sleep-mode")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        refuse(
            "scales calculated at run time differ from engine to engine",
            "run without --calculate-kv-scales",
        )
    if _is_blind_to_prefixes(vllm_config):
        refuse(
            "this engine computes MLA prompts without the KV before them, and would answer wrongly"
            " after a hit (vLLM on CPUs)",
            "run it on a GPU, or without kvtier",
        )
    if kv_cache_config is None:
        refuse("this vLLM does not tell connectors the KV cache's form", "use vLLM 0.28 or newer")
    if is_grouped(kv_cache_config):
        check_grouped(vllm_config, kv_cache_config)


def _is_blind_to_prefixes(vllm_config: Any) -> bool:
    """vLLM's MLA for CPUs; its own sign of it is that it switches chunked prefill off."""
    return bool(
        getattr(vllm_config.model_config, "use_mla", False)
        and vllm_config.device_config.device_type == "cpu"
        and not vllm_config.scheduler_config.enable_chunked_prefill
    )


def warn_of_failing_loads(transfer_config: Any) -> None:
    """vLLM's default ends a request over a block that could just be computed; say so once a start.

    Inside a MultiConnector ours is not the setting that counts, and the outer one is not shown.
    """
    policy = getattr(transfer_config, "kv_load_failure_policy", "fail")
    if policy == "fail" and transfer_config.is_kv_consumer:
        log.warning(
            'kvtier: kv_load_failure_policy is "fail": a request whose block cannot be loaded ends'
            ' with an error; set "kv_load_failure_policy": "recompute" in --kv-transfer-config, and'
            " vLLM computes the block instead (in a MultiConnector: the outer one's counts; set it"
            " in both)"
        )
