"""What follows from the configuration and this machine, before anything is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import Config, slab_bytes_for
from kvtier.config_values import AUTO
from kvtier.errors import ConfigError
from kvtier.io.budget import available_bytes
from kvtier.io.nodes import node_room_bytes
from kvtier.server.activation import Listeners
from kvtier.server.keeping import Keeper
from kvtier.server.tenants import Tenant, tenants_of

BUDGET_BYTES_MAX = 64 << 30
HUGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the configuration and this machine, before anything is made."""

    tenants: tuple[Tenant, ...]  # The owner of server.socket first.
    state_dir: Path
    generation: int
    slab_bytes: int
    slab_count_max: int
    page_kind: str = ""
    listeners: Listeners = field(default_factory=Listeners)
    keeper: Keeper = field(default_factory=Keeper)

    @property
    def socket(self) -> Path:
        """Of the operator."""
        return self.tenants[0].socket


def plan_memory(config: Config, socket: Path, state_dir: Path, *, generation: int) -> Plan:
    """Work out `auto`: a quarter of what is available, cut into slabs."""
    budget_bytes = config.dram.bytes
    if budget_bytes == AUTO:
        available = available_bytes()
        if available is None:
            raise ConfigError("nobody tells how much memory is available: set dram.bytes")
        if config.dram.nodes:
            rooms = [node_room_bytes(node) or 0 for node in config.dram.nodes]
            available = min(available, min(rooms) * len(rooms))
        budget_bytes = min(BUDGET_BYTES_MAX, available // 4)
    slab_bytes = config.dram.slab_bytes
    if slab_bytes == AUTO:
        slab_bytes = slab_bytes_for(budget_bytes)
    if budget_bytes < slab_bytes:
        raise ConfigError(f"{budget_bytes} bytes of memory hold no slab of {slab_bytes}")
    return Plan(
        tenants=tenants_of(config.server.tenant, socket, config.tenant),
        state_dir=state_dir,
        generation=generation,
        slab_bytes=slab_bytes,
        slab_count_max=budget_bytes // slab_bytes,
    )
