"""How the processes of one engine know each other, and whether they run on one machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvtier.client.base import ENGINE_ID_BYTES


def engine_id_of(vllm_config: Any) -> bytes:
    """Equal in all processes of one start of an engine, and in no other.

    A user may give engines a fixed id, and an engine that is started again must not be taken for
    the one that died: hence vLLM's instance id, which is new at each start.
    """
    transfer = vllm_config.kv_transfer_config
    facts = (
        transfer.engine_id,
        vllm_config.instance_id,
        vllm_config.parallel_config.data_parallel_rank,
    )
    return hashlib.sha256(repr(facts).encode()).digest()[:ENGINE_ID_BYTES]


def machine_id() -> str:
    """Equal in all processes under one kernel, in whatever containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
