"""Copies while any call may be refused: each ends once, holds nothing after, races with none."""

from __future__ import annotations

import random

import pytest

from kvtier.cuda.copy_paths import PathLimits
from kvtier.cuda.errors import CudaCode, CudaRefused, RegistrationRefused
from kvtier.cuda.fake import FakeCudart, FakeDevice
from kvtier.cuda.kernel_copies import RunKernels
from kvtier.cuda.runtime import Event, KernelLaunch, Stream
from kvtier.cuda.streams import CopyTicket
from tests.support.copy_rig import CopyRig
from tests.support.forms import rounds
from tests.support.kv_layouts import LAYOUTS, Sizes
from tests.support.twin_kernels import copy_runs_twin

DEVICES = [
    FakeDevice(),
    FakeDevice(is_aliased=True),
    FakeDevice(has_batches=False),
    FakeDevice(can_register=False),
]
SIZES = Sizes(layers=3, blocks=9, heads=3, tokens=5, width=7)
BLOCKS = SLOTS = range(8)


class MoodyCuda(FakeCudart):
    """Refuses calls by chance, once it is told how often."""

    rate = 0.0

    def __init__(self, draw: random.Random, seed: int) -> None:
        super().__init__(seed=seed, device=draw.choice(DEVICES))
        self._draw = draw
        self.add_twin("copy_runs", copy_runs_twin)

    def copy(self, *arguments: object) -> None:  # type: ignore[override]
        self._refuse("cudaMemcpyAsync")
        super().copy(*arguments)  # type: ignore[arg-type]

    def copy_batch(self, *arguments: object) -> None:  # type: ignore[override]
        self._refuse("cuMemcpyBatchAsync")
        super().copy_batch(*arguments)  # type: ignore[arg-type]

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        self._refuse("cuLaunchKernel")
        super().launch(launch, stream)

    def create_event(self, *, with_timing: bool = False) -> Event:
        self._refuse("cudaEventCreateWithFlags")
        return super().create_event(with_timing=with_timing)

    def record_event(self, event: Event, stream: Stream) -> None:
        self._refuse("cudaEventRecord")
        super().record_event(event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._refuse("cudaStreamWaitEvent")
        super().wait_event(stream, event)

    def register_host(self, address: int, length_bytes: int) -> None:
        if self._draw.random() < self.rate:
            raise RegistrationRefused("by chance")
        super().register_host(address, length_bytes)

    def device_address(self, host_address: int) -> int:
        self._refuse("cudaHostGetDevicePointer")
        return super().device_address(host_address)

    def _refuse(self, call: str) -> None:
        if self._draw.random() < self.rate:
            raise CudaRefused(call, CudaCode.INVALID_VALUE)


class Story:
    """One engine and its copies, as `seed` has it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.cuda = MoodyCuda(draw, seed)
        limits = PathLimits(
            small_run_bytes=draw.choice([64, 4096]),
            kernel_count_min=1,
            piece_bytes_max=1500,
            piece_runs_max=7,
        )
        has_kernels = draw.random() < 0.7 and self.cuda.device.can_register
        self.kernels = RunKernels(self.cuda, b"cubin", limits=limits) if has_kernels else None
        self.rig = CopyRig(
            self.cuda,
            LAYOUTS[draw.choice(list(LAYOUTS))](self.cuda, SIZES),
            limits=limits,
            kernels=self.kernels,
            in_flight_bytes_max=draw.choice([1000, 1 << 20]),
            may_store=lambda _: draw.random() < 0.7,
        )
        self.asked: list[CopyTicket] = []
        self.ended: list[CopyTicket] = []
        # By number; of a block also until the engine's stream follows its copy.
        self.blocks: dict[int, CopyTicket] = {}
        self.slots: dict[int, CopyTicket] = {}

    def step(self) -> None:
        chance = self.draw.random()
        if chance < 0.3:
            self.ask()
        elif chance < 0.5 and self.asked:
            self.follow(self.draw.choice(self.asked), is_withdrawn=chance < 0.4)
        elif chance < 0.7 and (free := [block for block in BLOCKS if block not in self.blocks]):
            seconds = self.draw.choice([1e-6, 1e-4])
            self.rig.compute_fill(self.draw.choice(free), self.draw.randrange(256), seconds)
        elif chance < 0.702:
            self.rig.streams.give_up(ZeroDivisionError("a bug"))
        else:
            self.cuda.advance(self.draw.choice([1e-6, 1e-5, 1e-4]))
            self.poll()

    def ask(self) -> None:
        count = self.draw.randint(1, 3)
        blocks = [block for block in BLOCKS if block not in self.blocks]
        slots = [slot for slot in SLOTS if slot not in self.slots]
        if min(len(blocks), len(slots)) < count:
            return
        blocks, slots = self.draw.sample(blocks, count), self.draw.sample(slots, count)
        ask = self.draw.choice([self.rig.offload, self.rig.onboard])
        try:
            ticket = ask(blocks, slots)
        except CudaRefused:
            return  # There was no mark to be had, and the engine is told at once.
        self.asked.append(ticket)
        self.blocks |= dict.fromkeys(blocks, ticket)
        self.slots |= dict.fromkeys(slots, ticket)

    def follow(self, ticket: CopyTicket, *, is_withdrawn: bool) -> None:
        if is_withdrawn:
            self.rig.streams.withdraw(ticket)
        try:
            self.rig.streams.follow(self.rig.compute, ticket)
        except CudaRefused:
            return
        self.blocks = {block: one for block, one in self.blocks.items() if one is not ticket}

    def poll(self) -> None:
        ended = self.rig.streams.poll()
        self.ended += ended
        self.blocks = {block: one for block, one in self.blocks.items() if one not in ended}
        self.slots = {slot: one for slot, one in self.slots.items() if one not in ended}

    def end(self) -> bool:
        """Whether the streams have come to it without being given up."""
        self.cuda.rate = 0.0
        for _ in range(20_000):
            self.poll()
            if self.rig.streams.is_idle:
                break
            self.cuda.advance(1e-4)
        self.poll()
        assert sorted(map(id, self.ended)) == sorted(map(id, self.asked)), "each once"
        self.cuda.checker.assert_no_races()
        if self.rig.streams._broken is not None:
            return False
        assert all(slab.use_count == 0 for slab in self.rig.registry._slabs)
        self.rig.streams.close()
        if self.kernels is not None:
            self.kernels.close()
        self.rig.registry.close()
        self.cuda.assert_clean()
        return True


@pytest.mark.slow
@pytest.mark.full_form
def test_every_copy_ends_once_whatever_is_refused() -> None:
    seeds = range(rounds(short=40, full=400))
    whole_count = 0
    for seed in seeds:
        story = Story(seed)
        story.cuda.rate = story.draw.choice([0.0, 0.01, 0.1])
        for _ in range(120):
            story.step()
        whole_count += story.end()
    assert 0 < whole_count < len(seeds), "some are given up, most are not"
