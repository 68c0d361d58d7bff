"""An engine as the protocol wants it: a scheduler, a worker a shard, copies that take time.

Processes can stop, lose their connection, come back and die at any moment. What a process may still
write or read then is exactly what the protocol lets it: copies that were begun before it declared
itself quiet, reads before the deadline of a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.errors import KVTierError
from kvtier.types import BlockHash, CommitOutcome, LeaseId, NamespaceId, Role, SessionId, SlabId
from tests.support.fake_disk import FakeDisk
from tests.support.world import Outcome, World, engine_id, packed, slots_of


@dataclass(eq=False)
class Process:
    """One process of an engine; `session` is None while it has no connection."""

    role: Role
    shards: tuple[int, ...]
    session: SessionId | None = None
    last_session: SessionId | None = None
    alive: bool = True
    quiet: set[SessionId] = field(default_factory=set)  # Sessions whose instructions it refuses.
    own_old: list[SessionId] = field(default_factory=list)
    mapped: dict[SlabId, SessionId] = field(default_factory=dict)
    segments: dict[SessionId, set[int]] = field(default_factory=dict)  # Of the tier below.


@dataclass(eq=False)
class CopyOut:
    """A worker's copy into a slot; may be run until it is done or the worker is quiet about it."""

    worker: Process
    session: SessionId
    slot: int
    block: BlockHash
    done: bool = False


@dataclass(eq=False)
class Offload:
    """Slots being filled with consecutive blocks of one chain."""

    session: SessionId
    namespace: NamespaceId
    epoch: int
    parent: BlockHash | None
    hashes: list[BlockHash]
    slots: list[int]
    copies: list[CopyOut]


@dataclass(eq=False)
class Held:
    """A lease as the engine knows it."""

    lease: LeaseId
    namespace: NamespaceId
    deadline: float
    blocks: dict[int, BlockHash]  # Slot -> block.
    direct: dict[int, BlockHash]  # Likewise, in the tier below that was leased from.
    is_planned: bool = False  # Whoever tests has planned its end.


@dataclass
class Tally:
    """What an engine saw; a run in which nothing hits proves nothing."""

    asked_count: int = 0
    hit_count: int = 0
    ready_count: int = 0
    read_count: int = 0
    direct_count: int = 0  # Reads from a tier below.


