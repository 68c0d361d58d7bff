"""How slabs come back from a tenant that has more than its share, whatever its engines do."""

from __future__ import annotations

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.settings import ManagerConfig
from kvtier.core.tenancy import TenantBudget
from kvtier.errors import NotReserved
from kvtier.types import BlockHash, CommitOutcome, NamespaceId
from tests.support.at_work import new_blocks, put, read_mail
from tests.support.fake_engine import FakeEngine
from tests.support.world import World, slots_of

SLOT_BYTES = 4096
SLAB_SLOTS = 4
SLABS = 8
GREEDY, SECOND, MEEK = NamespaceId(1), NamespaceId(2), NamespaceId(3)
MINIMUM = SLABS // 4
CONFIG = ManagerConfig(
    slab_bytes=SLOT_BYTES * SLAB_SLOTS,
    slab_count_max=SLABS,
    stock_divisor=1,
    tenants={"meek": TenantBudget(0.25), "greedy": TenantBudget(weight=10)},
)


class Rivals:
    """A greedy tenant that has everything, and a meek one that comes when it is told to."""

    def __init__(self, *, meek_shards: int = 1) -> None:
        self.world = World(CONFIG)
        self.world.open_namespace(GREEDY, slot_bytes=SLOT_BYTES, tenant="greedy")
        for _ in range(SLABS):
            self.world.populate_slab()
        self.meek_shards = meek_shards
        self.blocks = new_blocks()
        self.greedy = FakeEngine(self.world, 1, shard_count=1, together=True, tenant="greedy")
        while self.slabs(GREEDY) < SLABS:
            self.put(self.greedy, GREEDY)
        self.put(self.greedy, GREEDY)
        self.session = self.greedy.scheduler.session or DAEMON_SESSION

    def open_second(self) -> None:
        """One more namespace of the greedy tenant."""
        self.world.open_namespace(SECOND, slot_bytes=SLOT_BYTES, tenant="greedy")
        self.greedy.join(SECOND)

    def bring_meek(self) -> FakeEngine:
        shards = self.meek_shards
        self.world.open_namespace(MEEK, slot_bytes=SLOT_BYTES, shard_count=shards, tenant="meek")
        return FakeEngine(self.world, 2, shard_count=shards, together=shards == 1, tenant="meek")

    def slabs(self, namespace: NamespaceId) -> int:
        sets = self.world.sets.values()
        return sum(len(one.slabs) for one in sets if one.namespace == namespace)

    def two(self) -> list[BlockHash]:
        return [next(self.blocks), next(self.blocks)]

    def put(self, engine: FakeEngine, namespace: NamespaceId) -> None:
        """A slab's worth of blocks, as far as there is room."""
        self.world.now += 0.1
        put(engine, namespace, self.blocks, SLAB_SLOTS)
        self.world.run(ev.Tick())
        assert self.world.manager.check_invariants() == []

    def seconds_until_meek_has_its_minimum(self, *, at_most: float) -> float:
        """It works, and the greedy one's engine does what every client does of itself."""
        meek, start = self.bring_meek(), self.world.now
        while self.slabs(MEEK) < MINIMUM:
            assert self.world.now - start <= at_most, "it has not got its minimum back"
            self.put(meek, MEEK)
            read_mail(self.greedy)
        return self.world.now - start

    def reserve_everywhere(self) -> list[int]:
        """The greedy engine has slots in every slab, neither filled nor given back."""
        self.greedy.abort(GREEDY, SLABS * SLAB_SLOTS)
        outcome = self.world.run(ev.Reserve(self.session, GREEDY, SLABS * SLAB_SLOTS))
        assert isinstance(outcome, ins.SlotsReserved)
        slots: list[int] = outcome.slots.tolist()
        assert len({self.world.set_of(slot)[0] for slot in slots}) == SLABS
        return slots

    def lease(self, slab_sets: int) -> None:
        """A block in each of the last slab sets, for as long as that may be."""
        record = self.world.namespaces[GREEDY]
        for one in sorted(self.world.sets)[-slab_sets:]:
            slot = next(it for it in self.world.sets[one].slots if it in record.ready_at)
            self.greedy.acquire(GREEDY, [record.ready_at[slot]], seconds=CONFIG.lease_seconds_max)
            self.world.finish_turns()
        assert len(self.greedy.leases) == slab_sets


