"""Set-ups that are not supported: refused when the engine starts, in one line that says what to do.

To go on in a set-up that is not understood could load wrong KV, or crash in the middle of a day.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtier.errors import ConfigError

log = logging.getLogger(__name__)


class Unsupported(ConfigError):
    """This engine cannot run with kvtier as it is configured."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported; both sides ask, whichever is made first."""
    parallel = vllm_config.parallel_config
    for name, text in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            _refuse(f"{text} ({name}={size}) is not supported yet", "set it to 1")
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1:
        _refuse(f"an engine on {nodes} nodes is not supported", "run each engine on one node")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        _refuse("sleep mode is not supported", "run without --enable-sleep-mode")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        _refuse(
            "scales calculated at run time differ from engine to engine",
            "run without --calculate-kv-scales",
        )
    if kv_cache_config is None:
        _refuse("this vLLM does not tell connectors the KV cache's form", "use vLLM 0.28 or newer")


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


def layer_specs(group_spec: Any) -> list[Any]:
    """The specs of a group's layers; one for all where they are equal."""
    by_layer = getattr(group_spec, "kv_cache_specs", None)
    return [group_spec] if by_layer is None else list(by_layer.values())


def _refuse(what: str, advice: str) -> None:
    raise Unsupported(f"kvtier: {what}; {advice}, or without kvtier")