class FakeEngine:
    """Every method is one thing that may happen next; each does nothing when it cannot happen."""

    def __init__(
        self,
        world: World,
        number: int,
        *,
        shard_count: int,
        together: bool,
        node: int | None = None,
        tenant: str = "",
    ) -> None:
        """`together`: one process is scheduler and worker of the only shard."""
        self.world = world
        self.node = node  # Nearest to its device, as its workers say.
        self.tenant, self.id = tenant, engine_id(number)
        self.tally = Tally()
        if together:
            assert shard_count == 1
            self.scheduler = Process(Role.BOTH, (0,))
            self.workers = [self.scheduler]
            self.processes = [self.scheduler]
        else:
            self.scheduler = Process(Role.SCHEDULER, ())
            self.workers = [Process(Role.WORKER, (shard,)) for shard in range(shard_count)]
            self.processes = [self.scheduler, *self.workers]
        self.stock: dict[tuple[SessionId, NamespaceId], list[tuple[int, int]]] = {}
        self.offloads: list[Offload] = []
        self.copies: list[CopyOut] = []
        self.dma: list[tuple[float, CopyOut]] = []  # Begun by processes that died: until when.
        self.leases: list[Held] = []
        self.sessions: set[SessionId] = set()
        world.reserved_watchers.append(self._assert_harmless)
        world.drop_watchers.append(self._assert_unmapped)
        world.bound_watchers.append(self._assert_unread)
        for process in self.processes:
            self.connect(process)

    # ------------------------------------------------------------------------------- processes

    def connect(self, process: Process) -> None:
        """A new session; it names the last one of the same process."""
        if not process.alive or process.session is not None:
            return
        world = self.world
        session = world.new_session()
        replaces = process.last_session
        if replaces is not None:
            process.own_old.append(replaces)
        process.session = process.last_session = session
        self.sessions.add(session)
        world.run_quietly(
            ev.SessionOpened(
                session,
                self.id,
                process.role,
                process.shards,
                replaces=replaces,
                node=self.node if process.shards else None,
                tenant=self.tenant,
            )
        )
        for namespace in world.namespaces:
            self._join(session, namespace)
        if process is self.scheduler:
            self.offloads.clear()  # Begun under another session: never committed.
            self.leases = [one for one in self.leases if one.deadline > world.now]

    def join(self, namespace: NamespaceId) -> None:
        """The namespace is open now: the engine uses it from here on."""
        for process in self.processes:
            if process.session is not None:
                self._join(process.session, namespace)

    def lose(self, process: Process) -> None:
        """The connection breaks; the process does not notice before it connects again."""
        if process.alive and process.session is not None:
            session, process.session = process.session, None
            self.world.run_quietly(ev.SessionLost(session))

    def break_unseen(self, process: Process) -> None:
        """The process connects anew before the daemon has seen that the old connection ended."""
        process.session = None
        self.connect(process)

    def die(self, process: Process) -> None:
        if process.alive and process.last_session is not None:
            process.alive = False
            process.session = None
            until = self.world.now + self.world.config.grace_seconds
            self.dma.extend((until, one) for one in self.copies if one.worker is process)
            self.copies = [one for one in self.copies if one.worker is not process]
            self.world.run_quietly(ev.ProcessDied(process.last_session))
            self._forget_if_gone()

    def vanish(self) -> None:
        """The machine has lost power, and the daemon with it."""
        for process in self.processes:
            process.alive = False
            process.session = None
        for work in (self.copies, self.offloads, self.dma, self.leases):
            work.clear()

    def say_bye(self, process: Process) -> None:
        """The orderly end; its copies have been run."""
        if process.alive and process.session is not None:
            if process is self.scheduler:
                self.offloads.clear()
            for one in [one for one in self.copies if one.worker is process]:
                self.run_copy(one)
            session, process.session = process.session, None
            process.alive = False
            self.world.run_quietly(ev.SessionEnded(session))
            self._forget_if_gone()

    def read_mail(self, process: Process) -> None:
        """Work off one thing the daemon has asked of this process."""
        if process.session is None or not self.world.mail[process.session]:
            return
        session = process.session
        asked = self.world.mail[session].pop(0)
        if isinstance(asked, ins.OfferSlab):
            process.mapped[asked.slab] = session
            self.world.run_quietly(ev.SlabMapped(session, asked.slab))
        elif isinstance(asked, ins.WithdrawSlab):
            if self._uses_slab(process, asked.slab):
                self.world.mail[session].append(asked)  # Copies are under way: later.
            else:
                process.mapped.pop(asked.slab, None)
                self.world.run_quietly(ev.SlabUnmapped(session, asked.slab))
        elif isinstance(asked, ins.RequestQuiet):
            self.declare_quiet(process, asked.about)
        elif isinstance(asked, ins.RecallSlots):
            self.abort(asked.namespace, asked.count)

    def declare_own_quiet(self, process: Process) -> None:
        """After a reconnect: the copies of the old session have ended."""
        if process.session is not None and process.own_old:
            self.declare_quiet(process, process.own_old.pop(0))

    def declare_quiet(self, process: Process, about: SessionId) -> None:
        """Refuse what comes under that session, let go of what has not begun, say so."""
        assert process.session is not None
        process.quiet.add(about)
        self.copies = [
            one for one in self.copies if one.worker is not process or one.session != about
        ]
        for slab, session in list(process.mapped.items()):
            if session == about:
                del process.mapped[slab]
        self.world.run_quietly(ev.SessionQuiet(process.session, about))

    # --------------------------------------------------------------------------------- offload

    def reserve(self, namespace: NamespaceId, count: int) -> None:
        session = self.scheduler.session
        if session is None:
            return

        def reserved(outcome: Outcome) -> None:
            if not isinstance(outcome, ins.SlotsReserved):
                return
            slots = outcome.slots.tolist()
            self._assert_mapped(slots)
            mine = self.stock.setdefault((session, namespace), [])
            mine.extend((slot, outcome.epoch) for slot in slots)

        self.world.start(ev.Reserve(session, namespace, count), reserved)

    def offload(self, namespace: NamespaceId, hashes: Sequence[BlockHash]) -> None:
        """Plan copies of the blocks of this chain that are not resident, as far as slots go."""
        session = self.scheduler.session or self.scheduler.last_session
        if session is None or not self.scheduler.alive:
            return
        if not self.world.namespaces[namespace].is_open:
            return
        stock = self.stock.get((session, namespace), [])
        first = self.world.match(namespace, hashes).matched_count
        wanted = list(hashes[first:])[: len(stock)]
        taken = [one for one in stock[: len(wanted)] if one[1] == stock[0][1]]  # Of one epoch.
        del stock[: len(taken)]
        wanted = wanted[: len(taken)]
        if not wanted:
            return
        copies = [
            CopyOut(worker, session, slot, block)
            for worker in self.workers
            for (slot, _), block in zip(taken, wanted, strict=True)
            if worker.alive and session not in worker.quiet
        ]
        self.copies.extend(copies)
        if session == self.scheduler.session and len(copies) == len(wanted) * len(self.workers):
            slots = [slot for slot, _ in taken]
            parent = hashes[first - 1] if first else None
            self.offloads.append(
                Offload(session, namespace, taken[0][1], parent, wanted, slots, copies)
            )

    def run_copy(self, one: CopyOut) -> None:
        """The worker's copy writes now."""
        for shard in one.worker.shards:
            self.world.write(one.slot, shard, one.block)
        one.done = True
        self.copies.remove(one)

    def run_dma(self) -> None:
        """What dead processes had begun may still arrive for a while."""
        for until, one in self.dma:
            if until > self.world.now:
                for shard in one.worker.shards:
                    self.world.write(one.slot, shard, one.block)
        self.dma = [one for one in self.dma if one[0] > self.world.now]

    def commit(self, offload: Offload) -> None:
        """Publish blocks all of whose copies are done."""
        if not all(one.done for one in offload.copies):
            return
        self.offloads.remove(offload)

        def committed(outcome: Outcome) -> None:
            if isinstance(outcome, ins.Committed):
                self.tally.ready_count += outcome.outcomes.count(CommitOutcome.READY)

        self.world.start(
            ev.Commit(
                offload.session,
                offload.namespace,
                packed(offload.hashes),
                slots_of(offload.slots),
                offload.parent,
                offload.epoch,
            ),
            committed,
        )

    def abort(self, namespace: NamespaceId, count: int) -> None:
        """Give back stock that no copy was planned for."""
        session = self.scheduler.session
        stock = self.stock.get((session, namespace), []) if session is not None else []
        if session is not None and stock:
            given, stock[:count] = stock[:count], []
            self.world.run_quietly(
                ev.Abort(session, namespace, slots_of([slot for slot, _ in given]))
            )

    # --------------------------------------------------------------------------------- onboard

    def acquire(
        self,
        namespace: NamespaceId,
        hashes: Sequence[BlockHash],
        *,
        seconds: float,
        skip: int = 0,
        wait: float = 0.0,
        on_granted: Callable[[ins.LeaseGranted], None] | None = None,
    ) -> None:
        """`wait`: for so long blocks may be promoted before the answer."""
        session = self.scheduler.session
        if session is None:
            return
        now = self.world.now
        deadline, wait_until = now + seconds, now + wait if wait else 0.0
        self.tally.asked_count += len(hashes)

        def granted(outcome: Outcome) -> None:
            if isinstance(outcome, KVTierError | ins.LeasePending):
                return
            assert isinstance(outcome, ins.LeaseGranted)
            if on_granted is not None:
                on_granted(outcome)
            if outcome.lease is None:
                return
            blocks, direct = _split(outcome, hashes[skip : outcome.leased_count])
            if self.world.now == now:  # Else its workers may have been replaced meanwhile.
                self._assert_mapped(list(blocks))
                self._assert_segments_mapped(list(direct))
            self.tally.hit_count += outcome.leased_count
            held = Held(outcome.lease, namespace, deadline, blocks, direct)
            self.leases.append(held)
            self.read(held)

        acquire = ev.Acquire(
            session,
            namespace,
            packed(hashes),
            deadline,
            skip_count=skip,
            wait_until=wait_until,
            takes_direct=True,
        )
        self.world.start(acquire, granted)

    def read(self, held: Held) -> None:
        """The workers copy what was leased: before the deadline these must be the right bytes."""
        if held.deadline <= self.world.now:
            return
        for slot, block in held.blocks.items():
            for worker in self.workers:
                if worker.alive:
                    for shard in worker.shards:
                        assert self.world.is_right(slot, shard, block), (
                            f"slot {slot} holds {self.world.content.get((slot, shard))!r} "
                            f"instead of {block!r}"
                        )
                        self.tally.read_count += 1
        disk = self.world.direct_disk
        for slot, block in held.direct.items() if disk is not None else ():
            if slot not in disk.scribbled:  # Nobody compares what is read so.
                stamp = disk.read(slot)
                assert set(stamp) == {block}, f"slot {slot} holds {stamp!r} instead of {block!r}"
                self.tally.direct_count += 1

    def map_segments(self, process: Process, count: int) -> None:
        """The process maps the first segments of the tier that is offered to it."""
        disk = self.world.direct_disk
        if disk is not None and process.session is not None and process.shards:
            segments = range(min(count, disk.segment_count))
            process.segments.setdefault(process.session, set()).update(segments)
            self.world.run_quietly(ev.SegmentsMapped(process.session, tuple(segments)))

    def release_pending(self) -> None:
        """Give up a lease whose blocks are still being promoted."""
        session = self.scheduler.session
        mine = [one for one, waiting in self.world.waiting.items() if waiting.session == session]
        if session is not None and mine:
            self.world.run_quietly(ev.Release(session, (mine[0],)))

    def release(self, held: Held) -> None:
        session = self.scheduler.session
        if session is not None:
            self.leases.remove(held)
            self.world.run_quietly(ev.Release(session, (held.lease,)))

    def drop_corrupt(self, slot: int) -> None:
        """From now on the daemon knows that this slot is wrong: older leases may see it."""
        for held in self.leases:
            held.blocks.pop(slot, None)

    # --------------------------------------------------------------------------------- helpers

    def _join(self, session: SessionId, namespace: NamespaceId) -> None:
        record = self.world.namespaces[namespace]
        is_right_one = (record.tenant, record.shard_count) == (self.tenant, len(self.workers))
        if record.is_open and is_right_one:
            self.world.run_quietly(ev.NamespaceJoined(session, namespace))

    def _assert_segments_mapped(self, slots: list[int]) -> None:
        """Every process that loads blocks has mapped where these lie."""
        disk = self.world.direct_disk
        assert disk is not None or not slots
        for slot in slots:
            for worker in self.workers:
                if worker.session is not None:
                    assert slot // disk.row_count_max in worker.segments[worker.session]

    def _assert_unread(self, disk: FakeDisk, segments: set[int]) -> None:
        """These segments have a new life: nothing of them is promised any more."""
        now, margin = self.world.now, self.world.config.lease_margin_seconds
        for held in self.leases:
            if held.deadline + margin > now:
                used = {slot // disk.row_count_max for slot in held.direct}
                assert not used & segments, "a segment is reused under a direct lease"

    def _forget_if_gone(self) -> None:
        """With the last process all that was promised to the engine is over."""
        if not any(one.alive for one in self.processes):
            self.leases.clear()
            self.world.forget_waiting(self.sessions)

    def _uses_slab(self, process: Process, slab: SlabId) -> bool:
        """Whether a copy or a read of this process may touch the slab."""
        bound = next((one for one in self.world.sets.values() if slab in one.slabs), None)
        if bound is None:
            return False
        copying = any(one.worker is process and one.slot in bound.slots for one in self.copies)
        reading = any(
            slot in bound.slots and held.deadline > self.world.now
            for held in self.leases
            for slot in held.blocks
        )
        return copying or reading

    def _assert_harmless(self, slots: list[int]) -> None:
        """Slots that somebody is given now: nobody here may still read or write them."""
        now, margin = self.world.now, self.world.config.lease_margin_seconds
        touched = {one.slot for one in self.copies}
        touched.update(one.slot for until, one in self.dma if until > now)
        for held in self.leases:
            if held.deadline + margin > now:
                touched.update(held.blocks)
        assert touched.isdisjoint(slots), f"{touched & set(slots)} were given away too early"

    def _assert_unmapped(self, slabs: Sequence[SlabId]) -> None:
        """Slabs whose pages are given up now: no living process may map them."""
        for process in self.processes:
            assert not process.alive or process.mapped.keys().isdisjoint(slabs), "still mapped"

    def _assert_mapped(self, slots: Sequence[int]) -> None:
        """Slots are given only where live workers have mapped every shard."""
        for slot in slots:
            _, bound = self.world.set_of(slot)
            for worker in self.workers:
                for shard in worker.shards:
                    assert bound.slabs[shard] in worker.mapped, f"slot {slot} is not mapped"


def _split(
    granted: ins.LeaseGranted, hashes: Sequence[BlockHash]
) -> tuple[dict[int, BlockHash], dict[int, BlockHash]]:
    """Slots in memory and slots below it, each with its block."""
    in_memory: dict[int, BlockHash] = {}
    direct: dict[int, BlockHash] = {}
    below = [False] * len(hashes) if granted.is_direct is None else granted.is_direct.tolist()
    for slot, block, is_direct in zip(granted.slots.tolist(), hashes, below, strict=True):
        (direct if is_direct else in_memory)[slot] = block
    return in_memory, direct
