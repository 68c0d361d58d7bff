"""`[cxl]`: memory below DRAM, as a node, a device, or emulated."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.config_values import (
    ANY_NODE,
    AUTO,
    Choice,
    Emulation,
    EmulationValue,
    NodeNumber,
    PathValue,
    Size,
    Switch,
    option,
)
from kvtier.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CxlConfig:
    """The CXL tier, below DRAM and above NVMe; there is one with `node`, `dax` or `emulate` set."""

    node: int = option(
        ANY_NODE,
        NodeNumber("none"),
        "NUMA node without processors that is the tier; `kvtier probe` lists them.",
    )
    dax: str = option(
        "",
        PathValue(),
        "Device such as /dev/dax0.0 that is the tier. One that holds somebody else's bytes is "
        "refused, see `kvtier format`.",
    )
    single_tenant: bool = option(
        False,
        Switch(),
        "All who may connect are one tenant, so that engines may map the node's memory or the "
        "device, with every block on it; see onboard.",
    )
    onboard: str = option(
        "auto",
        Choice("auto", "direct", "dram"),
        "How blocks reach engines: copied into DRAM first, or directly from the tier by engines "
        "that have mapped it, which needs single_tenant. auto: directly if the tier is read at "
        "more than half of DRAM's rate.",
    )
    emulate: Emulation | None = option(
        None,
        EmulationValue(),
        "Ordinary memory, slowed down to this, is the tier; for tries without CXL memory.",
    )
    bytes: int = option(
        AUTO,
        Size(2 * MIB, 64 << 40, auto=True),
        "Memory for blocks. auto: all that the node or the device has; of no use with emulate.",
    )
    slab_bytes: int = option(
        AUTO,
        Size(2 * MIB, GIB, auto=True),
        "Size of one slab, as dram.slab_bytes; on a device a multiple of its alignment.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is to be a CXL tier."""
        return self.node != ANY_NODE or self.dax != "" or self.emulate is not None


def check_cxl(cxl: CxlConfig) -> None:
    """What no single option can say; raises ConfigError."""
    given = {
        "cxl.node": cxl.node != ANY_NODE,
        "cxl.dax": cxl.dax != "",
        "cxl.emulate": cxl.emulate is not None,
    }
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are set: the tier is one of them")
    if cxl.emulate is not None and cxl.bytes == AUTO:
        raise ConfigError("cxl.emulate needs cxl.bytes: there is no memory whose size would do")
    if cxl.single_tenant and not cxl.dax and cxl.node == ANY_NODE:
        raise ConfigError("cxl.single_tenant is about cxl.dax and cxl.node: neither is set")
    if cxl.onboard == "direct" and not cxl.single_tenant:
        raise ConfigError(
            "cxl.onboard is direct: engines would map every tenant's blocks, so it needs "
            "cxl.single_tenant"
        )
    if cxl.slab_bytes != AUTO and cxl.slab_bytes % (2 * MIB):
        raise ConfigError(f"cxl.slab_bytes is {cxl.slab_bytes}: it must be a multiple of 2 MiB")
