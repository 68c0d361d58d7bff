"""Level 1 of simulation: the core alone, in virtual time, with engines that fail.

A heap of (time, action). Engines serve conversations: acquire what is resident, read it for a
while, offload the rest with copies that take time, commit. One seed decides everything: arrivals,
latencies, which slice of which event comes next, and the faults.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.types import BlockHash, Cut, NamespaceId, TierName
from tests.support.fake_engine import FakeEngine, Held, Offload, Process
from tests.support.world import World, chain, slots_of

SLOT_BYTES = 4096
SECONDS = 40.0
REQUEST_SECONDS = 0.35  # Mean time between two requests of one engine.
FAULT_SECONDS = 1.5  # Mean time between two faults.
CHECKED_STEPS = 25  # All invariants are checked every so many steps.
LEASE_SECONDS = 4.0
NODES = (0, 1, None)  # Of slabs and of engines, in turns.
HIT_RATIO_MIN = 0.95
EXPECTED_BLOCKS_MIN = 300

CONFIG = ManagerConfig(
    slab_bytes=32 * SLOT_BYTES,
    slab_count_max=8,
    stock_divisor=1,
    slice_blocks=4,
    lease_slice_blocks=4,
    evict_slice_blocks=4,
    swept_slice_blocks=4,
    idle_seconds=20.0,
    growth_wait_seconds=1.0,
)
ONE_SHARD = NamespaceId(1)
RIVAL = NamespaceId(2)
TWO_SHARDS = NamespaceId(3)


@dataclass
class Hits:
    """What an acquire should have found, by what watchers were told, and what it found."""

    expected_count: int = 0
    leased_count: int = 0
    cut_count: int = 0  # Acquires that ended for another reason than a miss.
    from_tier: Counter[TierName] = field(default_factory=Counter)  # Blocks leased, by place.


class Simulation:
    """`run` until the time is over, then see everybody off and look for leaks."""

    world_class = World
    config = CONFIG
    seconds = SECONDS
    conversation_count = 12  # Of each namespace; the first ones go on more often than the others.
    skew = 0.3
    request_seconds = REQUEST_SECONDS
    wait_seconds = 0.0
    hold_seconds = LEASE_SECONDS / 2
    slot_bytes = MappingProxyType(
        {ONE_SHARD: SLOT_BYTES, RIVAL: SLOT_BYTES, TWO_SHARDS: SLOT_BYTES}
    )

    def __init__(
        self, seed: int, make_manager: Callable[[ManagerConfig], BlockManager] | None = None
    ) -> None:
        self.chance = random.Random(seed)
        self.world = self.world_class(self.config, make_manager=make_manager)
        self.hits = Hits()
        self.step_count = 0
        self.conversations = {
            one: [self._new_path() for _ in range(self.conversation_count)]
            for one in (ONE_SHARD, RIVAL, TWO_SHARDS)
        }
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._engine_count = 0
        self.engines: list[FakeEngine] = []
        self.start_daemon()
        self.later(FAULT_SECONDS, self._fault)
        self.later(0.5, self._tick)

    def start_daemon(self) -> None:
        """The daemon, and engines that find it."""
        for namespace in self.slot_bytes:
            self.open_namespace(namespace)
        for _ in range(self.config.slab_count_max):
            self.later(1.0, self._slab_maker())
        for shard_count, together in ((1, True), (1, False), (2, False)):
            self._start_engine(shard_count, together)

    def open_namespace(self, namespace: NamespaceId) -> None:
        self.world.open_namespace(
            namespace,
            slot_bytes=self.slot_bytes[namespace],
            shard_count=2 if namespace == TWO_SHARDS else 1,
        )

    def run(self) -> Hits:
        self.play()
        self._finish()
        return self.hits

    def play(self) -> None:
        while self._agenda and self.world.now < self.seconds:
            self._step()

    def later(self, seconds_mean: float, action: Callable[[], None]) -> None:
        seconds = self.chance.expovariate(1.0 / seconds_mean) if seconds_mean else 0.0
        self.at(self.world.now + seconds, action)

    def at(self, due: float, action: Callable[[], None]) -> None:
        self.step_count += 1
        heapq.heappush(self._agenda, (due, self.step_count, action))

    # ----------------------------------------------------------------------------------- steps

    def _step(self) -> None:
        due, number, action = heapq.heappop(self._agenda)
        self.world.now = max(self.world.now, due)
        action()
        for engine in self.engines:
            engine.run_dma()
        while self.world.turns and self.chance.random() < 0.7:
            self.world.turn(self.chance.randrange(64))
        while self.world.checksums and self.chance.random() < 0.5:
            self.world.compute_checksums(self.chance.randrange(64))
        if number % CHECKED_STEPS == 0:
            namespace = self.chance.choice(list(self.conversations))
            self.world.check([chain(path) for path in self.conversations[namespace][:4]])

    def _tick(self) -> None:
        self.world.run_quietly(ev.Tick())
        self.later(0.5, self._tick)

    def _mail(self, engine: FakeEngine, process: Process) -> None:
        """Processes read what the daemon asks of them sooner or later, as long as they live."""
        if process.alive and engine in self.engines:
            for _ in range(3):
                engine.read_mail(process)
            if self.chance.random() < 0.3:
                engine.declare_own_quiet(process)
            self.later(0.2, lambda: self._mail(engine, process))

    def _request(self, engine: FakeEngine) -> None:
        """A turn of a conversation: onboard what is there, compute and offload the rest."""
        if engine not in self.engines:
            return
        self.later(self.request_seconds, lambda: self._request(engine))
        namespace = self._namespace_of(engine)
        hashes = chain(self.next_prompt(namespace))
        self._onboard(engine, namespace, hashes)
        engine.reserve(namespace, len(hashes))
        self.later(0.1, lambda: self._offload(engine, namespace, hashes))

    def next_prompt(self, namespace: NamespaceId) -> str:
        """A conversation goes on, or a new one begins in its place."""
        paths = self.conversations[namespace]
        number = min(int(self.chance.expovariate(self.skew)), len(paths) - 1)
        if len(paths[number]) > 24:
            paths[number] = self._new_path()
        paths[number] += self.chance.choice("abc") * self.chance.randint(1, 3)
        return paths[number]

    def _onboard(self, engine: FakeEngine, namespace: NamespaceId, hashes: list[BlockHash]) -> None:
        before = list(engine.leases)
        if engine.scheduler.session is None or self.world.turns:
            return
        expected = self.expected_count(namespace, hashes)
        asked_at = self.world.now

        def granted(outcome: ins.LeaseGranted) -> None:
            is_excused = self.is_excused(namespace, asked_at)
            self.hits.from_tier.update(dict(outcome.tiers))
            if outcome.cut in (Cut.NONE, Cut.MISS) and not is_excused:
                # What has been lost while it waited is no fault.
                self.hits.expected_count += min(expected, self.world.told_count(namespace, hashes))
                self.hits.leased_count += outcome.leased_count
            else:
                self.hits.cut_count += 1
            self.later(0.0, lambda: self._hold_new(engine, before))

        engine.acquire(
            namespace,
            hashes,
            seconds=LEASE_SECONDS,
            wait=self.wait_seconds,
            on_granted=granted,
        )
        self.world.finish_turns()

    def is_excused(self, namespace: NamespaceId, since: float) -> bool:
        """Whether something has gone wrong that the manager cannot help."""
        return False

    def expected_count(self, namespace: NamespaceId, hashes: list[BlockHash]) -> int:
        return self.world.told_count(namespace, hashes)

    def _hold_new(self, engine: FakeEngine, before: list[Held]) -> None:
        for held in engine.leases:
            if held not in before and not held.is_planned:
                held.is_planned = True
                self.later(0.3, lambda held=held: self._read(engine, held))
                self.later(self.hold_seconds, lambda held=held: self._release(engine, held))

    def _read(self, engine: FakeEngine, held: Held) -> None:
        """Also after the lease has ended in the books of its scheduler: a worker may be late."""
        if held in engine.leases:
            engine.read(held)
            self.later(0.5, lambda: self._read(engine, held))

    def _release(self, engine: FakeEngine, held: Held) -> None:
        if held in engine.leases and self.chance.random() < 0.8:  # Else it stalls: expires.
            engine.release(held)

    def _offload(self, engine: FakeEngine, namespace: NamespaceId, hashes: list[BlockHash]) -> None:
        before = list(engine.offloads)
        engine.offload(namespace, hashes)
        for copy in engine.copies:
            stalled = self.chance.random() < 0.02
            self.later(8.0 if stalled else 0.1, lambda copy=copy: self._copy(engine, copy))
        for one in engine.offloads:
            if one not in before:
                self.later(0.3, lambda one=one: self._commit(engine, one))

    def _copy(self, engine: FakeEngine, copy: object) -> None:
        for one in engine.copies:
            if one is copy:
                engine.run_copy(one)
                return

    def _commit(self, engine: FakeEngine, offload: Offload) -> None:
        if offload in engine.offloads:
            engine.commit(offload)
            if offload in engine.offloads:  # Its copies are not done.
                self.later(0.3, lambda: self._commit(engine, offload))

    # ---------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        self.later(FAULT_SECONDS, self._fault)
        engine = self.chance.choice(self.engines)
        process = self.chance.choice(engine.processes)
        kind = self.chance.choice(
            ["lose", "lose", "break", "die", "kill all", "bye", "corrupt", "corrupt", "withdraw",
             "drain", "evict", "hint", "clear"]
        )  # fmt: skip
        if kind == "lose":
            engine.lose(process)
            self.later(1.0, lambda: engine.connect(process))
        elif kind == "break":
            engine.break_unseen(process)
        elif kind in ("die", "bye", "kill all"):
            for one in engine.processes if kind == "kill all" else [process]:
                (engine.say_bye if kind == "bye" else engine.die)(one)
            self.later(2.0, lambda: self._restart(engine))
        elif kind == "drain":
            self.world.run_quietly(ev.DrainStarted())
            self.later(0.5, lambda: self.world.run_quietly(ev.DrainEnded()))
        else:
            self._trouble_blocks(kind)

    def _trouble_blocks(self, kind: str) -> None:
        world = self.world
        namespace = self.chance.choice(list(self.conversations))
        hashes = chain(self.chance.choice(self.conversations[namespace]))
        ready = sorted(world.namespaces[namespace].ready_at)
        if kind == "corrupt" and ready:
            slot = self.chance.choice(ready)
            world.scribble(slot)
            for engine in self.engines:
                engine.drop_corrupt(slot)
            world.run_quietly(ev.SlotsCorrupt(namespace, slots_of([slot])))
        elif kind == "withdraw" and world.sets:
            world.run_quietly(ev.WithdrawSlabSet(self.chance.choice(sorted(world.sets))))
        elif kind == "evict":
            world.start(ev.Evict(namespace, hashes))
        elif kind == "hint":
            kind = self.chance.randrange(3)
            world.start(
                ev.HintTurnKind(namespace, hashes, kind)
                if kind
                else ev.HintSessionEnd(namespace, hashes)
            )
        elif kind == "clear" and self.chance.random() < 0.5:
            world.clear(namespace)

    def _restart(self, engine: FakeEngine) -> None:
        """What is left of the engine dies; a new one takes its place."""
        if engine not in self.engines:
            return
        for process in engine.processes:
            engine.die(process)
        self.engines.remove(engine)
        anew = self._start_engine(len(engine.workers), engine.scheduler in engine.workers)
        anew.dma = engine.dma

    def _finish(self) -> None:
        """Everybody dies; after the last grace time nothing may be missing."""
        for engine in self.engines:
            for process in engine.processes:
                engine.die(process)
        self.world.finish_work()
        self.world.now += 100.0
        self.world.run(ev.Tick())
        self.world.finish_work()
        self.world.check([])
        self.world.assert_all_free()
        self.check_hits()

    def check_hits(self) -> None:
        hits = self.hits
        assert hits.expected_count >= EXPECTED_BLOCKS_MIN, f"hardly anything to hit: {hits}"
        assert hits.leased_count >= HIT_RATIO_MIN * hits.expected_count, f"misses: {hits}"

    # --------------------------------------------------------------------------------- helpers

    def _start_engine(self, shard_count: int, together: bool) -> FakeEngine:
        self._engine_count += 1
        engine = FakeEngine(
            self.world,
            self._engine_count,
            shard_count=shard_count,
            together=together,
            node=NODES[self._engine_count % len(NODES)],
        )
        self.engines.append(engine)
        for process in engine.processes:
            self.later(0.1, lambda process=process: self._mail(engine, process))
        self.later(self.request_seconds, lambda: self._request(engine))
        return engine

    def _namespace_of(self, engine: FakeEngine) -> NamespaceId:
        if len(engine.workers) == 2:
            return TWO_SHARDS
        return RIVAL if self.chance.random() < 0.3 else ONE_SHARD

    def _slab_maker(self) -> Callable[[], None]:
        """Populates a slab, unless the daemon that asked for it is gone."""
        manager = self.world.manager

        def populate() -> None:
            if self.world.manager is manager:
                self.world.populate_slab(NODES[len(self.world.node_of) % len(NODES)])

        return populate

    def _new_path(self) -> str:
        return "".join(self.chance.choice("abc") for _ in range(self.chance.randint(2, 6)))
