"""Copies of an engine whose blocks are in device memory: queued on streams, ended by events.

    engine's thread      steps: marks its stream          fence: its stream waits for the copies
    the lane's thread    asks for the copy, then looks again and again whether it has ended

Loads by layers are asked for by the engine's thread itself, for it is about to compute beside them:
before each layer its stream waits for that layer of all loads (`follow_layer`). The verdict on a
load (did it end before the lease's deadline?) comes with its result, as ever: until then what was
computed beside it is worth nothing.

The slots are held until a copy has really ended, so that nobody is told that we are quiet, and no
slab goes, under a copy. Only a broken device ends nothing: what was queued may land until this
process has ended, so those slots stay held for good.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvtier.client.arena import SlabPins
from kvtier.clock import Clock, SystemClock
from kvtier.connector.client_api import ArenaLike, SlotView
from kvtier.connector.copying import REFUSALS, ByteChecks, CopyProgress, Gate
from kvtier.connector.jobs import FailReason, Job, OffloadJob, OnboardJob, facts_of
from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stream_lane import StreamLane
from kvtier.cuda.copy_submit import KernelCopies
from kvtier.cuda.device_layout import DeviceLayout
from kvtier.cuda.errors import CudaBroken
from kvtier.cuda.registration import SlabRegistry
from kvtier.cuda.runtime import CudaRuntime, Direction, Event, Stream
from kvtier.cuda.streams import CopyStreams, CopyTicket, Withdrawn
from kvtier.errors import BadRequest, KVTierError
from kvtier.policy.store_throttle import StoreThrottle

log = logging.getLogger(__name__)

_STEP_SECONDS_MAX = 1.0


class _Over:
    """Stands for the end of an iterator."""


class _Step(NamedTuple):
    """One of the engine's, as it began."""

    begun: float
    token_count: int
    stored_bytes: int


