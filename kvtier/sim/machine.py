"""What a simulated node is made of: tiers with rates and delays, engines with rates."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
GB = 1_000_000_000
HOURS_A_DAY = 24


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes, rates in bytes or tokens a second, delays in seconds."""

    dram_bytes: int = 64 * GIB
    nvme_bytes: int = 0  # 0: there is none.
    bytes_per_token: int = 128 << 10  # Of KV; all shards together.
    # Copies between engine and DRAM, each way; all engines share it.
    dram_bytes_per_second: float = 20.0 * GB
    dram_delay_seconds: float = 20e-6
    nvme_read_bytes_per_second: float = 6.0 * GB
    nvme_write_bytes_per_second: float = 3.0 * GB
    nvme_delay_seconds: float = 100e-6
    # None: the pool once in a day, as the daemon has it.
    nvme_write_bytes_per_hour: float | None = None
    # Engines take requests in turns; each computes one prompt at a time.
    engine_count: int = 4
    prefill_tokens_per_second: float = 20_000.0
    decode_tokens_per_second: float = 50.0  # Of one request, whatever runs beside it.
    wait_seconds_max: float = 10.0  # For blocks that are on NVMe.

    @property
    def write_bytes_per_hour(self) -> float:
        if self.nvme_write_bytes_per_hour is not None:
            return self.nvme_write_bytes_per_hour
        return self.nvme_bytes / HOURS_A_DAY


class Lane:
    """One after the other, at a rate, each with a delay of its own that nobody else waits for."""

    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self._rate, self._delay = bytes_per_second, delay_seconds
        self._free_at = 0.0
        self.moved_bytes = 0
        self.busy_seconds = 0.0

    def move(self, now: float, length_bytes: int) -> float:
        """When this many bytes, asked for now, will have been moved."""
        if not length_bytes:
            return now
        seconds = length_bytes / self._rate
        self._free_at = max(now, self._free_at) + seconds
        self.moved_bytes += length_bytes
        self.busy_seconds += seconds
        return self._free_at + self._delay
