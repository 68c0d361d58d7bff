"""Limits and times of the block manager, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.core.tenancy import TenantBudget
from kvtier.policy.admission import Admission
from kvtier.types import TierName

# Leases together pin at most this part of the pool, so that there is always room to offload into.
PIN_FRACTION_MAX = 0.5


@dataclass(frozen=True, slots=True)
class LowerSettings:
    """Limits of what moves between memory and one tier below it."""

    write_bytes_per_hour: float = 0.0
    # Under way at once, each way: enough for every thread of a few drives, little to wait behind.
    transfer_bytes_max: int = 64 << 20
    # Likewise; beginning to move so many small blocks takes about 3 ms of one event.
    transfer_blocks_max: int = 512
    # One hop to the threads and back costs as much as a small block: many go together.
    batch_blocks: int = 64
    batch_bytes: int = 16 << 20
    # Of blocks that nobody has used twice, and of which no hint says that they will be.
    admission: Admission = Admission.FORECAST
    # Whether a forecast that no policy can make admits all, while the budget has room to spare.
    is_spare_written: bool = True
    # Whether what fills an empty pool is free: a drive is written once for it, others' stores are
    # asked by us for each block.
    is_filling_free: bool = True
    # How far a forecast looks at least; else as far as the budget takes to write the whole tier.
    forecast_seconds_min: float = 0.0
    # How long nothing is written after a block was refused: the queue is full, or an engine is off.
    refused_seconds: float = 1.0
    # How long a segment waits for blocks that go again before it is reused without them.
    retire_wait_seconds: float = 10.0
    # Whether what goes there, and what comes back, is compared with its checksum. Where it is not,
    # a copy is only as good as the one in memory, and goes with it when that is found corrupt.
    is_compared: bool = True
    # Prefetches together promote at most this part of the pool.
    prefetch_fraction_max: float = 0.125


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    slab_bytes: int
    slab_count_max: int
    lease_seconds_max: float = 60.0
    lease_margin_seconds: float = 5.0
    grace_seconds: float = 1.0
    watermark_start: float = 1.0
    watermark_stop: float = 0.98
    # An engine that dies holding leases blocks eviction until deadline + margin. This bounds the
    # books it can fill; what it can hold is bounded by pin_fraction_max.
    leases_per_session_max: int = 256
    # Higher than every lease of a life whose memory is adopted: an engine that ends one of that
    # life must not end another one by it.
    lease_first: int = 1
    pin_fraction_max: float = PIN_FRACTION_MAX
    # Stock reserved ahead: a session may hold 1 / (stock_divisor * live schedulers) of the slots.
    stock_divisor: int = 8
    # How long a namespace waits for slabs under way before it evicts its own blocks instead.
    growth_wait_seconds: float = 5.0
    # A namespace nobody has used for so long loses its claim to a fair share.
    idle_seconds: float = 600.0
    # Blocks handled between two turns of the event loop. At 2 to 3 µs a block this is 2 to 3 ms,
    # so that nobody waits longer than 5 ms behind one long chain.
    slice_blocks: int = 1024
    # Leasing what is in memory takes 0.2 µs a block; 1 µs where blocks came one by one.
    lease_slice_blocks: int = 4096
    # Evicting takes about 8 µs a block: likewise.
    evict_slice_blocks: int = 256
    # Sweeping takes about 5 µs a block that was in both tiers.
    swept_slice_blocks: int = 512
    # What tenants may have; those that are not named may have everything.
    tenants: Mapping[str, TenantBudget] = field(default_factory=dict)
    # The tiers below memory that there may be, the fastest first; each counts once it is opened.
    lower: Mapping[TierName, LowerSettings] = field(
        default_factory=lambda: {TierName.NVME: LowerSettings()}
    )
    # What policies know blocks by is salted with this, where a recording salts hashes likewise.
    key_salt: bytes = b""