def test_slots_that_nobody_commits_do_not_keep_a_slab() -> None:
    rivals = Rivals()
    rivals.reserve_everywhere()
    assert rivals.seconds_until_meek_has_its_minimum(at_most=5.0)


def test_a_slab_under_a_lease_does_not_delay_the_next() -> None:
    rivals = Rivals()
    rivals.lease(1)
    wait = CONFIG.growth_wait_seconds
    assert wait < rivals.seconds_until_meek_has_its_minimum(at_most=3 * wait)


def test_leases_in_every_slab_delay_by_no_more_than_a_lease_lasts() -> None:
    rivals = Rivals()
    rivals.lease(SLABS // 2)
    rivals.reserve_everywhere()
    lease = CONFIG.lease_seconds_max + CONFIG.lease_margin_seconds
    rivals.seconds_until_meek_has_its_minimum(at_most=lease + CONFIG.growth_wait_seconds)


def test_a_commit_to_a_slab_that_was_taken_back_is_void_and_an_abort_is_accepted() -> None:
    rivals = Rivals()
    world, slots, session = rivals.world, rivals.reserve_everywhere(), rivals.session
    rivals.seconds_until_meek_has_its_minimum(at_most=5.0)
    ours = [range(0)] + [one.slots for one in world.sets.values() if one.namespace == GREEDY]
    alive = [slot for slot in slots if any(slot in its for its in ours)]
    gone = [slot for slot in slots if slot not in alive]
    epoch = world.namespaces[GREEDY].epoch
    two = slots_of([gone[0], alive[0]])
    outcome = world.run(ev.Commit(session, GREEDY, rivals.two(), two, None, epoch, None))
    assert isinstance(outcome, ins.Committed)
    assert list(outcome.outcomes) == [CommitOutcome.VOID, CommitOutcome.NO_PARENT]
    two = slots_of([alive[1], gone[1]])
    outcome = world.run(ev.Commit(session, GREEDY, rivals.two(), two, None, epoch, None))
    assert isinstance(outcome, ins.Committed)
    assert list(outcome.outcomes) == [CommitOutcome.READY, CommitOutcome.VOID]
    outcome = world.run(ev.Abort(session, GREEDY, slots_of([alive[2], gone[2]])))
    assert isinstance(outcome, ins.Aborted)
    world.finish_work()
    assert world.manager.check_invariants() == []


def test_slots_of_others_and_of_the_future_are_refused_still() -> None:
    rivals = Rivals()
    rivals.reserve_everywhere()
    rivals.seconds_until_meek_has_its_minimum(at_most=5.0)
    meek = next(one for one in rivals.world.sets.values() if one.namespace == MEEK)
    for slot in (meek.slots.start, 1_000_000):
        outcome = rivals.world.run(ev.Abort(rivals.session, GREEDY, slots_of([slot])))
        assert isinstance(outcome, NotReserved)


def test_one_that_needs_several_slabs_at_once_gets_them_though_others_want_each() -> None:
    rivals = Rivals(meek_shards=2)
    rivals.open_second()
    meek = rivals.bring_meek()
    for _ in range(20):
        rivals.put(rivals.greedy, GREEDY)
        rivals.put(rivals.greedy, SECOND)
        rivals.put(meek, MEEK)
    assert rivals.slabs(MEEK) == MINIMUM


def test_what_moves_among_namespaces_of_one_tenant_does_not_delay_another() -> None:
    rivals = Rivals()
    mail = rivals.world.mail[rivals.session]
    rivals.open_second()  # Its engine does not answer.
    assert sum(isinstance(one, ins.WithdrawSlab) for one in mail) == 1
    rivals.bring_meek()
    assert sum(isinstance(one, ins.WithdrawSlab) for one in mail) == 2
