"""What things cost on the fake GPU, in virtual seconds.

The figures are from public reports about PCIe 5 hosts, not measured here. What tests conclude from
them are shapes (what overlaps, what waits for what), never speeds of a real machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cuda.runtime import Addresses, Direction


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """A PCIe 5 link, copy engines that are slow at small copies, and calls that take host time."""

    call_seconds: float = 1e-6
    copy_call_seconds: float = 2.3e-6
    descriptor_seconds: float = 0.5e-6  # Of the host, for each copy in a batch.
    link_bytes_per_second: float = 54e9
    device_bytes_per_second: float = 2e12
    pageable_bytes_per_second: float = 6e9
    # A copy engine's own time for one copy: the cliff below 28 KiB is upwards only.
    copy_seconds: float = 0.1e-6
    small_copy_bytes: int = 28 << 10
    small_to_device_seconds: float = 1.6e-6
    small_to_host_seconds: float = 0.4e-6
    kernel_start_seconds: float = 3e-6
    kernel_bytes_per_second: float = 40e9  # A copy kernel of a few blocks of threads.
    register_bytes_per_second: float = 10e9

    def engine_seconds(self, sizes: Addresses, direction: Direction) -> float:
        """How long the copy engine is busy with these copies."""
        total_bytes = int(sizes.sum())
        if direction is Direction.DEVICE_TO_DEVICE:
            return self.copy_seconds * len(sizes) + total_bytes / self.device_bytes_per_second
        small_count = int((sizes < self.small_copy_bytes).sum())
        is_up = direction is Direction.HOST_TO_DEVICE
        small_seconds = self.small_to_device_seconds if is_up else self.small_to_host_seconds
        return (
            self.copy_seconds * (len(sizes) - small_count)
            + small_seconds * small_count
            + total_bytes / self.link_bytes_per_second
        )
