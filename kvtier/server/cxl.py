"""Opens the memory that `[cxl]` names."""

from __future__ import annotations

import logging
from pathlib import Path

from kvtier.clock import Clock
from kvtier.config import slab_bytes_for
from kvtier.config_cxl import CxlConfig
from kvtier.config_values import ANY_NODE, AUTO
from kvtier.io.dax import find_dax_device
from kvtier.io.nodes import node_room_bytes
from kvtier.io.throttle import EmulatedSpeed
from kvtier.pools.cxl import CxlMemory, DaxMemory, EmulatedMemory, NodeMemory
from kvtier.pools.source import assert_usable

log = logging.getLogger(__name__)


def open_cxl(config: CxlConfig, clock: Clock, *, generation: int) -> CxlMemory | None:
    """None without a CXL tier; ConfigError, in one line, for one that cannot be had.

    May take a moment: a device's start is looked at.
    """
    memory = _open(config, clock, generation)
    if memory is not None:
        log.info(
            "cxl memory opened",
            extra={"memory": memory.label, "slabs": memory.slab_count_max},
        )
        if config.emulate is not None:
            log.warning("the cxl tier is emulated: it is ordinary memory, slowed down")
    return memory


def _open(config: CxlConfig, clock: Clock, generation: int) -> CxlMemory | None:
    budget_bytes = None if config.bytes == AUTO else config.bytes
    if config.node != ANY_NODE:
        assert_usable(config.node)
        room_bytes = budget_bytes or node_room_bytes(config.node) or 0
        slab_bytes = _slab_bytes(config, room_bytes)
        return NodeMemory(
            config.node,
            slab_bytes=slab_bytes,
            budget_bytes=budget_bytes,
            is_single_tenant=config.single_tenant,
        )
    if config.dax:
        device = find_dax_device(Path(config.dax))
        slab_bytes = _slab_bytes(config, budget_bytes or device.size_bytes)
        if config.slab_bytes == AUTO:
            slab_bytes = -(-slab_bytes // device.align_bytes) * device.align_bytes
        return DaxMemory(
            device,
            slab_bytes=slab_bytes,
            generation=generation,
            budget_bytes=budget_bytes,
            is_single_tenant=config.single_tenant,
        )
    if config.emulate is not None:
        assert budget_bytes is not None, "the configuration was not checked"
        return EmulatedMemory(
            EmulatedSpeed(config.emulate.bytes_per_second, config.emulate.latency_seconds),
            clock,
            slab_bytes=_slab_bytes(config, budget_bytes),
            budget_bytes=budget_bytes,
        )
    return None


def _slab_bytes(config: CxlConfig, budget_bytes: int) -> int:
    return slab_bytes_for(budget_bytes) if config.slab_bytes == AUTO else config.slab_bytes
