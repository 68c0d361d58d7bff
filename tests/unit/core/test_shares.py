"""Who gets which slabs, told through the manager's events."""

from __future__ import annotations

from dataclasses import replace

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.types import NamespaceId, Role, SessionId
from tests.support.fake_engine import FakeEngine, Process
from tests.support.world import World, engine_id
from tests.unit.core.test_manager import CONFIG, NS, SLOT_BYTES, Story

POOR = NamespaceId(2)


def reserve(world: World, session: SessionId | None, count: int) -> ins.SlotsReserved:
    assert session is not None
    outcome = world.run(ev.Reserve(session, NS, count))
    assert isinstance(outcome, ins.SlotsReserved)
    return outcome


def test_a_namespace_gets_its_first_slabs_when_somebody_joins() -> None:
    world = World(CONFIG)
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    world.populate_slab()
    assert world.sets == {}
    FakeEngine(world, 1, shard_count=1, together=True)
    assert len(world.sets) == 1


def test_a_namespace_that_joined_before_its_slab_existed_gets_it_when_it_does() -> None:
    world = World(CONFIG)
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    FakeEngine(world, 1, shard_count=1, together=True)
    world.populate_slab()
    assert len(world.sets) == 1


def test_slots_are_given_only_when_workers_of_all_shards_have_mapped_them() -> None:
    world = World(replace(CONFIG, slab_count_max=2))
    world.open_namespace(NS, slot_bytes=SLOT_BYTES, shard_count=2)
    world.populate_slab()
    world.populate_slab()
    engine = FakeEngine(world, 1, shard_count=2, together=False)
    scheduler = engine.scheduler.session
    assert len(reserve(world, scheduler, 2).slots) == 0
    engine.read_mail(engine.workers[0])
    assert len(reserve(world, scheduler, 2).slots) == 0
    engine.read_mail(engine.workers[1])
    assert len(reserve(world, scheduler, 2).slots) == 2


def test_slots_are_given_only_when_all_workers_of_one_shard_have_mapped_them() -> None:
    """All of them load it, though one alone stores it."""
    world = World(CONFIG)
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    world.populate_slab()
    engine = FakeEngine(world, 1, shard_count=1, together=False)
    replica = Process(Role.WORKER, (0,))
    scheduler = engine.scheduler.session
    engine.read_mail(engine.workers[0])
    assert len(reserve(world, scheduler, 2).slots) == 2
    engine.connect(replica)
    assert len(reserve(world, scheduler, 2).slots) == 0
    engine.read_mail(replica)
    assert len(reserve(world, scheduler, 2).slots) == 2


def test_tools_and_workers_take_nothing_of_a_schedulers_stock() -> None:
    world = World(CONFIG)
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    world.populate_slab()
    engine = FakeEngine(world, 1, shard_count=1, together=False)
    engine.read_mail(engine.workers[0])
    for number in range(2, 10):
        tool = ev.SessionOpened(world.new_session(), engine_id(number), Role.TOOL, by_value=True)
        world.run_quietly(tool)
    assert reserve(world, engine.scheduler.session, 16).stock_count_max == 16


def test_a_session_that_joins_twice_is_offered_its_slabs_once() -> None:
    world = World(CONFIG)
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    world.populate_slab()
    session = FakeEngine(world, 1, shard_count=1, together=True).scheduler.session
    assert session is not None
    again = world.manager.handle(ev.NamespaceJoined(session, NS), world.now)
    assert [one for one in again if isinstance(one, ins.OfferSlab)] == []


def test_a_worker_is_offered_the_slabs_of_its_own_shards_only() -> None:
    world = World(replace(CONFIG, slab_count_max=2))
    world.open_namespace(NS, slot_bytes=SLOT_BYTES, shard_count=2)
    world.populate_slab()
    world.populate_slab()
    engine = FakeEngine(world, 1, shard_count=2, together=False)
    [bound] = world.sets.values()
    for shard, worker in enumerate(engine.workers):
        assert worker.session is not None
        offers = [one for one in world.mail[worker.session] if isinstance(one, ins.OfferSlab)]
        assert [(one.slab, one.shard) for one in offers] == [(bound.slabs[shard], shard)]


