"""Copies between device blocks and slots on streams of our own, in an order that is never a race.

    engine's thread    mark, follow, withdraw: a few microseconds, no waiting
    copying thread     onboard, offload, pump, poll: plans, submits, looks at events

The ordering rules, each learnt from a bug that somebody shipped:
  (0) Every copy waits for what the engine had queued when it was marked: a store for the kernels
      that write the block, a load for those that still read or zero it.
  (1) A copy has ended when its event is done, not when it was queued; until then its blocks and
      slots are in use. Nobody synchronises: `poll` asks events.
  (2) Before the engine touches blocks of a copy that has not ended, its stream must `follow` it.
  (3) A store reads its source in the stream's order, never in any order.

Loads come before stores: no piece of a store is submitted while one of a load waits for its turn,
and stores ask before each piece whether they may, for what they do to the engine's own work. What
is in flight is bounded in each direction, so that a load never waits behind more than that.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.cuda.copy_paths import PathLimits, PathSupport
from kvtier.cuda.copy_plan import Piece, SlabView, pieces_of, runs_of
from kvtier.cuda.copy_submit import KernelCopies, PieceSubmitter
from kvtier.cuda.device_layout import DeviceLayout
from kvtier.cuda.errors import CudaBroken, CudaCode
from kvtier.cuda.path_trials import calibrated, give_up_wrong_paths
from kvtier.cuda.registration import HostSlab, SlabRegistry
from kvtier.cuda.runtime import Addresses, CudaRuntime, Direction, Event, Stream
from kvtier.errors import KVTierError

# Two pieces: one that the engine copies and one that is ready when it ends.
IN_FLIGHT_BYTES_MAX = 64 << 20


class Withdrawn(KVTierError):
    """The copy was called off before it was all queued: its blocks hold nothing of use."""


@dataclass(slots=True, eq=False)
class CopyTicket:
    """One request's copy on its way; `poll` hands it out once it touches nothing any more."""

    direction: Direction
    layout: DeviceLayout
    device_blocks: Sequence[int]
    slots: Sequence[int]  # The host's address of every slot's bytes.
    after: Event
    turn: int = 0  # Of those that wait, lower ones go first.
    failed: KVTierError | None = None
    is_ended: bool = False  # It touches nothing any more, unless `failed` is CudaBroken.
    bytes_count: int = 0
    _pieces: deque[Piece] | None = None  # None: not planned yet.
    _slabs: list[HostSlab] = field(default_factory=list)
    _end: Event | None = None  # Of the last piece that was queued.
    _in_flight_count: int = 0

    @property
    def is_begun(self) -> bool:
        """Whether some of it may have been submitted."""
        return self._pieces is not None

    @property
    def is_queued(self) -> bool:
        """Whether all of it that will be submitted has been."""
        return self.failed is not None or (self._pieces is not None and not self._pieces)


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction: its stream, what waits, what is in flight (oldest first)."""

    stream: Stream
    waiting: deque[CopyTicket] = field(default_factory=deque)
    in_flight: deque[tuple[Event, int, CopyTicket]] = field(default_factory=deque)
    in_flight_bytes: int = 0


class CopyStreams:
    """Owns a load stream and a low-priority store stream of one device."""

    def __init__(
        self,
        runtime: CudaRuntime,
        registry: SlabRegistry,
        *,
        kernels: KernelCopies | None = None,
        limits: PathLimits | None = None,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        may_store: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`may_store`: whether so many bytes of a store may be submitted now."""
        lowest, highest = runtime.priorities()
        self._runtime = runtime
        self._registry = registry
        self._submitter = PieceSubmitter(runtime, kernels)
        self._limits = limits or PathLimits()
        self._in_flight_bytes_max = in_flight_bytes_max
        self._may_store = may_store
        self.stored_bytes = 0  # Submitted, in all.
        self._loads = _Lane(runtime.create_stream(highest))
        self._stores = _Lane(runtime.create_stream(lowest))
        self._changed = threading.RLock()
        self._is_followed = False  # The engine's thread waits for the lock.
        self._events: deque[Event] = deque()  # Free ones; as many as were ever in use at once.
        self._ended: list[CopyTicket] = []
        self._broken: CudaBroken | None = None
        self._is_closed = False  # The streams are no more.

    @property
    def support(self) -> PathSupport:
        """Which paths are still in use here."""
        return self._submitter.support

    def try_paths(self) -> list[str]:
        """Before the first copy: give up paths that move wrong bytes, measure the others.

        Returns what was wrong. Raises CudaUnavailable if nothing is right.
        """
        assert self.is_idle, "copies are under way"
        wrong = give_up_wrong_paths(self._runtime, self._submitter)
        self._limits = calibrated(self._runtime, self._submitter, self._limits)
        return wrong

    # -------------------------------------------------------------------- for the engine's thread

    def mark(self, stream: Stream) -> Event:
        """What is queued on the stream now: `onboard` and `offload` come after it."""
        try:
            event = self._events.popleft()
        except IndexError:
            event = self._runtime.create_event()
        self._runtime.record_event(event, stream)
        return event

    def unmark(self, mark: Event) -> None:
        """No copy will ask for it."""
        self._events.append(mark)

    def follow(self, compute: Stream, ticket: CopyTicket) -> None:
        """What the engine queues from now on comes after the copy, which is submitted at once."""
        self._is_followed = True
        try:
            with self._changed:
                lane = self._lane(ticket)
                while not ticket.is_queued:
                    self._submit_next(lane)
                if ticket._end is not None:
                    self._runtime.wait_event(compute, ticket._end)
        finally:
            self._is_followed = False

    def withdraw(self, ticket: CopyTicket) -> None:
        """Submit no more of it; `follow` or `poll` tells when what was submitted has ended."""
        with self._changed:
            if not ticket.is_queued:
                self._fail(ticket, Withdrawn("called off"))

    # ------------------------------------------------------------------- for the copying thread

    def onboard(
        self,
        layout: DeviceLayout,
        device_blocks: Sequence[int],
        slots: Sequence[int],
        after: Event,
        *,
        turn: int = 0,
    ) -> CopyTicket:
        """Slots into device blocks, after what was marked; the ticket owns the mark.

        `turn`: of loads by layers, the layer: the first layers of all are needed before the last
        ones of any.
        """
        direction = Direction.HOST_TO_DEVICE
        return self._ask(CopyTicket(direction, layout, device_blocks, slots, after, turn))

    def offload(
        self, layout: DeviceLayout, device_blocks: Sequence[int], slots: Sequence[int], after: Event
    ) -> CopyTicket:
        """Device blocks into slots, after what was marked; the ticket owns the mark."""
        return self._ask(CopyTicket(Direction.DEVICE_TO_HOST, layout, device_blocks, slots, after))

    def pump(self) -> None:
        """Submit what may be in flight: loads, and stores if no load waits."""
        with self._changed:
            for lane in (self._loads, self._stores):
                self._reap(lane)
        while not self._is_followed and self._pump_one():
            pass

    def poll(self) -> list[CopyTicket]:
        """The copies that have ended since the last poll, failed ones among them."""
        self.pump()
        with self._changed:
            for lane in (self._loads, self._stores):
                self._reap(lane)
            ended, self._ended = self._ended, []
            return ended

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        lanes = (self._loads, self._stores)
        return not any(lane.waiting or lane.in_flight for lane in lanes)

    def give_up(self, error: Exception) -> None:
        """As if the device were broken: nobody knows any more which copies have ended.

        Waits for what is in flight, if that is possible: an engine that is told of a failed load
        computes into its blocks.
        """
        with self._changed:
            for lane in (self._loads, self._stores):
                if self._broken is None and not self._is_closed:
                    with contextlib.suppress(KVTierError):
                        self._runtime.synchronize_stream(lane.stream)
            self._break(_as_broken(error))

    def close(self) -> None:
        """Call off what waits, and wait for what is in flight: for the end of the process only."""
        with self._changed:
            for lane in (self._loads, self._stores):
                for ticket in list(lane.waiting):
                    self.withdraw(ticket)
                if self._broken is None:
                    self._runtime.synchronize_stream(lane.stream)
                    self._reap(lane)
            self._is_closed = True
            for lane in (self._loads, self._stores):
                if self._broken is None:
                    self._runtime.destroy_stream(lane.stream)
            while self._broken is None and self._events:
                self._runtime.destroy_event(self._events.popleft())

    # -------------------------------------------------------------------------------- submitting

    def _pump_one(self) -> bool:
        """Submit the next piece, if there is one that may be in flight. Whoever follows a copy gets
        in between two: locks are not fair, and an engine computes nothing until it has."""
        with self._changed:
            lane = self._loads if self._loads.waiting else self._stores
            if not lane.waiting or lane.in_flight_bytes >= self._in_flight_bytes_max:
                return False
            if lane is self._stores and not self._may_store_next():
                return False
            self._submit_next(lane)
            return True

    def _ask(self, ticket: CopyTicket) -> CopyTicket:
        with self._changed:
            waiting = self._lane(ticket).waiting
            place = len(waiting)
            while place and _may_pass(ticket, waiting[place - 1]):
                place -= 1
            waiting.insert(place, ticket)
        return ticket

    def _lane(self, ticket: CopyTicket) -> _Lane:
        is_load = ticket.direction is Direction.HOST_TO_DEVICE
        return self._loads if is_load else self._stores

    def _may_store_next(self) -> bool:
        ticket = self._stores.waiting[0]
        try:
            if ticket._pieces is None:
                self._begin(self._stores, ticket)
        except KVTierError as error:
            self._fail(ticket, error)
            return False  # The others' turn comes with the next look.
        return not ticket._pieces or self._may_store(ticket._pieces[0].bytes_count)

    def _begin(self, lane: _Lane, ticket: CopyTicket) -> None:
        if self._broken is not None:
            raise self._broken
        self._plan(ticket)
        self._runtime.wait_event(lane.stream, ticket.after)

    def _submit_next(self, lane: _Lane) -> None:
        """One piece of the oldest ticket that waits."""
        ticket = lane.waiting[0]
        try:
            if ticket._pieces is None:
                self._begin(lane, ticket)
            if ticket._pieces:
                piece = ticket._pieces[0]
                self._submitter.submit(piece, lane.stream)
                ticket._pieces.popleft()
                self._note(lane, ticket, piece.bytes_count)
        except KVTierError as error:
            self._fail(ticket, error)
            return
        if not ticket._pieces:
            lane.waiting.popleft()
            self._end_if_over(ticket)

    def _plan(self, ticket: CopyTicket) -> None:
        slots: Addresses = np.array(ticket.slots, np.uint64)
        last_byte = int((ticket.layout.places + ticket.layout.sizes).max())
        slabs = self._registry.take(slots, last_byte)
        ticket._slabs = list({id(slab): slab for slab in slabs}.values())
        places = {id(slab): index for index, slab in enumerate(ticket._slabs)}
        indices = np.array([places[id(slab)] for slab in slabs], np.int64)
        views = [SlabView(slab.alias, slab.is_registered) for slab in ticket._slabs]
        runs = runs_of(ticket.layout, np.array(ticket.device_blocks, np.int64), slots, indices)
        ticket._pieces = deque(pieces_of(runs, views, ticket.direction, self.support, self._limits))

    def _note(self, lane: _Lane, ticket: CopyTicket, bytes_count: int) -> None:
        """Something of the ticket is in flight from now on."""
        event = self.mark(lane.stream)
        lane.in_flight.append((event, bytes_count, ticket))
        lane.in_flight_bytes += bytes_count
        ticket.bytes_count += bytes_count
        if lane is self._stores:
            self.stored_bytes += bytes_count
        ticket._end = event
        ticket._in_flight_count += 1

    # ------------------------------------------------------------------------------------- ending

    def _reap(self, lane: _Lane) -> None:
        """Take in what has ended; a stream ends its pieces in order."""
        try:
            while lane.in_flight and self._runtime.is_event_done(lane.in_flight[0][0]):
                event, bytes_count, ticket = lane.in_flight.popleft()
                lane.in_flight_bytes -= bytes_count
                ticket._in_flight_count -= 1
                if ticket._end == event:
                    ticket._end = None  # Its next record will be another ticket's.
                self._events.append(event)
                self._end_if_over(ticket)
        except CudaBroken as error:
            self._break(error)

    def _end_if_over(self, ticket: CopyTicket) -> None:
        if ticket.is_ended or not ticket.is_queued or ticket._in_flight_count:
            return
        self._registry.end_use(ticket._slabs)
        self._events.append(ticket.after)
        ticket.is_ended = True
        self._ended.append(ticket)

    def _fail(self, ticket: CopyTicket, error: KVTierError) -> None:
        if isinstance(error, CudaBroken):
            self._break(error)
            return
        lane = self._lane(ticket)
        lane.waiting.remove(ticket)
        ticket.failed = error
        try:
            if ticket._pieces is not None:
                self._note_part(lane, ticket)
            self._end_if_over(ticket)
        except KVTierError as told:
            self._break(_as_broken(told), ticket)

    def _note_part(self, lane: _Lane, ticket: CopyTicket) -> None:
        """A piece may be queued in part, or whole and without an event."""
        try:
            self._note(lane, ticket, 0)
        except CudaBroken:
            raise
        except KVTierError:
            # No event, so nothing else would tell the end. Its own pieces are all on this stream.
            self._runtime.synchronize_stream(lane.stream)
            self._reap(lane)

    def _break(self, error: CudaBroken, *others: CopyTicket) -> None:
        """All is lost. Slabs stay in use: what was queued may land until the process has ended."""
        self._broken = error
        lost = list(others)
        for lane in (self._loads, self._stores):
            lost += [*lane.waiting, *(ticket for _, _, ticket in lane.in_flight)]
            lane.waiting.clear()
            lane.in_flight.clear()
            lane.in_flight_bytes = 0
        for ticket in dict.fromkeys(lost):
            ticket.failed, ticket._end = error, None
            ticket.is_ended = True
            self._ended.append(ticket)


def _as_broken(error: Exception) -> CudaBroken:
    if isinstance(error, CudaBroken):
        return error
    return CudaBroken("kvtier", CudaCode.UNKNOWN, f"{type(error).__name__}: {error}")


def _may_pass(ticket: CopyTicket, waiting: CopyTicket) -> bool:
    return waiting.turn > ticket.turn and not waiting.is_begun