class DeviceBlocks:
    """One worker's blocks on its device, and the copies of them that have not ended."""

    def __init__(
        self,
        runtime: CudaRuntime,
        device: int,
        layout: DeviceLayout,
        compute: Callable[[], Stream],
        *,
        kernels: KernelCopies | None = None,
        offload_stretch_max: float = 0.0,
        layer_count: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """`compute`: what the engine's thread computes on at the moment of asking.
        `kernels`: given up with the lane.
        `offload_stretch_max`: how much longer a step may take for offloads, 0 for any.
        `layer_count`: above 0, loads go by so many layers, and the engine computes beside them.
        Raises BadRequest for blocks that have no such layers."""
        runtime.use_device(device)
        self._runtime = runtime
        self._device = device
        self._registry = SlabRegistry(runtime)
        self._kernels = kernels
        self.layout = layout
        self.is_by_layer = layer_count > 0
        # What one ticket each of a load moves.
        self.load_layouts = layout.by_layer(layer_count) if self.is_by_layer else [layout]
        self._clock = clock or SystemClock()
        self._throttle: StoreThrottle | None = None
        if offload_stretch_max > 0:
            self._throttle = StoreThrottle(stretch_max=offload_stretch_max)
        self._last_step = _Step(0.0, 0, 0)
        self.streams = CopyStreams(
            runtime, self._registry, kernels=kernels, may_store=self._may_store
        )
        self.compute = compute
        self._is_broken = False
        self._changed = threading.Lock()
        self._tickets: dict[int, Sequence[CopyTicket]] = {}  # By job.
        self._lost_holds: list[ExitStack] = []  # Of copies that nobody can tell the end of.

    def note_step(self, token_count: int) -> None:
        """In the engine's thread: a step begins that computes so many tokens, or none."""
        if self._throttle is None:
            return
        before = self._last_step
        self._last_step = step = _Step(self._clock.now(), token_count, self.streams.stored_bytes)
        seconds = step.begun - before.begun
        # An engine that had nothing to do waited.
        if before.token_count and seconds < _STEP_SECONDS_MAX:
            copied = step.stored_bytes - before.stored_bytes
            self._throttle.note_step(seconds, before.token_count, copied)
        if not token_count:
            self._throttle.note_idle()

    def _may_store(self, bytes_count: int) -> bool:
        throttle = self._throttle
        return throttle is None or throttle.may_send(bytes_count, self._clock.now())

    def make_mover(
        self, arena: ArenaLike, settings: ConnectorSettings, clock: Clock, gate: Gate
    ) -> StreamMover:
        return StreamMover(arena, self, settings, clock, gate)

    def make_lane(self) -> StreamLane:
        """The thread that copies; it pins slabs while it has nothing else to do."""
        return StreamLane(
            self.streams,
            on_start=lambda: self._runtime.use_device(self._device),
            on_idle=lambda: self._registry.warm(self._clock.now()),
            on_end=lambda: None if self._kernels is None else self._kernels.close(),
        )

    # ------------------------------------------------------------------------- slabs (SlabPins)

    @property
    def pins(self) -> SlabPins:
        return self

    def add(self, address: int, length_bytes: int) -> None:
        """A slab has been mapped: it is pinned when it is first used, or before."""
        try:
            self._registry.add(address, length_bytes)
        except BadRequest as error:
            log.error("no copies from and to a slab", extra={"reason": str(error)})

    def give_up(self, address: int) -> bool:
        """Whether the slab is unpinned; never again once the device is broken, for it may still
        write there."""
        if self._is_broken:
            return False
        try:
            self._runtime.use_device(self._device)
            return self._registry.give_up(address)
        except CudaBroken as error:
            self._is_broken = True
            log.error("the device is broken: slabs stay mapped", extra={"reason": str(error)})
            return False

    # ----------------------------------------------------------------------------------- copies

    def mark(self) -> Event:
        """In the engine's thread: what it has queued by now."""
        return self.streams.mark(self.compute())

    def fence(self, job_ids: Sequence[int]) -> None:
        """In the engine's thread: what it queues from now on comes after these jobs, of which none
        is being begun. What is not queued of them never will be."""
        with self._changed:
            tickets = [ticket for one in job_ids for ticket in self._tickets.get(one, ())]
        for ticket in tickets:
            self.streams.withdraw(ticket)
            self.streams.follow(self.compute(), ticket)

    def follow_layer(self, layer: int) -> None:
        """In the engine's thread: what it queues from now on comes after this layer of all loads
        that have not ended; what of them is not submitted yet is submitted now."""
        assert self.is_by_layer
        with self._changed:
            loads = [
                tickets[layer]
                for tickets in self._tickets.values()
                if tickets[0].direction is Direction.HOST_TO_DEVICE
            ]
        for ticket in loads:
            self.streams.follow(self.compute(), ticket)

    def begin(self, job_id: int, tickets: Sequence[CopyTicket]) -> None:
        with self._changed:
            self._tickets[job_id] = tickets

    def end(self, job_id: int, held: ExitStack) -> None:
        """The copy touches its slots no more, or nobody knows: then they stay held."""
        with self._changed:
            tickets = self._tickets.pop(job_id)
            if any(isinstance(ticket.failed, CudaBroken) for ticket in tickets):
                self._lost_holds.append(held.pop_all())


class StreamMover:
    """Runs the jobs of one namespace and shard on streams."""

    def __init__(
        self,
        arena: ArenaLike,
        blocks: DeviceBlocks,
        settings: ConnectorSettings,
        clock: Clock,
        gate: Gate,
    ) -> None:
        self._arena = arena
        self._blocks = blocks
        self._clock = clock
        self._gate = gate
        self._checks = ByteChecks(settings)

    def steps(self, progress: CopyProgress) -> Iterator[None]:
        """The copy comes after what the engine has queued by now."""
        steps = self._steps(progress, self._blocks.mark())
        if self._blocks.is_by_layer and isinstance(progress.job, OnboardJob):
            progress.is_begun = next(steps, _Over) is not _Over
        return steps

    def _steps(self, progress: CopyProgress, mark: Event) -> Iterator[None]:
        job, start_ns = progress.job, self._clock.now_ns()
        with ExitStack() as held:
            begun = self._begin(progress, mark, held)
            if begun is None:
                self._blocks.streams.unmark(mark)
                return
            tickets, views = begun
            while not all(ticket.is_ended for ticket in tickets):
                if _failure(tickets) is not None:
                    for ticket in tickets:
                        self._blocks.streams.withdraw(ticket)
                yield
            self._blocks.end(job.job_id, held)
            failure = _failure(tickets)
            if isinstance(job, OffloadJob) and failure is None:
                self._checks.note(job, progress, 0, views)
        progress.seconds = (self._clock.now_ns() - start_ns) / 1e9
        if failure is not None:
            _note_failure(progress, failure)
            return
        progress.done_count = len(job.slots)
        if isinstance(job, OnboardJob) and self._clock.now_ns() > job.deadline_ns:
            progress.fail(FailReason.DEADLINE, "ended after the lease's deadline")

    def _begin(
        self, progress: CopyProgress, mark: Event, held: ExitStack
    ) -> tuple[Sequence[CopyTicket], list[SlotView]] | None:
        """Ask for the copy; None if there is none, and then `progress` says why."""
        job = progress.job
        if isinstance(job, OnboardJob) and self._clock.now_ns() >= job.deadline_ns:
            progress.fail(FailReason.DEADLINE, "not started by the lease's deadline")
            return None
        refusal = self._gate.enter(job)
        if refusal is not None:
            progress.fail(refusal, REFUSALS[refusal])
            return None
        try:
            views = held.enter_context(self._arena.hold(job.slots, job.session))
            if isinstance(job, OnboardJob) and not self._checks.are_right(job, progress, views):
                return None
            tickets = self._ask(job, views, mark)
            self._blocks.begin(job.job_id, tickets)
            return tickets, views
        except KVTierError as error:
            progress.fail(FailReason.STALE, f"{type(error).__name__}: {error}")
        except Exception as error:  # Must end this job alone.
            log.exception("copy failed", extra=facts_of(job))
            progress.fail(FailReason.COPY, f"{type(error).__name__}: {error}")
        finally:
            self._gate.leave(job)
        return None

    def _ask(self, job: Job, views: Sequence[SlotView], mark: Event) -> list[CopyTicket]:
        blocks, streams = self._blocks, self._blocks.streams
        slots = [int(view.__array_interface__["data"][0]) for view in views]
        if isinstance(job, OffloadJob):
            return [streams.offload(blocks.layout, job.device_blocks, slots, mark)]
        layouts = blocks.load_layouts
        # All before the first is asked for: what can fail has then failed.
        marks = [mark, *(blocks.mark() for _ in layouts[1:])]
        return [
            streams.onboard(layout, job.device_blocks, slots, own_mark, turn=layer)
            for layer, (layout, own_mark) in enumerate(zip(layouts, marks, strict=True))
        ]


def _failure(tickets: Sequence[CopyTicket]) -> KVTierError | None:
    return next((ticket.failed for ticket in tickets if ticket.failed is not None), None)


def _note_failure(progress: CopyProgress, error: KVTierError) -> None:
    if isinstance(error, Withdrawn):
        progress.fail(FailReason.WITHDRAWN, REFUSALS[FailReason.WITHDRAWN])
    else:
        progress.fail(FailReason.COPY, f"{type(error).__name__}: {error}")
