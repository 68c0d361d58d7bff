"""A client and its daemon in one object, in memory: enough of both for the connector's tests.

Calls answer at once, from the thread that makes them; delays come from a stepped control thread.
What a connector must never do (end a lease twice, commit a slot it does not hold) is written down
in `violations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtier.client.arena import SlabPins
from kvtier.clock import Clock
from kvtier.errors import KVTierError, NotReserved, StaleSlot, Unavailable
from kvtier.namespace import NamespaceSpec
from kvtier.types import CommitOutcome, Cut, PrefixMatch, Presence, TierName, Worth

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FakeSession:
    generation: int
    session_id: int


@dataclass(frozen=True, slots=True)
class FakeState:
    epoch: int
    session: FakeSession
    wants_token_ids: bool = False


@dataclass(slots=True, eq=False)
class FakeNamespace:
    """The daemon's side of a namespace, and the client's handle of it."""

    spec: NamespaceSpec
    client: FakeClient
    epoch: int = 1
    resident: dict[bytes, int] = field(default_factory=dict)  # In memory: hash to slot.
    nvme: dict[bytes, Bytes] = field(default_factory=dict)  # On NVMe only: hash to bytes by shard.
    parents: dict[bytes, bytes | None] = field(default_factory=dict)

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self.resident or block_hash in self.nvme

    @property
    def state(self) -> FakeState | None:
        session = self.client.session
        if session is None:
            return None
        return FakeState(self.epoch, session, self.client.wants_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class FakeLease:
    lease_id: int | None
    session: FakeSession
    leased_count: int
    slots: npt.NDArray[np.uint32]
    deadline_ns: int
    cut: Cut
    tiers: tuple[tuple[TierName, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FakeReservation:
    session: FakeSession
    slots: npt.NDArray[np.uint32]
    epoch: int
    stock_count_max: int


@dataclass(frozen=True, slots=True)
class FakeCommit:
    """One block of one Commit, in the order the daemon saw them."""

    block_hash: bytes
    parent: bytes | None
    outcome: CommitOutcome
    checksum: int | None


class FakeArena:
    def __init__(self, client: FakeClient, shard: int) -> None:
        self._client = client
        self._shard = shard

    @contextmanager
    def hold(self, slots: Sequence[int], session: FakeSession) -> Iterator[list[Bytes]]:
        if session in self._client.refused or session.generation != self._client.generation:
            raise StaleSlot("the session these slots were given under is lost")
        self._client.open_hold_count += 1
        yield [self._client.memory[self._shard][slot] for slot in slots]
        self._client.open_hold_count -= 1


class FakeClient:
    """See the module; single-threaded but for `quiet`, which waits for the workers."""

    def __init__(
        self, clock: Clock, *, slot_count: int = 64, shard_bytes: int = 16, shard_count: int = 1
    ) -> None:
        self._clock = clock
        self.memory = np.zeros((shard_count, slot_count, shard_bytes), dtype=np.uint8)
        self.free = list(range(slot_count))
        self.reserved: dict[int, FakeSession] = {}
        self.leases: dict[int, list[int]] = {}  # Lease id to pinned slots.
        self.lease_sessions: dict[int, FakeSession] = {}  # Of every lease ever granted.
        self.released: set[int] = set()
        self.wants_token_ids = False
        self.tokens_of: dict[bytes, list[int]] = {}  # What came with commits.
        self._deadlines: dict[int, int] = {}
        self.generation = 1
        self.session: FakeSession | None = FakeSession(1, 1)
        self.by_value = False
        self.stock_count_max = slot_count
        self.refused: set[FakeSession] = set()
        self.namespaces: dict[bytes, FakeNamespace] = {}  # By fingerprint.
        self.calls: Counter[str] = Counter()
        self.commits: list[FakeCommit] = []
        self.hints: list[tuple[int, dict[str, object]]] = []  # With blocks there at the time.
        self.hashes_asked: list[int] = []  # Length of each acquire.
        self.requests_asked: list[tuple[str, str]] = []  # (call, request id).
        self.waits_asked: list[float] = []  # Seconds of each acquire.
        self.promote_limits: list[int] = []  # Of the next waits: blocks until their time is over.
        self.violations: list[str] = []
        self.during: dict[str, Callable[[], object]] = {}  # What happens while a call is made.
        self._errors: dict[str, list[KVTierError]] = {}
        self._quiet_handlers: list[Callable[[FakeSession], None]] = []
        self.open_hold_count = 0
        self.pins: SlabPins | None = None
        self._recall_handler: Callable[[FakeNamespace, int], None] | None = None
        self._lease_count = 0
        self._session_count = 1
        self._waste: list[int] = []  # Slots whose replica went while a lease pinned them.

    # ------------------------------------------------------------------------------- the script

    def fail_next(self, call: str, error: KVTierError) -> None:
        """The next `call` raises `error` and changes nothing."""
        self._errors.setdefault(call, []).append(error)

    def disconnect(self) -> None:
        """The daemon is gone; the session that was is lost."""
        if self.session is not None:
            self.refused.add(self.session)
        self.session = None

    def reconnect(self, *, restarted: bool = False) -> None:
        """A new session; with `restarted` of a daemon that remembers what is on NVMe alone."""
        self.disconnect()
        if restarted:
            self.generation += 1
            for namespace in self.namespaces.values():
                self._lose_memory(namespace)
            self.free = list(range(self.memory.shape[1]))
            self.reserved.clear()
            self.leases.clear()
            self._waste.clear()
        self._session_count += 1
        self.session = FakeSession(self.generation, self._session_count)

    def quiet(self) -> None:
        """Let every handler drain the lost sessions; then their slots and leases return."""
        for session in sorted(self.refused, key=lambda s: s.session_id):
            for handler in self._quiet_handlers:
                handler(session)
        for slot, session in list(self.reserved.items()):
            if session != self.session:
                del self.reserved[slot]
                self.free.append(slot)
        for lease_id in list(self.leases):
            if self.lease_sessions[lease_id] != self.session:
                del self.leases[lease_id]
        self._free_waste()

    def expire(self) -> None:
        """End the leases whose deadline has passed, without any margin."""
        for lease_id in list(self.leases):
            if self._deadlines[lease_id] < self._clock.now_ns():
                del self.leases[lease_id]
        self._free_waste()

    def recall(self, namespace: FakeNamespace, count: int) -> None:
        if self._recall_handler is not None:
            self._recall_handler(namespace, count)

    def evict(self, namespace: FakeNamespace, block_hash: bytes) -> None:
        """The block and all behind it, unless a lease pins one of them."""
        gone = [block_hash]
        for child, parent in namespace.parents.items():
            if parent in gone:
                gone.append(child)
        if self._is_any_pinned(namespace, gone):
            return
        for name in reversed(gone):
            if name in namespace.resident:
                self.free.append(namespace.resident.pop(name))
            namespace.nvme.pop(name, None)
            del namespace.parents[name]

    def demote(self, namespace: FakeNamespace, block_hash: bytes) -> None:
        """The block and all behind it leave memory for NVMe, unless a lease pins one of them."""
        going = [block_hash]
        for child, parent in namespace.parents.items():
            if parent in going:
                going.append(child)
        if self._is_any_pinned(namespace, going):
            return
        for name in going:
            if name in namespace.resident:
                slot = namespace.resident.pop(name)
                namespace.nvme[name] = self.memory[:, slot].copy()
                self.free.append(slot)

    def _is_any_pinned(self, namespace: FakeNamespace, hashes: Sequence[bytes]) -> bool:
        pinned = {slot for slots in self.leases.values() for slot in slots}
        return any(namespace.resident.get(name) in pinned for name in hashes)

    def void(self, namespace: FakeNamespace) -> None:
        """Somebody cleared it."""
        namespace.epoch += 1
        pinned = {slot for slots in self.leases.values() for slot in slots}
        for slot in namespace.resident.values():
            (self._waste if slot in pinned else self.free).append(slot)
        namespace.resident.clear()
        namespace.nvme.clear()
        namespace.parents.clear()

    def _lose_memory(self, namespace: FakeNamespace) -> None:
        """What is on NVMe stays, as far as its parents do."""
        namespace.resident.clear()
        for name, parent in list(namespace.parents.items()):
            if name not in namespace.nvme or (parent and parent not in namespace.parents):
                del namespace.parents[name]
                namespace.nvme.pop(name, None)

    # ------------------------------------------------------------------------------- the client

    @property
    def connected(self) -> bool:
        return self.session is not None

    def open_namespace(self, spec: NamespaceSpec) -> FakeNamespace:
        return self.namespaces.setdefault(spec.fingerprint(), FakeNamespace(spec, self))

    def match(
        self, namespace: FakeNamespace, hashes: Sequence[bytes], *, request_id: str = ""
    ) -> PrefixMatch:
        self._begin("match")
        self.requests_asked.append(("match", request_id))
        count = self._matched_count(namespace, hashes)
        in_memory = [block_hash in namespace.resident for block_hash in hashes[:count]]
        memory_count = in_memory.index(False) if False in in_memory else count
        presence = b""
        if not namespace.spec.chained:
            presence = bytes(_presence_of(namespace, block_hash) for block_hash in hashes)
        return PrefixMatch(count, memory_count, _tiers_of(in_memory), presence)

    def acquire(
        self,
        namespace: FakeNamespace,
        hashes: Sequence[bytes],
        *,
        lease_seconds: float | None = None,
        wait_seconds: float = 0.0,
        skip_count: int = 0,
        request_id: str = "",
    ) -> FakeLease:
        session = self._begin("acquire")
        self.requests_asked.append(("acquire", request_id))
        self.hashes_asked.append(len(hashes))
        self.waits_asked.append(wait_seconds)
        matched = hashes[: self._matched_count(namespace, hashes)]
        in_memory = [block_hash in namespace.resident for block_hash in matched]
        limit = 0
        if wait_seconds > 0:
            limit = self.promote_limits.pop(0) if self.promote_limits else len(hashes)
        count, cut = self._bring_into_memory(namespace, matched, skip_count, limit)
        if cut is Cut.NONE and count < len(hashes):
            cut = Cut.MISS
        deadline_ns = self._clock.now_ns() + int((lease_seconds or 30.0) * 1e9)
        pinned = [namespace.resident[name] for name in hashes[:count] if name in namespace.resident]
        slots = [namespace.resident[name] for name in hashes[skip_count:count]]
        given = np.array(slots, dtype=np.uint32)
        if count <= skip_count:
            return FakeLease(None, session, 0, given, deadline_ns, cut)
        self._lease_count += 1
        self.leases[self._lease_count] = pinned
        self.lease_sessions[self._lease_count] = session
        self._deadlines[self._lease_count] = deadline_ns
        tiers = _tiers_of(in_memory[:count])
        return FakeLease(self._lease_count, session, count, given, deadline_ns, cut, tiers)

    def _bring_into_memory(
        self, namespace: FakeNamespace, hashes: Sequence[bytes], skip_count: int, limit: int
    ) -> tuple[int, Cut]:
        """Promote up to `limit` blocks; how many blocks from the first one on can be leased."""
        for index, block_hash in enumerate(hashes):
            if index < skip_count or block_hash in namespace.resident:
                continue
            if limit == 0:
                return index, Cut.DEADLINE
            if not self.free:
                return index, Cut.NO_SPACE
            limit -= 1
            slot = self.free.pop(0)
            self.memory[:, slot] = namespace.nvme.pop(block_hash)
            namespace.resident[block_hash] = slot
        return len(hashes), Cut.NONE

    def release(self, leases: Sequence[FakeLease], worth: Worth | None = None) -> int:
        session = self._begin("release")
        for lease in leases:
            if lease.session != session:
                continue
            if lease.lease_id is None or lease.lease_id in self.released:
                self.violations.append(f"lease {lease.lease_id} was released, but is not held")
                continue
            self.released.add(lease.lease_id)
            self.leases.pop(lease.lease_id, None)  # Else it has expired.
        self._free_waste()
        return len(leases)

    def reserve(self, namespace: FakeNamespace, count: int) -> FakeReservation:
        session = self._begin("reserve")
        held_count = sum(owner == session for owner in self.reserved.values())
        slots = self.free[: max(0, min(count, self.stock_count_max - held_count))]
        self.free = self.free[len(slots) :]
        self.reserved.update(dict.fromkeys(slots, session))
        given = np.array(slots, dtype=np.uint32)
        return FakeReservation(session, given, namespace.epoch, self.stock_count_max)

    def commit(
        self,
        namespace: FakeNamespace,
        hashes: Sequence[bytes],
        slots: Sequence[int],
        *,
        parent: bytes | None = None,
        session: FakeSession,
        epoch: int,
        checksums: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
    ) -> list[CommitOutcome]:
        self._check_reserved("commit", slots, session)
        if token_ids:
            size = len(token_ids) // len(hashes)
            for index, block_hash in enumerate(hashes):
                self.tokens_of[block_hash] = list(token_ids[index * size : (index + 1) * size])
        outcomes = []
        for index, (block_hash, slot) in enumerate(zip(hashes, slots, strict=True)):
            del self.reserved[slot]
            outcome = CommitOutcome.READY
            parent = parent if namespace.spec.chained else None
            if epoch != namespace.epoch:
                outcome = CommitOutcome.VOID
            elif namespace.has(block_hash):
                outcome = CommitOutcome.PRESENT
            elif parent is not None and not namespace.has(parent):
                outcome = CommitOutcome.NO_PARENT
            if outcome is CommitOutcome.READY:
                namespace.resident[block_hash] = slot
                namespace.parents[block_hash] = parent
            else:
                self.free.append(slot)
            checksum = None if checksums is None else checksums[index]
            self.commits.append(FakeCommit(block_hash, parent, outcome, checksum))
            outcomes.append(outcome)
            parent = block_hash
        return outcomes

    def abort(self, namespace: FakeNamespace, slots: Sequence[int], *, session: FakeSession) -> int:
        self._check_reserved("abort", slots, session)
        for slot in slots:
            del self.reserved[slot]
            self.free.append(slot)
        return len(slots)

    def clear(self, namespace: FakeNamespace) -> int:
        self._begin("clear")
        self.void(namespace)
        return namespace.epoch

    def hint(
        self,
        namespace: FakeNamespace,
        hashes: Sequence[bytes],
        *,
        session_end: bool = False,
        paused_seconds: float | None = None,
        turn_kind: str | None = None,
    ) -> bool:
        self._begin("hint")
        told = {"session_end": session_end, "paused_seconds": paused_seconds}
        told["turn_kind"] = turn_kind
        resident = sum(block_hash in namespace.resident for block_hash in hashes)
        self.hints.append((resident, {name: one for name, one in told.items() if one}))
        return False

    def arena(self, namespace: FakeNamespace, shard: int = 0) -> FakeArena:
        return FakeArena(self, shard)

    def set_slab_pins(self, pins: SlabPins) -> None:
        """Its one slab is where `memory` lies."""
        self.pins = pins
        pins.add(int(self.memory.ctypes.data), self.memory.nbytes)

    def add_quiet_handler(self, handler: Callable[[FakeSession], None]) -> None:
        self._quiet_handlers.append(handler)

    def set_recall_handler(self, handler: Callable[[FakeNamespace, int], None] | None) -> None:
        self._recall_handler = handler

    # ------------------------------------------------------------------------------- helpers

    def _begin(self, call: str) -> FakeSession:
        self.calls[call] += 1
        if event := self.during.pop(call, None):
            event()
        if errors := self._errors.get(call):
            raise errors.pop(0)
        if self.session is None:
            raise Unavailable("the fake daemon is gone")
        return self.session

    def _check_reserved(self, call: str, slots: Sequence[int], session: FakeSession) -> None:
        current = self._begin(call)
        if session != current:
            raise StaleSlot("the slots were given under a lost session")
        for slot in slots:
            if self.reserved.get(slot) != session:
                self.violations.append(f"{call} of slot {slot}, which is not reserved")
                raise NotReserved(f"slot {slot} is not reserved")

    def _free_waste(self) -> None:
        pinned = {slot for slots in self.leases.values() for slot in slots}
        self.free += [slot for slot in self._waste if slot not in pinned]
        self._waste = [slot for slot in self._waste if slot in pinned]

    def _matched_count(self, namespace: FakeNamespace, hashes: Sequence[bytes]) -> int:
        for index, block_hash in enumerate(hashes):
            if not namespace.has(block_hash):
                return index
        return len(hashes)


def _presence_of(namespace: FakeNamespace, block_hash: bytes) -> Presence:
    if block_hash in namespace.resident:
        return Presence.MEMORY
    return Presence.LOWER if block_hash in namespace.nvme else Presence.ABSENT


def _tiers_of(in_memory: Sequence[bool]) -> tuple[tuple[TierName, int], ...]:
    """Runs in chain order."""
    return tuple(
        (TierName.DRAM if is_there else TierName.NVME, len(list(run)))
        for is_there, run in groupby(in_memory)
    )
