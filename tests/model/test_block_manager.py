"""The block manager against a model: what watchers were told, what each slot's bytes must be."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core import events as ev
from kvtier.core.settings import ManagerConfig
from kvtier.types import NamespaceId
from tests.support.fake_engine import FakeEngine
from tests.support.machines import machine_settings
from tests.support.world import World, chain, slots_of

SLOT_BYTES = 4096
SHARED = NamespaceId(1)  # Two engines with one worker each meet here.
RIVAL = NamespaceId(2)  # Theirs too: takes slabs from the first one.
SHARDED = NamespaceId(3)  # Two shards, an engine of its own.
NAMESPACES = (SHARED, RIVAL, SHARDED)
PATHS = ["".join(path) for path in product("ab", repeat=4)]
CHAINS = [chain(path) for path in PATHS]

CONFIG = ManagerConfig(
    slab_bytes=10 * SLOT_BYTES,
    slab_count_max=6,
    stock_divisor=1,
    slice_blocks=1,
    lease_slice_blocks=1,
    evict_slice_blocks=1,
    swept_slice_blocks=1,
    idle_seconds=100.0,
    pin_fraction_max=0.7,
)

paths = st.tuples(st.sampled_from(PATHS), st.integers(1, 4)).map(lambda one: one[0][: one[1]])
picks = st.integers(0, 63)


class BlockManagerMachine(RuleBasedStateMachine):
    """Engines, sessions and workers that do whatever the protocol lets them, in any order."""

    @initialize()
    def start(self) -> None:
        self.world = World(CONFIG)
        for namespace in (SHARED, RIVAL):
            self.world.open_namespace(namespace, slot_bytes=SLOT_BYTES)
        self.world.open_namespace(SHARDED, slot_bytes=SLOT_BYTES, shard_count=2)
        for number in range(4):
            self.world.populate_slab(node=(0, 1, 1, None)[number])
        self.engine_count = 3
        self.engines = [
            FakeEngine(self.world, 1, shard_count=1, together=True, node=0),
            FakeEngine(self.world, 2, shard_count=1, together=False, node=1),
            FakeEngine(self.world, 3, shard_count=2, together=False),
        ]
        for engine in self.engines:
            self.read_all_mail(engine)
        for engine, path in product(range(3), ("aaa", "aaaa", "abb")):
            self.offload_to_the_end(engine, 0, path)
        for one in self.engines:  # A manager that never hits would get through all the rest.
            one.acquire(self.namespace_of(one, 0), chain("aaa"), seconds=1.0)
            self.world.finish_turns()
            assert one.tally.hit_count >= 2, "what was offloaded is no hit"
            one.release(one.leases[0])

    # ------------------------------------------------------------------------ blocks and slots

    @rule(engine=picks, namespace=picks, path=paths)
    def offload_to_the_end(self, engine: int, namespace: int, path: str) -> None:
        """What mostly happens: reserve, copy, commit, without anything in between."""
        one = self.engine(engine)
        mine = self.namespace_of(one, namespace)
        one.reserve(mine, len(path))
        self.world.finish_turns()
        one.offload(mine, chain(path))
        for copy in list(one.copies):
            one.run_copy(copy)
        for offload in list(one.offloads):
            one.commit(offload)
        self.world.finish_turns()

    @rule(
        engine=picks,
        namespace=picks,
        path=paths,
        pick=picks,
        step=st.sampled_from(["reserve", "plan", "copy", "commit", "abort"]),
    )
    def offload_a_step(self, engine: int, namespace: int, path: str, pick: int, step: str) -> None:
        one = self.engine(engine)
        mine = self.namespace_of(one, namespace)
        if step == "reserve":
            one.reserve(mine, 1 + pick % 4)
        elif step == "plan":
            one.offload(mine, chain(path))
        elif step == "copy" and one.copies:
            one.run_copy(one.copies[pick % len(one.copies)])
        elif step == "commit" and one.offloads:
            one.commit(one.offloads[pick % len(one.offloads)])
        elif step == "abort":
            one.abort(mine, 1 + pick % 4)

    @rule(
        engine=picks,
        namespace=picks,
        path=paths,
        seconds=st.sampled_from([1.0, 10.0]),
        skip=st.integers(0, 1),
    )
    def acquire(self, engine: int, namespace: int, path: str, seconds: float, skip: int) -> None:
        one = self.engine(engine)
        one.acquire(self.namespace_of(one, namespace), chain(path), seconds=seconds, skip=skip)

    @rule(engine=picks, pick=picks)
    def release(self, engine: int, pick: int) -> None:
        one = self.engine(engine)
        if one.leases:
            one.release(one.leases[pick % len(one.leases)])

    # -------------------------------------------------------------------------- what goes wrong

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        path=paths,
        pick=picks,
        kind=st.sampled_from(["evict", "evict", "hint", "corrupt", "corrupt", "withdraw", "clear"]),
    )
    def trouble_blocks(self, namespace: NamespaceId, path: str, pick: int, kind: str) -> None:
        world = self.world
        if kind == "evict":
            world.start(ev.Evict(namespace, chain(path)))
        elif kind == "hint":
            world.start(ev.HintSessionEnd(namespace, chain(path)))
        elif kind == "corrupt":
            self.corrupt(namespace, pick)
        elif kind == "withdraw" and world.sets:
            world.run_quietly(ev.WithdrawSlabSet(sorted(world.sets)[pick % len(world.sets)]))
        elif kind == "clear":
            world.clear(namespace)

    @rule(
        engine=picks,
        pick=picks,
        kind=st.sampled_from(["lose", "break", "connect", "connect", "quiet", "die", "bye"]),
    )
    def trouble_process(self, engine: int, pick: int, kind: str) -> None:
        one = self.engine(engine)
        process = one.processes[pick % len(one.processes)]
        if kind == "lose":
            one.lose(process)
        elif kind == "break":
            one.break_unseen(process)
        elif kind == "connect":
            one.connect(process)
        elif kind == "quiet":
            one.declare_own_quiet(process)
        elif kind == "die":
            one.die(process)
        elif kind == "bye":
            one.say_bye(process)
        self.replace_if_gone(one)

    # ------------------------------------------------------------------------------- the shell

    @rule(
        engine=picks,
        pick=picks,
        kind=st.sampled_from(["turn", "turn", "turn", "checksums", "mail", "all mail"]),
    )
    def go_on(self, engine: int, pick: int, kind: str) -> None:
        world, one = self.world, self.engine(engine)
        if kind == "turn" and world.turns:
            world.turn(pick)
        elif kind == "checksums" and world.checksums:
            world.compute_checksums(pick)
        elif kind == "mail":
            one.read_mail(one.processes[pick % len(one.processes)])
        elif kind == "all mail":
            self.read_all_mail(one)

    @rule(
        seconds=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
        drain=st.sampled_from([None, None, None, ev.DrainStarted(), ev.DrainEnded()]),
    )
    def tick(self, seconds: float, drain: ev.DrainStarted | ev.DrainEnded | None) -> None:
        for engine in self.engines:
            engine.run_dma()
        self.world.now += seconds
        self.world.run_quietly(ev.Tick() if drain is None else drain)

    # ------------------------------------------------------------------------------ invariants

    @invariant()
    def nothing_is_wrong(self) -> None:
        for engine in self.engines:
            engine.run_dma()
        self.world.check(CHAINS)

    @invariant()
    def leased_bytes_are_right(self) -> None:
        for engine in self.engines:
            for held in engine.leases:
                engine.read(held)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for engine in self.engines:
            for process in engine.processes:
                engine.die(process)
        self.world.finish_work()
        self.world.now += 100.0
        self.world.run(ev.Tick())
        self.world.finish_work()
        assert self.world.manager.check_invariants() == []
        self.world.assert_all_free()
        self.world.run(ev.Tick())
        assert not self.world.manager.stats().sessions, "sessions are remembered for ever"

    # --------------------------------------------------------------------------------- helpers

    def corrupt(self, namespace: NamespaceId, pick: int) -> None:
        ready = sorted(self.world.namespaces[namespace].ready_at)
        if ready:
            slot = ready[pick % len(ready)]
            self.world.scribble(slot)
            for engine in self.engines:
                engine.drop_corrupt(slot)
            self.world.run_quietly(ev.SlotsCorrupt(namespace, slots_of([slot])))

    def engine(self, pick: int) -> FakeEngine:
        return self.engines[pick % len(self.engines)]

    def namespace_of(self, engine: FakeEngine, pick: int) -> NamespaceId:
        return SHARDED if len(engine.workers) == 2 else (SHARED, RIVAL)[pick % 2]

    def read_all_mail(self, engine: FakeEngine) -> None:
        for process in engine.processes:
            for _ in range(20):
                engine.read_mail(process)

    def replace_if_gone(self, gone: FakeEngine) -> None:
        """Somebody starts the engine anew; what the dead one's DMA does goes on."""
        if any(process.alive for process in gone.processes):
            return
        self.engine_count += 1
        anew = FakeEngine(
            self.world,
            self.engine_count,
            shard_count=len(gone.workers),
            together=gone.scheduler in gone.workers,
            node=gone.node,
        )
        anew.dma = gone.dma
        self.engines[self.engines.index(gone)] = anew


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = machine_settings(examples=30, steps=40)
TestBlockManager.pytestmark = [pytest.mark.slow, pytest.mark.full_form]
