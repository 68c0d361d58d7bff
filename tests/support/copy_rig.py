"""An engine's KV, slots in two slabs, and the copies between them, on a fake GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.cuda.copy_paths import PathLimits
from kvtier.cuda.copy_plan import Piece
from kvtier.cuda.copy_submit import KernelCopies
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.registration import SlabRegistry
from kvtier.cuda.runtime import Ranges, Stream
from kvtier.cuda.streams import IN_FLIGHT_BYTES_MAX, CopyStreams, CopyTicket
from kvtier.memory import Bytes
from tests.support.kv_layouts import DeviceKv
from tests.support.pinned import HostSlab

SLAB_COUNT = 2


class CopyRig:
    """`slot_count` slots in all, half of them in each slab."""

    def __init__(
        self,
        cuda: FakeCudart,
        kv: DeviceKv,
        *,
        slot_count: int = 8,
        limits: PathLimits | None = None,
        kernels: KernelCopies | None = None,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        may_store: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.cuda, self.kv = cuda, kv
        self.shard_bytes = kv.layout.shard_bytes
        self.slot_bytes = -(-self.shard_bytes // 64) * 64
        half = slot_count // SLAB_COUNT
        self.slabs = [HostSlab(half * self.slot_bytes) for _ in range(SLAB_COUNT)]
        self.registry = SlabRegistry(cuda)
        self.slots: list[int] = []
        for slab in self.slabs:
            self.registry.add(slab.address, slab.length_bytes)
            self.slots += [slab.address + index * self.slot_bytes for index in range(half)]
        self.compute = cuda.create_stream(0)
        self.streams = CopyStreams(
            cuda,
            self.registry,
            kernels=kernels,
            limits=limits,
            in_flight_bytes_max=in_flight_bytes_max,
            may_store=may_store,
        )
        self.poll_seconds = 2e-6 if cuda.timeline.is_even else 100e-6
        self.random = np.random.default_rng(11)

    def slot_bytes_of(self, slot: int) -> Bytes:
        """What a slot holds, read by the host."""
        address = self.slots[slot]
        self.cuda.host_reads((address, self.slot_bytes), name=f"host reads slot {slot}")
        half = len(self.slots) // SLAB_COUNT
        array = self.slabs[slot // half].array
        first = (slot % half) * self.slot_bytes
        return array[first : first + self.shard_bytes]

    def offload(self, blocks: Sequence[int], slots: Sequence[int]) -> CopyTicket:
        places = [self.slots[slot] for slot in slots]
        return self.streams.offload(self.kv.layout, blocks, places, self.streams.mark(self.compute))

    def onboard(self, blocks: Sequence[int], slots: Sequence[int]) -> CopyTicket:
        places = [self.slots[slot] for slot in slots]
        return self.streams.onboard(self.kv.layout, blocks, places, self.streams.mark(self.compute))

    def compute_fill(self, block: int, value: int, seconds: float = 20e-6) -> None:
        """An engine's kernel writes one block."""

        def effect() -> None:
            for view in self.kv.views(block):
                view[...] = value

        self.cuda.compute(
            self.compute, seconds, writes=self.ranges_of(block), effect=effect, name="forward"
        )

    def compute_read(self, block: int, found: list[int], seconds: float = 20e-6) -> None:
        """An engine's kernel reads one block; what it saw is added to `found`."""
        self.cuda.compute(
            self.compute,
            seconds,
            reads=self.ranges_of(block),
            effect=lambda: found.extend(np.unique(self.kv.block_bytes(block)).tolist()),
            name="attention",
        )

    def ranges_of(self, block: int) -> Ranges:
        layout = self.kv.layout
        return Ranges(layout.addresses + layout.steps * np.uint64(block), layout.sizes)

    def targets_in_order(self) -> list[int]:
        """Of the copies that are submitted from now on, the first address of each."""
        targets: list[int] = []
        submit = self.streams._submitter.submit

        def note(piece: Piece, stream: Stream) -> None:
            targets.append(int(piece.device[0]))
            submit(piece, stream)

        self.streams._submitter.submit = note  # type: ignore[method-assign]
        return targets

    def run(self) -> list[CopyTicket]:
        """Poll until nothing is left to do."""
        ended = self.streams.poll()
        for _ in range(200_000):
            if self.streams.is_idle:
                return ended
            self.cuda.advance(self.poll_seconds)
            ended += self.streams.poll()
        raise AssertionError("the copies never end")

    def scramble(self) -> None:
        """Other bytes everywhere on the device, while it is idle."""
        np.copyto(self.kv.memory, self.random.integers(0, 256, len(self.kv.memory), np.uint8))

    def close(self) -> None:
        self.streams.close()
        self.registry.check_invariants()
        self.registry.close()
        self.cuda.assert_clean()
