"""The block manager on short, directed stories; random ones are in tests/model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.core.engines import DAEMON_SESSION
from kvtier.core.manager import BlockManager
from kvtier.core.settings import ManagerConfig
from kvtier.errors import (
    BadRequest,
    Draining,
    Forbidden,
    LimitExceeded,
    NotReserved,
    Unauthenticated,
    UnknownNamespace,
)
from kvtier.types import (
    BlockHash,
    CommitOutcome,
    Cut,
    NamespaceId,
    PackedHashes,
    Role,
    SessionId,
)
from tests.support.fake_engine import FakeEngine
from tests.support.world import World, chain, engine_id, packed, slots_of

NS = NamespaceId(1)
SLOT_BYTES = 4096
CONFIG = ManagerConfig(
    slab_bytes=16 * SLOT_BYTES,
    slab_count_max=1,
    stock_divisor=1,
    slice_blocks=2,
    lease_slice_blocks=2,
    evict_slice_blocks=2,
    swept_slice_blocks=2,
    leases_per_session_max=3,
)


class Story:
    """A world with one engine of one process, its slabs mapped."""

    def __init__(
        self,
        config: ManagerConfig = CONFIG,
        *,
        slab_count: int = 1,
        make_manager: Callable[[ManagerConfig], BlockManager] | None = None,
    ) -> None:
        self.world = World(config, make_manager=make_manager)
        self.world.open_namespace(NS, slot_bytes=SLOT_BYTES)
        for _ in range(slab_count):
            self.world.populate_slab()
        self.engine = self.new_engine(1)

    def new_engine(self, number: int, *, together: bool = True) -> FakeEngine:
        engine = FakeEngine(self.world, number, shard_count=1, together=together)
        self.read_mail(engine)
        return engine

    def read_mail(self, engine: FakeEngine) -> None:
        for process in engine.processes:
            for _ in range(20):
                engine.read_mail(process)

    @property
    def session(self) -> SessionId:
        assert self.engine.scheduler.session is not None
        return self.engine.scheduler.session

    def reserve(self, count: int) -> list[int]:
        outcome = self.world.run(ev.Reserve(self.session, NS, count))
        assert isinstance(outcome, ins.SlotsReserved)
        return outcome.slots.tolist()

    def reserve_now(self, count: int) -> list[int]:
        """Without giving waiting slices a turn."""
        outcomes: list[object] = []
        self.world.start(ev.Reserve(self.session, NS, count), outcomes.append)
        assert isinstance(outcomes[0], ins.SlotsReserved)
        return outcomes[0].slots.tolist()

    def commit_event(
        self, hashes: list[BlockHash], slots: list[int], parent: BlockHash | None = None
    ) -> ev.Commit:
        for slot, block in zip(slots, hashes, strict=True):
            self.world.write(slot, 0, block)
        epoch = self.world.namespaces[NS].epoch
        return ev.Commit(self.session, NS, packed(hashes), slots_of(slots), parent, epoch)

    def commit(
        self, hashes: list[BlockHash], slots: list[int], parent: BlockHash | None = None
    ) -> list[CommitOutcome]:
        outcome = self.world.run(self.commit_event(hashes, slots, parent))
        assert isinstance(outcome, ins.Committed), outcome
        while self.world.checksums:
            self.world.compute_checksums(0)
        return [CommitOutcome(one) for one in outcome.outcomes]

    def offload(self, path: str) -> list[int]:
        hashes = chain(path)
        slots = self.reserve(len(hashes))
        self.commit(hashes, slots)
        self.world.check([hashes])
        return slots

    def acquire(self, path: str, *, seconds: float = 10.0, skip: int = 0) -> ins.LeaseGranted:
        deadline = self.world.now + seconds
        outcome = self.world.run(
            ev.Acquire(
                self.session,
                NS,
                packed(chain(path)),
                deadline,
                skip_count=skip,
                takes_direct=True,
            )
        )
        assert isinstance(outcome, ins.LeaseGranted), outcome
        return outcome

    def matched(self, path: str) -> int:
        return self.world.match(NS, chain(path)).matched_count

    def free_count(self) -> int:
        return self.world.manager.stats().namespaces[0].free_count

    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.run(ev.Tick())


@pytest.fixture
def story() -> Story:
    return Story()


# ------------------------------------------------------------------------------ commit, acquire


def test_an_answered_commit_is_a_match(story: Story) -> None:
    assert story.commit(chain("abc"), story.reserve(3)) == [CommitOutcome.READY] * 3
    assert story.matched("abcd") == 3


def test_what_one_engine_offloads_another_onboards(story: Story) -> None:
    slots = story.offload("abc")
    other = story.new_engine(2)
    other.acquire(NS, chain("abc"), seconds=1.0)
    story.world.finish_turns()
    assert list(other.leases[0].blocks) == slots


def test_a_block_without_its_parent_is_refused_and_its_slot_is_free_again(story: Story) -> None:
    before = story.free_count()
    outcomes = story.commit(chain("ab")[1:], story.reserve(1), parent=chain("a")[0])
    assert outcomes == [CommitOutcome.NO_PARENT]
    assert (story.matched("ab"), story.free_count()) == (0, before)


def test_a_resident_block_is_present_and_its_second_slot_is_free_again(story: Story) -> None:
    story.offload("ab")
    before = story.free_count()
    outcomes = story.commit(chain("abc"), story.reserve(3))
    assert outcomes == [CommitOutcome.PRESENT, CommitOutcome.PRESENT, CommitOutcome.READY]
    assert story.free_count() == before - 1


def test_a_slot_of_somebody_else_cannot_be_committed(story: Story) -> None:
    slots = story.reserve(1)
    other = Story.new_engine(story, 2)
    event = replace(story.commit_event(chain("a"), slots), session=other.scheduler.session)
    assert isinstance(story.world.run(event), NotReserved)
    assert story.matched("a") == 0
    assert story.commit(chain("a"), slots) == [CommitOutcome.READY]


def test_a_slot_is_committed_once(story: Story) -> None:
    slots = story.offload("a")
    assert isinstance(story.world.run(story.commit_event(chain("b"), slots)), NotReserved)


def test_a_slot_named_twice_is_refused(story: Story) -> None:
    [slot] = story.reserve(1)
    assert isinstance(story.world.run(story.commit_event(chain("ab"), [slot, slot])), NotReserved)
    assert story.commit(chain("a"), [slot]) == [CommitOutcome.READY]


def test_hashes_and_slots_of_different_number_are_refused(story: Story) -> None:
    event = replace(story.commit_event(chain("a"), story.reserve(1)), hashes=packed(chain("ab")))
    assert isinstance(story.world.run(event), BadRequest)


def test_blocks_stored_are_told_in_runs_that_follow_one_another(story: Story) -> None:
    story.offload("ab")
    told: list[ins.BlocksStored] = []
    hashes = [*chain("x"), *chain("ab"), chain("abc")[2]]
    event = replace(story.commit_event(hashes, story.reserve(4)))
    instructions = story.world.manager.handle(event, 0.0)
    while instructions:
        told += [one for one in instructions if isinstance(one, ins.BlocksStored)]
        last = instructions[-1]
        instructions = (
            story.world.manager.handle(last.event, 0.0) if isinstance(last, ins.Continue) else []
        )
    assert [(list(one.hashes), one.parent) for one in told] == [
        (chain("x"), None),
        ([chain("abc")[2]], chain("ab")[1]),
    ]


def test_a_session_that_ends_between_two_slices_commits_no_more() -> None:
    story = Story()
    slots = story.reserve(4)
    story.world.start(story.commit_event(chain("abcd"), slots))
    story.engine.say_bye(story.engine.scheduler)  # The rest of its slots is free at once …
    other = story.new_engine(2)
    other.reserve(NS, 14)  # … and somebody else's.
    story.world.finish_turns()
    assert story.matched("abcd") == 2
    story.world.check([chain("abcd")])


def test_slots_aborted_between_two_slices_are_not_committed(story: Story) -> None:
    slots = story.reserve(4)
    story.world.start(story.commit_event(chain("abcd"), slots))
    story.world.start(ev.Abort(story.session, NS, slots_of(slots[2:])))
    story.world.finish_turns()
    assert story.matched("abcd") == 2
    story.world.check([chain("abcd")])


def test_an_acquire_is_granted_slice_by_slice(story: Story) -> None:
    slots = story.offload("abcde")
    granted = story.acquire("abcdef", skip=1)
    assert (granted.leased_count, granted.cut) == (5, Cut.MISS)
    assert granted.slots.tolist() == slots[1:]


@pytest.mark.parametrize("recommit", [False, True])
def test_a_block_found_corrupt_between_two_slices_is_not_leased(recommit: bool) -> None:
    story = Story()
    slots = story.offload("abcd")
    granted: list[object] = []
    story.world.start(ev.Acquire(story.session, NS, packed(chain("abcd")), 10.0), granted.append)
    acquiring = story.world.turns.pop()
    story.world.scribble(slots[1])
    story.world.start(ev.SlotsCorrupt(NS, slots_of(slots[1:2])))
    if recommit:
        story.world.finish_turns()
        story.commit(chain("abcd"), story.reserve(4))
    story.world.start(*acquiring)
    [outcome] = granted
    assert isinstance(outcome, ins.LeaseGranted)
    assert (outcome.lease, outcome.cut) == (None, Cut.MISS)
    assert story.world.manager.stats().lease_count == 0


def test_a_lease_that_expires_between_two_slices_is_a_miss(story: Story) -> None:
    story.offload("abcd")
    granted: list[object] = []
    story.world.start(ev.Acquire(story.session, NS, packed(chain("abcd")), 1.0), granted.append)
    acquiring = story.world.turns.pop()
    story.world.now = 6.0
    story.world.start(ev.Tick())
    story.world.start(*acquiring)
    assert isinstance(granted[0], ins.LeaseGranted)
    assert granted[0].lease is None


def test_leases_pin_no_more_than_their_part_of_the_pool(story: Story) -> None:
    story.offload("abcdefghijkl")
    granted = story.acquire("abcdefghijkl")
    assert (granted.leased_count, granted.cut) == (8, Cut.PIN_LIMIT)
    assert story.acquire("abc").leased_count == 3  # Pinned already: costs nothing.


def test_blocks_in_slabs_that_the_engine_does_not_map_are_not_leased(story: Story) -> None:
    story.offload("ab")
    other = FakeEngine(story.world, 2, shard_count=1, together=True)  # Reads no mail.
    outcome = story.world.run(ev.Acquire(other.scheduler.session, NS, packed(chain("ab")), 1.0))
    assert isinstance(outcome, ins.LeaseGranted)
    assert (outcome.lease, outcome.cut) == (None, Cut.UNMAPPED)


def test_leases_of_a_session_are_limited(story: Story) -> None:
    story.offload("a")
    granted = [story.acquire("a") for _ in range(3)]
    event = ev.Acquire(story.session, NS, packed(chain("a")), 1.0)
    assert isinstance(story.world.run(event), LimitExceeded)
    story.world.run(ev.Release(story.session, (granted[0].lease,)))
    assert story.acquire("a").leased_count == 1


def test_a_lease_longer_than_allowed_is_refused(story: Story) -> None:
    story.offload("a")
    event = ev.Acquire(story.session, NS, packed(chain("a")), 60.1)
    assert isinstance(story.world.run(event), BadRequest)
    assert story.world.manager.stats().lease_count == 0


def test_a_lease_is_released_once_and_by_its_engine_only(story: Story) -> None:
    story.offload("a")
    granted = story.acquire("a")
    other = story.new_engine(2)
    release = ev.Release(story.session, (granted.lease,))
    assert story.world.run(replace(release, session=other.scheduler.session)) == ins.LeasesEnded(0)
    assert story.world.run(release) == ins.LeasesEnded(1)
    assert story.world.run(release) == ins.LeasesEnded(0)


def test_a_lease_outlives_processes_of_its_engine_but_not_all_of_them(story: Story) -> None:
    story.offload("ab")
    other = story.new_engine(2, together=False)
    other.acquire(NS, chain("ab"), seconds=10.0)
    story.world.finish_turns()
    other.die(other.scheduler)
    assert story.world.manager.stats().lease_count == 1
    other.die(other.workers[0])
    assert story.world.manager.stats().lease_count == 0


def test_a_lease_outlives_its_session_until_deadline_plus_margin(story: Story) -> None:
    story.offload("ab")
    story.acquire("ab", seconds=10.0)
    story.engine.lose(story.engine.scheduler)
    story.tick(14.9)
    assert story.world.manager.stats().lease_count == 1
    story.tick(0.1)
    assert story.world.manager.stats().lease_count == 0


def test_a_worker_that_was_away_is_asked_to_be_quiet_when_it_is_back(story: Story) -> None:
    engine = story.new_engine(2, together=False)
    [worker] = engine.workers
    engine.reserve(NS, 2)
    engine.lose(worker)
    engine.lose(engine.scheduler)
    story.tick(1.0)
    assert story.world.manager.stats().namespaces[0].quarantined_count == 2
    for process in (worker, engine.scheduler):
        engine.connect(process)
    story.tick(1.0)
    story.read_mail(engine)
    assert story.world.manager.stats().namespaces[0].quarantined_count == 0


# ------------------------------------------------------------------------------ reserve, evict


def test_a_reserve_that_gets_nothing_leaves_no_trace(story: Story) -> None:
    story.reserve(16)
    assert story.reserve(1) == []
    other = story.new_engine(2)
    other.reserve(NS, 1)
    assert story.world.manager.check_invariants() == []


def test_a_full_pool_evicts_the_oldest_tail_for_a_reserve(story: Story) -> None:
    story.offload("abcdefgh")
    story.world.now = 1.0
    story.offload("stuvwxyz")
    assert len(story.reserve(3)) == 3
    assert (story.matched("abcdefgh"), story.matched("stuvwxyz")) == (5, 8)


def test_leased_blocks_are_not_evicted_and_come_free_with_the_lease(story: Story) -> None:
    story.offload("abcdefgh")
    story.offload("stuvwxyz")
    granted = story.acquire("abcdefgh")
    assert len(story.reserve(16)) == 8
    assert (story.matched("abcdefgh"), story.matched("stuvwxyz")) == (8, 0)
    story.world.run(ev.Release(story.session, (granted.lease,)))
    assert len(story.reserve(8)) == 8


def test_a_block_whose_checksum_is_being_computed_is_not_evicted(story: Story) -> None:
    slots = story.reserve(1)
    story.world.run(story.commit_event(chain("a"), slots))
    assert story.world.run(ev.Evict(NS, chain("a"))) == ins.Evicted(0, 1)
    story.world.compute_checksums(0)
    assert story.world.run(ev.Evict(NS, chain("a"))) == ins.Evicted(1, 0)


def test_evicting_a_prefix_keeps_what_others_continue(story: Story) -> None:
    story.offload("abcd")
    story.offload("abx")
    assert story.world.run(ev.Evict(NS, chain("abcd"))) == ins.Evicted(2, 2)
    assert story.matched("abx") == 3


def test_a_stock_is_limited_to_its_part_of_the_pool() -> None:
    story = Story(replace(CONFIG, stock_divisor=4))
    assert len(story.reserve(16)) == 4
    assert story.reserve(16) == []


def test_watermarks_evict_ahead_of_need() -> None:
    config = replace(CONFIG, watermark_start=0.75, watermark_stop=0.625)
    story = Story(config)
    story.offload("abcdefghijklmn")
    story.tick(1.0)
    assert story.free_count() == 4  # Two a tick here: a slice.
    story.tick(1.0)
    assert story.free_count() == 4


def test_a_draining_daemon_grants_nothing_new_but_takes_commits(story: Story) -> None:
    slots = story.reserve(2)
    story.world.run(ev.DrainStarted())
    assert story.commit(chain("ab"), slots) == [CommitOutcome.READY] * 2
    assert story.acquire("ab").cut is Cut.DRAINING
    assert isinstance(story.world.run(ev.Reserve(story.session, NS, 1)), Draining)
    story.world.run(ev.DrainEnded())
    assert story.acquire("ab").leased_count == 2


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (ev.Reserve(SessionId(1), NS, 0), BadRequest),
        (ev.Reserve(SessionId(1), NamespaceId(9), 1), UnknownNamespace),
        (ev.Reserve(SessionId(77), NS, 1), Unauthenticated),
        (ev.Abort(SessionId(1), NS, slots_of([3])), NotReserved),
        (ev.Abort(SessionId(1), NS, slots_of([3_000_000])), NotReserved),
    ],
)
def test_a_bad_request_is_named_and_changes_nothing(
    story: Story, event: ev.Event, error: type[Exception]
) -> None:
    before = story.world.manager.stats()
    assert isinstance(story.world.run(event), error)
    assert story.world.manager.stats() == before


def test_a_tool_may_not_reserve(story: Story) -> None:
    session = story.world.new_session()
    story.world.run(ev.SessionOpened(session, engine_id(9), Role.TOOL))
    assert isinstance(story.world.run(ev.Reserve(session, NS, 1)), Forbidden)


def test_the_daemon_itself_puts_and_gets_without_a_mapping(story: Story) -> None:
    outcome = story.world.run(ev.Reserve(DAEMON_SESSION, NS, 1))
    assert isinstance(outcome, ins.SlotsReserved)
    event = replace(story.commit_event(chain("a"), outcome.slots.tolist()), session=DAEMON_SESSION)
    story.world.run(event)
    granted = story.world.run(ev.Acquire(DAEMON_SESSION, NS, chain("a"), 1e9))
    assert isinstance(granted, ins.LeaseGranted)
    assert granted.leased_count == 1
    assert story.world.run(ev.Release(DAEMON_SESSION, (granted.lease,))) == ins.LeasesEnded(1)


def test_match_refuses_bytes_that_are_no_whole_hashes(story: Story) -> None:
    with pytest.raises(BadRequest):
        story.world.manager.match_packed(NS, b"x" * 33)


def test_long_lists_are_cut_into_hashes_a_slice_at_a_time() -> None:
    """Cutting 32,768 hashes in one go holds the loop for 25 ms."""
    story = Story(replace(CONFIG, slice_blocks=4, evict_slice_blocks=4))
    story.offload("abcdefghijklmnop")
    hashes = Counted(b"".join(chain("abcdefghijklmnop")), len(chain("a")[0]))
    hinted = story.world.run(ev.HintSessionEnd(NS, hashes))
    assert isinstance(hinted, ins.HintUsed)
    while story.world.checksums:
        story.world.compute_checksums(0)
    evicted = story.world.run(ev.Evict(NS, hashes))
    assert isinstance(evicted, ins.Evicted)
    assert evicted.evicted_count == 16
    assert 1 < hashes.largest_slice <= 4


class Counted(PackedHashes):
    """Notes the largest slice that was cut."""

    largest_slice = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.largest_slice = max(self.largest_slice, len(found))
        return found
