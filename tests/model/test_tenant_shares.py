"""Shares of memory among tenants, whose engines do whatever the protocol lets them.

The model is what was promised: nobody has more than its maximum; who wants its minimum has it soon,
whatever the others have reserved, leased or lost; and no slab or slot is lost.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum, auto

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core import events as ev
from kvtier.core.settings import ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.types import NamespaceId
from tests.support.at_work import new_blocks, put, read_mail
from tests.support.fake_engine import FakeEngine
from tests.support.machines import machine_settings
from tests.support.world import World

SLOT_BYTES = 4096
SLAB_SLOTS = 3
SLABS = 12
BUDGETS = {
    "meek": TenantBudget(0.25),
    "wide": TenantBudget(0.34, maximum=0.5, weight=2.0),  # Of two shards.
    "greedy": TenantBudget(weight=50.0),
    "capped": TenantBudget(maximum=0.25),
}
NAMESPACES = {
    NamespaceId(1): "greedy",
    NamespaceId(2): "greedy",
    NamespaceId(3): "meek",
    NamespaceId(4): "wide",
    NamespaceId(5): "capped",
}
CONFIG = ManagerConfig(
    slab_bytes=SLAB_SLOTS * SLOT_BYTES,
    slab_count_max=SLABS,
    stock_divisor=1,
    lease_seconds_max=6.0,
    lease_margin_seconds=1.0,
    growth_wait_seconds=1.0,
    idle_seconds=30.0,
    tenants=BUDGETS,
)
STEP_SECONDS = 0.25
# The longest lease keeps a slab so long; one that does not come is paid for after a while.
WAIT_SECONDS_MAX = (
    CONFIG.lease_seconds_max
    + CONFIG.lease_margin_seconds
    + (SLABS // 2) * (CONFIG.growth_wait_seconds + STEP_SECONDS)
)

picks = st.integers(0, 63)


class Doing(Enum):
    NOTHING = auto()
    PUT = auto()
    LEAVE_RESERVED = auto()
    LEASE = auto()


class TenantSharesMachine(RuleBasedStateMachine):
    """Each tenant has an engine or two; an engine that dies is followed by another."""

    @initialize()
    def start(self) -> None:
        self.world = World(CONFIG)
        for namespace, tenant in NAMESPACES.items():
            self.world.open_namespace(
                namespace, slot_bytes=SLOT_BYTES, shard_count=_shards(tenant), tenant=tenant
            )
        for _ in range(SLABS):
            self.world.populate_slab()
        self.engine_count = 0
        self.blocks = new_blocks()
        self.engines = [self.new_engine(one) for one in ("greedy", "greedy", *BUDGETS)]
        for _ in range(2 * SLABS):
            self.world.now += STEP_SECONDS
            put(self.engines[0], NamespaceId(1), self.blocks, SLAB_SLOTS)
            read_mail(self.engines[1])
        assert self.held()["greedy"] > SLABS / 2, "nobody is greedy"

    # ----------------------------------------------------------------------- whatever may happen

    @rule(engine=picks, namespace=picks, count=st.integers(1, 2 * SLAB_SLOTS))
    def put(self, engine: int, namespace: int, count: int) -> None:
        one = self.engines[engine % len(self.engines)]
        put(one, self.namespace_of(one, namespace), self.blocks, count)

    @rule(engine=picks, seconds=st.sampled_from([0.0, 40.0]))
    def work(self, engine: int, seconds: float) -> None:
        """For a while, and after a time in which nobody did anything, as if alone."""
        self.world.now += seconds
        one = self.engines[engine % len(self.engines)]
        for _ in range(SLABS):
            self.world.now += STEP_SECONDS
            for other in self.engines:
                self.answer(other)
            put(one, self.namespace_of(one, 0), self.blocks, 2 * SLAB_SLOTS)
            self.nobody_has_more_than_its_maximum()

    @rule(engine=st.integers(0, 1), namespace=picks, count=st.integers(1, SLABS * SLAB_SLOTS))
    def leave_reserved(self, engine: int, namespace: int, count: int) -> None:
        """Slots that the engine forgets: not even a recall brings them back."""
        one = self.engines[engine]
        session = one.scheduler.session
        if session is not None:
            self.world.run(ev.Reserve(session, self.namespace_of(one, namespace), count))

    @rule(engine=picks, namespace=picks, count=st.integers(1, SLAB_SLOTS))
    def abort(self, engine: int, namespace: int, count: int) -> None:
        one = self.engines[engine % len(self.engines)]
        one.abort(self.namespace_of(one, namespace), count)

    @rule(engine=picks, namespace=picks, pick=picks, seconds=st.floats(0.1, 6.0))
    def acquire(self, engine: int, namespace: int, pick: int, seconds: float) -> None:
        one = self.engines[engine % len(self.engines)]
        mine = self.namespace_of(one, namespace)
        ready = sorted(self.world.namespaces[mine].ready_at.items())
        if ready:
            one.acquire(mine, [ready[pick % len(ready)][1]], seconds=seconds)
            self.world.finish_turns()

    @rule(engine=picks, pick=picks)
    def release(self, engine: int, pick: int) -> None:
        one = self.engines[engine % len(self.engines)]
        if one.leases:
            one.release(one.leases[pick % len(one.leases)])

    @rule(engine=picks)
    def read_mail(self, engine: int) -> None:
        read_mail(self.engines[engine % len(self.engines)])

    @rule(engine=picks)
    def lose(self, engine: int) -> None:
        one = self.engines[engine % len(self.engines)]
        one.lose(one.scheduler)

    @rule(engine=picks)
    def die(self, engine: int) -> None:
        place = engine % len(self.engines)
        for process in self.engines[place].processes:
            self.engines[place].die(process)
        self.engines[place] = self.new_engine(self.engines[place].tenant)

    @rule(seconds=st.sampled_from([0.1, 1.0, 8.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.run(ev.Tick())
        self.world.finish_work()

    # ------------------------------------------------------------------------- what was promised

    @rule(tenant=st.sampled_from(["meek", "wide"]), others=st.sampled_from(list(Doing)))
    def who_wants_its_minimum_has_it_soon(self, tenant: str, others: Doing) -> None:
        """Whatever the engines of the others do meanwhile, their clients answer the daemon."""
        mine = next(one for one in self.engines if one.tenant == tenant)
        namespace = self.namespace_of(mine, 0)
        until = self.world.now + WAIT_SECONDS_MAX
        while self.held()[tenant] < _minimum(tenant):
            assert self.world.now < until, f"{tenant} has {self.held()} of {_minimum(tenant)}"
            self.world.now += STEP_SECONDS
            for one in self.engines:
                self.answer(one)
                if one is not mine:
                    self.do(one, others)
            mine.abort(namespace, SLABS * SLAB_SLOTS)
            put(mine, namespace, self.blocks, 2 * SLAB_SLOTS)
            self.world.run(ev.Tick())

    @invariant()
    def nobody_has_more_than_its_maximum(self) -> None:
        for tenant, count in self.held().items():
            assert count <= SLABS * BUDGETS[tenant].maximum, f"{tenant} has {count} slabs"

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check([])
        stats = self.world.manager.stats()
        assert stats.slab_bound_count + stats.slab_stock_count == SLABS

    # --------------------------------------------------------------------------------- helpers

    def new_engine(self, tenant: str) -> FakeEngine:
        self.engine_count += 1
        shards = _shards(tenant)
        return FakeEngine(
            self.world, self.engine_count, shard_count=shards, together=shards == 1, tenant=tenant
        )

    def do(self, engine: FakeEngine, what: Doing) -> None:
        namespace = self.namespace_of(engine, 0)
        if what is Doing.PUT:
            put(engine, namespace, self.blocks, 2 * SLAB_SLOTS)
        elif what is Doing.LEAVE_RESERVED and not BUDGETS[engine.tenant].minimum:
            # Who has all its slots reserved asks for no more: that is nobody else's fault.
            session = engine.scheduler.session
            assert session is not None
            self.world.run(ev.Reserve(session, namespace, SLABS * SLAB_SLOTS))
        elif what is Doing.LEASE:
            for block in list(self.world.namespaces[namespace].ready_at.values()):
                engine.acquire(namespace, [block], seconds=CONFIG.lease_seconds_max)
                self.world.finish_turns()

    def answer(self, engine: FakeEngine) -> None:
        """What clients do of themselves."""
        for process in engine.processes:
            engine.connect(process)
            engine.declare_own_quiet(process)
        read_mail(engine)
        for held in [one for one in engine.leases if one.deadline <= self.world.now]:
            engine.leases.remove(held)

    def held(self) -> Counter[str]:
        """Slabs by tenant, those that are on their way elsewhere too."""
        found: Counter[str] = Counter()
        for one in self.world.sets.values():
            found[NAMESPACES[one.namespace]] += len(one.slabs)
        return found

    def namespace_of(self, engine: FakeEngine, pick: int) -> NamespaceId:
        mine = [one for one, tenant in NAMESPACES.items() if tenant == engine.tenant]
        return mine[pick % len(mine)]


def _shards(tenant: str) -> int:
    return 2 if tenant == "wide" else 1


def _minimum(tenant: str) -> int:
    """In slabs, of whole sets."""
    shards = _shards(tenant)
    return math.floor(SLABS * BUDGETS[tenant].minimum / shards) * shards


TestTenantShares = TenantSharesMachine.TestCase
TestTenantShares.settings = machine_settings(examples=8, steps=16, shrinks=False)
