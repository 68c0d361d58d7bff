"""The daemon's core with a shell in virtual time: the same events, instructions and policies.

Slices of one event follow one another at once, checksums take no time, nothing fails.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import LowerSettings, ManagerConfig
from kvtier.errors import BadRequest
from kvtier.layout import PAD_BYTES, SEGMENT_BYTES, SlotLayout
from kvtier.policy.eviction import PolicyMaker
from kvtier.sim.machine import Lane, Machine
from kvtier.types import BlockHash, EngineId, NamespaceId, Role, SessionId, SlabId, TierName

HASH_BYTES = 16
NAMESPACE = NamespaceId(1)
SESSION = SessionId(1)
LEASE_SECONDS = 600.0
TICK_SECONDS = 0.25
_SLABS = 8
# The traces' blocks are large: one by one they would take most of the time of a simulation.
_BATCH_BLOCKS = 8
_EPOCH = 7


class Agenda:
    """What happens when: (time, action), the earlier asked first on ties."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(due, self.now), next(self._numbers), action))

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float:
        return self._heap[0][0]

    def step(self) -> None:
        self.now, _, action = heapq.heappop(self._heap)
        action()


class VirtualDaemon:
    """One namespace, one engine's session; a slot is one block."""

    def __init__(
        self, machine: Machine, block_tokens: int, make_policy: PolicyMaker, agenda: Agenda
    ) -> None:
        self._agenda = agenda
        self.block_bytes = block_tokens * machine.bytes_per_token
        self._slot_bytes = -(-self.block_bytes // PAD_BYTES) * PAD_BYTES
        capacity = machine.dram_bytes // self._slot_bytes
        if capacity < 1:
            raise BadRequest(
                f"{machine.dram_bytes} bytes of DRAM hold no block of {self.block_bytes} bytes"
            )
        slabs = min(_SLABS, capacity)
        self.slot_count = capacity // slabs * slabs
        self.read = Lane(machine.nvme_read_bytes_per_second, machine.nvme_delay_seconds)
        self.write = Lane(machine.nvme_write_bytes_per_second, machine.nvme_delay_seconds)
        batch_bytes = max(LowerSettings().batch_bytes, _BATCH_BLOCKS * self.block_bytes)
        lower = LowerSettings(
            write_bytes_per_hour=machine.write_bytes_per_hour,
            transfer_bytes_max=max(LowerSettings().transfer_bytes_max, 2 * batch_bytes),
            batch_bytes=batch_bytes,
        )
        config = ManagerConfig(
            slab_bytes=capacity // slabs * self._slot_bytes,
            slab_count_max=slabs,
            lease_seconds_max=LEASE_SECONDS,
            leases_per_session_max=1 << 20,
            stock_divisor=1,
            lower={TierName.NVME: lower},
        )
        self.manager = BlockManager(config, make_policy=make_policy)
        self._waiting: dict[int, Callable[[ins.LeaseGranted], None]] = {}
        self._later: list[ev.Event] = []
        self._open(machine, block_tokens, slabs)

    # ---------------------------------------------------------------------------------- calls

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        wait_seconds: float,
        then: Callable[[ins.LeaseGranted], None],
    ) -> None:
        now = self._agenda.now
        wait_until = now + wait_seconds if wait_seconds else 0.0
        event = ev.Acquire(
            *(SESSION, NAMESPACE, hashes, now + LEASE_SECONDS), wait_until=wait_until
        )
        answer = self._tell_all(event)
        if isinstance(answer, ins.LeasePending):
            self._waiting[answer.lease] = then
            self._agenda.at(wait_until, self._tick_once)
            return
        assert isinstance(answer, ins.LeaseGranted), "an acquire is granted or pends"
        then(answer)

    def release(self, granted: ins.LeaseGranted) -> None:
        if granted.lease is not None:
            self._tell_all(ev.Release(SESSION, (granted.lease,)))

    def reserve(self, wanted: int) -> ev.Slots:
        answer = self._tell_all(ev.Reserve(SESSION, NAMESPACE, wanted))
        assert isinstance(answer, ins.SlotsReserved), "a reserve is answered so"
        return answer.slots

    def commit(
        self, hashes: Sequence[BlockHash], slots: ev.Slots, parent: BlockHash | None
    ) -> None:
        # With the checksums, which take no time: they need not be asked for.
        sums = np.zeros(len(slots), dtype=np.uint64)
        self._tell_all(ev.Commit(SESSION, NAMESPACE, hashes, slots, parent, _EPOCH, checksums=sums))

    def match(self, packed: bytes) -> int:
        return self.manager.match_packed(NAMESPACE, packed).matched_count

    def tick(self) -> None:
        """And again, as long as anything else is to happen."""
        self._tick_once()
        agenda = self._agenda
        if len(agenda):  # While nothing happens there is nothing to tick for.
            agenda.at(max(agenda.now + TICK_SECONDS, agenda.next_at), self.tick)

    # ---------------------------------------------------------------------------------- shell

    def _tick_once(self) -> None:
        self._tell_all(ev.Tick())

    def _tell_all(self, event: ev.Event) -> ins.Reply | None:
        reply = self._tell_one(event)
        while self._later:  # Ends: what follows from an event is bounded.
            self._tell_one(self._later.pop(0))
        return reply

    def _tell_one(self, event: ev.Event) -> ins.Reply | None:
        reply: ins.Reply | None = None
        rest: ev.Event | None = event
        while rest is not None:  # Ends: each slice works off a bounded part.
            done, rest = self.manager.handle(rest, self._agenda.now), None
            for one in done:
                if isinstance(one, ins.Continue):
                    rest = one.event
                elif isinstance(one, ins.Reply):
                    reply = one
                else:
                    self._run(one)
        return reply

    def _run(self, done: ins.Instruction) -> None:
        match done:
            case ins.OfferSlab():
                self._later.append(ev.SlabMapped(done.session, done.slab))
            case ins.Demote():
                self._transfer(self.write, done.slots, lambda: self._demoted(done))
            case ins.Promote():
                self._transfer(self.read, done.slots, lambda: self._promoted(done))
            case ins.LeaseReady():
                self._agenda.at(self._agenda.now, lambda: self._ready(done))
            case ins.Refit():
                self._later.append(ev.Refitted(done.namespace, done.epoch, done.work()))
            case _:
                pass  # Slot tables and watchers: nobody reads them here.

    def _ready(self, done: ins.LeaseReady) -> None:
        self._waiting.pop(done.lease)(done.granted)

    def _transfer(self, lane: Lane, slots: ev.Slots, then: Callable[[], None]) -> None:
        self._agenda.at(lane.move(self._agenda.now, len(slots) * self.block_bytes), then)

    def _demoted(self, asked: ins.Demote) -> None:
        outcomes = np.full(len(asked.slots), ev.TransferOutcome.DONE, dtype=np.uint8)
        zeros = np.zeros(len(asked.slots), dtype=np.uint64)
        self._tell_all(ev.Demoted(asked.namespace, asked.slots, asked.lower_slots, outcomes, zeros))

    def _promoted(self, asked: ins.Promote) -> None:
        outcomes = np.full(len(asked.slots), ev.TransferOutcome.DONE, dtype=np.uint8)
        zeros = np.zeros(len(asked.slots), dtype=np.uint64)
        self._tell_all(
            ev.Promoted(asked.namespace, asked.lower_slots, asked.slots, outcomes, zeros)
        )

    def _open(self, machine: Machine, block_tokens: int, slabs: int) -> None:
        engine = EngineId(bytes(16))
        self._tell_all(
            ev.NamespaceOpened(
                *(NAMESPACE, _EPOCH, HASH_BYTES, self._slot_bytes, 1),
                shard_bytes=self.block_bytes,
                fingerprint=b"simulated-------",
                block_tokens=block_tokens,
            )
        )
        self._tell_all(ev.SessionOpened(SESSION, engine, Role.BOTH, (0,)))
        self._tell_all(ev.NamespaceJoined(SESSION, NAMESPACE))
        for number in range(1, slabs + 1):
            self._tell_all(ev.SlabPopulated(SlabId(number)))
        if machine.nvme_bytes:
            layout = SlotLayout(self.block_bytes, 1)
            segment_bytes = max(SEGMENT_BYTES, layout.slot_bytes)
            segments = machine.nvme_bytes // segment_bytes
            if segments < 3:
                raise BadRequest(f"NVMe of {machine.nvme_bytes} bytes: give it {3 * segment_bytes}")
            rows = segment_bytes // layout.slot_bytes
            self._tell_all(ev.LowerOpened(segment_bytes, segments, rows, 1, 1))
