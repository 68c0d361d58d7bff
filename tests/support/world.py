"""A block manager, the shell around it and the bytes in its slots, without I/O and without time.

The shell here runs every instruction as the daemon would, keeps what watchers were told, and knows
what each slot holds. Whatever the manager decides wrongly shows as a wrong byte (`read`), a wrong
answer (`check`), or a slot that nobody gets back (`assert_all_free`). With `open_lower` it has
pools below memory as well (`lower_shell.py`, `fake_disk.py`, `fake_mover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.errors import KVTierError
from kvtier.policy.lru import LruPolicy
from kvtier.types import (
    BlockHash,
    EngineId,
    LeaseId,
    NamespaceId,
    PackedHashes,
    PrefixMatch,
    SessionId,
    SlabId,
    SlabSetId,
    TierName,
)
from tests.support.fake_disk import FakeDisk, Stamp, checksum_of
from tests.support.fake_mover import Transfer
from tests.support.lower_shell import LowerShell, origins_of
from tests.support.namespace_record import NamespaceRecord
from tests.support.told import check_granted, taken_in_by

HASH_BYTES = 32
Outcome = ins.Reply | KVTierError
OnOutcome = Callable[[Outcome], None]


def chain(path: str) -> list[BlockHash]:
    """Block hashes of the prefix that this path names: chain("ab") continues chain("a")."""
    return [
        BlockHash(path[:end].rjust(HASH_BYTES, ".").encode()) for end in range(1, len(path) + 1)
    ]


def slots_of(slots: Sequence[int]) -> ev.Slots:
    return np.array(slots, dtype=np.uint32)


@dataclass
class Bound:
    """A slab set as the shell knows it."""

    namespace: NamespaceId
    slabs: tuple[SlabId, ...]
    slots: range


@dataclass
class Waiting:
    """A lease that is pending."""

    session: SessionId
    until: float
    on_outcome: OnOutcome | None


class World:
    """Send events with `run` (all slices at once) or `start` and `turn` (slices interleaved)."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        make_manager: Callable[[ManagerConfig], BlockManager] | None = None,
    ) -> None:
        self._make = make_manager or (lambda config: BlockManager(config, make_policy=LruPolicy))
        self.manager = self._make(config)
        self.config = config
        self.now = 0.0
        self.turns: list[tuple[ev.Event, OnOutcome | None]] = []
        self.checksums: list[ins.ComputeChecksums] = []
        self.mail: dict[SessionId, list[ins.Instruction]] = {}
        self.sets: dict[SlabSetId, Bound] = {}
        self.namespaces: dict[NamespaceId, NamespaceRecord] = {}
        self.content: dict[tuple[int, int], bytes] = {}  # (slot, shard) -> what it holds.
        self.scribbled: set[int] = set()
        self.checksum_at: dict[int, int] = {}  # By the slot table.
        self.waiting: dict[LeaseId, Waiting] = {}
        self.granted: dict[LeaseId, ins.LeaseGranted] = {}  # Of those that were pending.
        self.lower: dict[TierName, LowerShell] = {}  # Opened; the fastest first.
        self.dropped_slots: set[int] = set()
        self.removed_count = 0
        self.removals: list[ins.BlocksRemoved] = []
        self.reserved_watchers: list[Callable[[list[int]], None]] = []
        self.drop_watchers: list[Callable[[Sequence[SlabId]], None]] = []
        self.bound_watchers: list[Callable[[FakeDisk, set[int]], None]] = []
        self._next_slab = 1
        self.node_of: dict[SlabId, int | None] = {}
        self._next_session = 1
        self._next_epoch = 1

    # --------------------------------------------------------------------------------- driving

    def start(self, event: ev.Event, on_outcome: OnOutcome | None = None) -> None:
        """Handle the first slice; what is left waits in `turns`."""
        if isinstance(event, ev.BlocksRecovered):
            taken_in = self.lower[event.tier].to_be_taken_in(event)
        try:
            done = self.manager.handle(event, self.now)
        except KVTierError as error:
            if on_outcome is not None:
                on_outcome(error)
            return
        if isinstance(event, ev.BlocksRecovered):
            below = self.namespaces[event.namespace].below[event.tier]
            assert taken_in_by(done) == taken_in - below, "recovered blocks are told wrongly"
            below.update(taken_in)
        following = [one for one in done if isinstance(one, ins.Continue)]
        assert len(following) <= 1, "two events to continue with"
        assert done[len(done) - len(following) :] == following, "Continue is the last instruction"
        for instruction in done:
            if isinstance(instruction, ins.LeasePending):
                assert isinstance(event, ev.Acquire), "only an Acquire is answered so"
                until = min(event.wait_until, event.deadline)
                self.waiting[instruction.lease] = Waiting(event.session, until, on_outcome)
            self._run(instruction, on_outcome)
        if isinstance(event, ev.Release):
            for lease in event.leases:
                self.waiting.pop(lease, None)
        if isinstance(event, ev.Tick):
            late = [lease for lease, one in self.waiting.items() if one.until <= self.now]
            assert not late, f"leases {late} wait for longer than they should"

    def turn(self, index: int) -> None:
        """Handle the next slice of one of the events under way."""
        self.start(*self.turns.pop(index % len(self.turns)))

    def run(self, event: ev.Event) -> Outcome | None:
        """Handle all slices, and every slice that waited before."""
        outcomes: list[Outcome] = []
        self.start(event, outcomes.append)
        self.finish_turns()
        assert len(outcomes) <= 1, "two replies to one event"
        return outcomes[0] if outcomes else None

    def finish_turns(self) -> None:
        for _ in range(1_000_000):
            if not self.turns:
                return
            self.turn(0)
        raise AssertionError("the slices of an event never end")

    def compute_checksums(self, index: int) -> None:
        one = self.checksums.pop(index % len(self.checksums))
        stamps = [self.stamp(one.namespace, slot) for slot in one.slots.tolist()]
        checksums = np.array([checksum_of(stamp) for stamp in stamps], dtype=np.uint64)
        self.run_quietly(ev.ChecksumsComputed(one.namespace, one.slots, checksums))

    def finish_work(self) -> None:
        """All that is under way ends, as it should."""
        self.finish_turns()
        while self.checksums:
            self.compute_checksums(0)
            self.finish_turns()
        for _ in range(100_000):
            if not self.under_way:
                break
            for shell in self.lower.values():
                shell.mover.finish_all()
        assert not self.under_way, "transfers begin for ever"
        assert not self.waiting, f"leases {list(self.waiting)} wait for nothing"

    def run_quietly(self, event: ev.Event) -> None:
        """An event of the shell's own, which the manager has no reason to refuse."""
        failed: list[Outcome] = []
        self.start(event, failed.append)
        assert not any(isinstance(one, KVTierError) for one in failed), f"refused: {failed}"

    # ------------------------------------------------------------------------------ the shell's

    def open_namespace(
        self, namespace: NamespaceId, *, slot_bytes: int, shard_count: int = 1, tenant: str = ""
    ) -> None:
        record = self.namespaces.get(namespace)
        if record is None:
            name = b"namespace-%06d" % namespace
            record = NamespaceRecord(shard_count, slot_bytes, self.new_epoch(), name, tenant)
        self.namespaces[namespace], record.is_open = record, True
        self.run_quietly(
            ev.NamespaceOpened(
                namespace,
                record.epoch,
                HASH_BYTES,
                slot_bytes,
                shard_count,
                shard_bytes=slot_bytes,
                fingerprint=record.fingerprint,
                tenant=tenant,
            )
        )
        for shell in self.lower.values():
            shell.hand_over(namespace)

    def open_lower(self, tier: TierName, disk: FakeDisk) -> LowerShell:
        self.lower[tier] = shell = LowerShell(self, tier, disk)
        shell.open()
        self.lower = {one: self.lower[one] for one in self.config.lower if one in self.lower}
        return shell

    def open_nvme(self, disk: FakeDisk) -> LowerShell:
        return self.open_lower(TierName.NVME, disk)

    @property
    def direct_disk(self) -> FakeDisk | None:
        """The pool that engines may map."""
        disks = [shell.disk for shell in self.lower.values()]
        return next((disk for disk in disks if disk.is_direct), None)

    @property
    def nvme(self) -> LowerShell | None:
        return self.lower.get(TierName.NVME)

    @property
    def under_way(self) -> list[Transfer]:
        return [one for shell in self.lower.values() for one in shell.mover.under_way]

    def restart(self, keeps: Callable[[int], bool]) -> None:
        """Power is cut and the daemon started anew: memory is gone, and all who used it."""
        for shell in self.lower.values():
            shell.cut_power(keeps)
        self.lower.clear()
        self.make_anew()
        for part in (self.reserved_watchers, self.drop_watchers, self.bound_watchers):
            part.clear()
        for whole in (self.mail, self.content, self.checksum_at, self.node_of):
            whole.clear()
        self.scribbled.clear()
        self.dropped_slots.clear()
        for record in self.namespaces.values():
            record.void_at.clear()

    def make_anew(self) -> None:
        """A new manager, which knows nothing."""
        self.manager = self._make(self.config)
        for part in (self.turns, self.checksums, self.sets, self.waiting):
            part.clear()
        for record in self.namespaces.values():
            record.is_open = False
            record.forget_stored()

    def populate_slab(self, node: int | None = None) -> None:
        self.run_quietly(ev.SlabPopulated(SlabId(self._next_slab), node))
        self.node_of[SlabId(self._next_slab)] = node
        self._next_slab += 1

    def forget_waiting(self, sessions: Collection[SessionId]) -> None:
        """The engine of these sessions is gone: nobody is told of its pending leases."""
        for lease in [one for one, waiting in self.waiting.items() if waiting.session in sessions]:
            del self.waiting[lease]

    def new_session(self) -> SessionId:
        session = SessionId(self._next_session)
        self._next_session += 1
        self.mail[session] = []
        return session

    def new_epoch(self) -> int:
        self._next_epoch += 7
        return self._next_epoch

    def set_of(self, slot: int) -> tuple[SlabSetId, Bound]:
        return next((one, bound) for one, bound in self.sets.items() if slot in bound.slots)

    # ----------------------------------------------------------------------------------- bytes

    def write(self, slot: int, shard: int, block: BlockHash | bytes) -> None:
        self.content[slot, shard] = block

    def scribble(self, slot: int) -> None:
        """Something overwrites the slot that should not have."""
        self.content[slot, 0] = b"scribble"
        self.scribbled.add(slot)

    def stamp(self, namespace: NamespaceId, slot: int) -> Stamp:
        shard_count = self.namespaces[namespace].shard_count
        return tuple(self.content.get((slot, shard), b"") for shard in range(shard_count))

    def is_right(self, slot: int, shard: int, block: BlockHash) -> bool:
        return self.content.get((slot, shard)) == block and slot not in self.dropped_slots

    # --------------------------------------------------------------------------------- checking

    def match(self, namespace: NamespaceId, hashes: Sequence[BlockHash]) -> PrefixMatch:
        return self.manager.match_packed(namespace, b"".join(hashes))

    def told_count(self, namespace: NamespaceId, hashes: Sequence[BlockHash]) -> int:
        """Length of the prefix that is resident by what watchers were told."""
        stored = self.namespaces[namespace].stored
        return next((i for i, block in enumerate(hashes) if block not in stored), len(hashes))

    def assert_idle(self, slots: Sequence[int], *, is_source: bool = False) -> None:
        for shell in self.lower.values():
            shell.mover.assert_idle(slots, is_source=is_source)

    def check(self, chains: Sequence[Sequence[BlockHash]]) -> None:
        """Invariants hold, and every match is what watchers were told: no more, no less."""
        violations = self.manager.check_invariants()
        assert not violations, violations
        for namespace, record in self.namespaces.items():
            if not record.is_open:
                continue
            assert self.manager.namespace_epoch(namespace) == record.epoch
            assert record.stored <= record.ever_ready, "a block is stored that nobody committed"
            for hashes in chains:
                match = self.match(namespace, hashes)
                count, memory_count = match.matched_count, match.memory_count
                assert count == self.told_count(namespace, hashes), "a match is wrong"
                assert sum(number for _, number in match.tiers) == count
                if len(self.lower) == len(self.config.lower):
                    assert dict(match.tiers) == origins_of(self.lower, record, hashes, match)
                # An edge of what is in memory; there may be several.
                beside = [block in record.in_memory for block in hashes[:count]]
                assert memory_count == 0 or beside[memory_count - 1]
                assert memory_count == count or not beside[memory_count]
        for shell in self.lower.values():
            shell.check()

    def assert_all_free(self) -> None:
        """Nobody is left: once evicted, every slot of every namespace is free again."""
        stats = self.manager.stats()
        for counts in stats.namespaces:
            assert counts.reserved_count == counts.held_count == counts.leased_count == 0, counts
            assert counts.free_count + counts.ready_count == counts.slot_count, counts
        assert stats.lease_count == 0
        for namespace in self.namespaces:
            self.clear(namespace)
        self.finish_turns()
        for counts in self.manager.stats().namespaces:
            assert counts.free_count == counts.slot_count, counts
            assert counts.block_count == 0, counts
        for shell in self.lower.values():
            shell.assert_all_free()

    def clear(self, namespace: NamespaceId) -> None:
        if self.namespaces[namespace].is_open:
            self.run_quietly(ev.Clear(namespace, self.new_epoch()))

    # ----------------------------------------------------------------------------- instructions

    def _run(self, done: ins.Instruction, on_outcome: OnOutcome | None) -> None:
        match done:
            case ins.Continue():
                self.turns.append((done.event, on_outcome))
            case ins.ComputeChecksums():
                self.checksums.append(done)
            case ins.Refit():
                event = ev.Refitted(done.namespace, done.epoch, done.work())
                self.turns.append((event, None))
            case ins.OfferSlab() | ins.WithdrawSlab() | ins.RequestQuiet() | ins.RecallSlots():
                self.mail[done.session].append(done)
            case ins.BindSlabs():
                slots = range(done.slot_first, done.slot_first + done.slot_count)
                self.sets[done.slab_set] = Bound(done.namespace, done.slabs, slots)
            case ins.DropSlabs():
                self._drop(done)
            case ins.Demote() | ins.Promote():
                self.lower[done.tier].mover.begin(done)
            case ins.LeaseGranted():
                check_granted(done)
            case ins.LeaseReady():
                self._answer(done)
            case _:
                self._note(done)
        if isinstance(done, ins.Reply) and on_outcome is not None:
            on_outcome(done)

    def _note(self, done: ins.Instruction) -> None:
        """What watchers are told, and what the slot table says."""
        match done:
            case ins.WriteReady():
                record = self.namespaces[done.namespace]
                assert done.epoch == record.epoch, "a block of an older epoch became READY"
                for slot, block in zip(done.slots.tolist(), done.hashes, strict=True):
                    record.forget_entries([slot])
                    record.ready_at[slot] = block
                    record.ever_ready.add(block)
            case ins.WriteChecksums():
                self.checksum_at.update(
                    zip(done.slots.tolist(), done.checksums.tolist(), strict=True)
                )
            case ins.WriteReserved() | ins.WriteGone():
                if isinstance(done, ins.WriteReserved):
                    self._give(done.slots.tolist())
                record = self.namespaces[done.namespace]
                record.forget_entries(done.slots.tolist())
                if isinstance(done, ins.WriteReserved):
                    record.filled_by.update(dict.fromkeys(done.slots.tolist(), done.engine))
            case ins.BlocksStored():
                record, parent = self.namespaces[done.namespace], done.parent
                assert parent is None or parent in record.stored, "stored behind one that is not"
                assert record.stored_in(done.tier).isdisjoint(done.hashes), "stored twice"
                record.stored_in(done.tier).update(done.hashes)
            case ins.BlocksTakenIn():  # Of lower tiers they are compared in `start`.
                if done.tier is TierName.DRAM:
                    self.namespaces[done.namespace].in_memory |= taken_in_by([done])
            case ins.BlocksRemoved():
                stored = self.namespaces[done.namespace].stored_in(done.tier)
                assert stored.issuperset(done.hashes), "removed twice"
                stored.difference_update(done.hashes)
                self.removed_count += len(done.hashes)
                self.removals.append(done)
            case ins.NamespaceCleared():
                record = self.namespaces[done.namespace]
                self.removed_count += len(record.stored)
                record.begin_epoch(done.epoch)
            case ins.BindSegments() | ins.WriteLowerReady() | ins.WriteLowerGone():
                self.lower[done.tier].note(done)

    def _give(self, slots: list[int]) -> None:
        """Somebody may write to these slots from now on."""
        for watcher in self.reserved_watchers:
            watcher(slots)
        self.assert_idle(slots)
        self.scribbled.difference_update(slots)
        for slot in slots:
            self.checksum_at.pop(slot, None)

    def _answer(self, done: ins.LeaseReady) -> None:
        waiting = self.waiting.pop(done.lease, None)
        assert waiting is not None, "nobody waits for this lease"
        check_granted(done.granted)
        self.granted[done.lease] = done.granted
        if waiting.on_outcome is not None:
            waiting.on_outcome(done.granted)

    def _drop(self, done: ins.DropSlabs) -> None:
        bound = self.sets.pop(done.slab_set)
        assert bound.slabs == done.slabs
        for watcher in self.drop_watchers:
            watcher(done.slabs)
        self.assert_idle(bound.slots)
        self.dropped_slots.update(bound.slots)
        self.namespaces[bound.namespace].forget_entries(bound.slots)
        for slab in done.slabs:
            self.populate_slab(self.node_of.pop(slab))


def engine_id(number: int) -> EngineId:
    return EngineId(b"engine-%09d" % number)


def packed(hashes: Sequence[BlockHash] | bytes) -> PackedHashes:
    return PackedHashes(hashes if isinstance(hashes, bytes) else b"".join(hashes), HASH_BYTES)