def test_a_tool_is_offered_nothing() -> None:
    story = Story()
    session = story.world.new_session()
    story.world.run(ev.SessionOpened(session, engine_id(9), Role.TOOL, (0,), by_value=True))
    story.world.run(ev.NamespaceJoined(session, NS))
    assert story.world.mail[session] == []


def test_nothing_is_evicted_while_slabs_are_on_their_way() -> None:
    story = Story(replace(CONFIG, slab_count_max=2))
    story.offload("abcdefgh")
    assert len(story.reserve(16)) == 8
    assert story.matched("abcdefgh") == 8
    story.world.now = CONFIG.growth_wait_seconds + 1  # They do not come.
    assert len(story.reserve(4)) == 4
    assert story.matched("abcdefgh") == 4


def test_a_slab_that_was_withdrawn_for_the_poor_does_not_go_back_to_the_rich() -> None:
    story = Story(replace(CONFIG, slab_count_max=2), slab_count=2)
    story.reserve(17)
    story.read_mail(story.engine)
    story.world.open_namespace(POOR, slot_bytes=SLOT_BYTES)
    story.reserve(32)  # The rich one wants more, and first.
    poor = FakeEngine(story.world, 2, shard_count=1, together=True)
    slots = [slot for slot, _ in story.engine.stock.get((story.session, NS), [])]
    assert slots == []
    held = story.world.manager.stats().namespaces[0].reserved_count
    assert held
    story.engine.lose(story.engine.scheduler)
    story.engine.connect(story.engine.scheduler)
    for _ in range(3):
        story.engine.declare_own_quiet(story.engine.scheduler)
        story.read_mail(story.engine)
        story.read_mail(poor)
        story.tick(0.1)
    assert sorted(one.namespace for one in story.world.sets.values()) == [NS, POOR]


def test_a_session_with_more_than_its_part_is_asked_for_slots_when_others_run_dry() -> None:
    story = Story()
    story.reserve(16)
    other = story.new_engine(2)
    reserve(story.world, other.scheduler.session, 4)
    assert ins.RecallSlots(story.session, NS, 8) in story.world.mail[story.session]


def numa_world(engine_nodes: tuple[int | None, ...]) -> tuple[World, list[FakeEngine]]:
    """Four slabs, first those of node 0, and an engine near each of these nodes."""
    world = World(replace(CONFIG, slab_count_max=4))
    world.open_namespace(NS, slot_bytes=SLOT_BYTES)
    for node in (0, 0, 1, 1):
        world.populate_slab(node)
    engines = [
        FakeEngine(world, number, shard_count=1, together=True, node=node)
        for number, node in enumerate(engine_nodes, start=1)
    ]
    return world, engines


def read_all(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.read_mail(engine.scheduler)


def nodes_of(world: World, slots: ins.SlotsReserved) -> list[int | None]:
    return [world.node_of[world.set_of(slot)[1].slabs[0]] for slot in slots.slots.tolist()]


def test_an_engine_gets_slots_on_the_node_of_its_device_first() -> None:
    world, engines = numa_world((0, 1))
    far, near = engines
    for _ in range(4):  # Grows once a call, and not before the engine has mapped what there is.
        read_all(engines)
        reserve(world, near.scheduler.session, 1)
    read_all(engines)
    assert set(nodes_of(world, reserve(world, far.scheduler.session, 1))) == {0}
    assert set(nodes_of(world, reserve(world, near.scheduler.session, 1))) == {1}


def test_far_slots_are_used_before_anything_is_evicted() -> None:
    world, [engine] = numa_world((1,))
    given: list[int | None] = []
    for _ in range(100):
        read_all([engine])
        given += nodes_of(world, reserve(world, engine.scheduler.session, 1))
    first_far = given.index(0)
    assert set(given[:first_far]) == {1}, "near ones while there are any"
    assert given[first_far:] == [0] * (len(given) - first_far)
    assert given.count(0) == given.count(1)
    assert world.manager.stats().evicted_count == 0


def test_an_engine_whose_node_nobody_knows_takes_slabs_as_they_come() -> None:
    world, [engine] = numa_world((None,))
    read_all([engine])
    assert set(nodes_of(world, reserve(world, engine.scheduler.session, 1))) == {0}
