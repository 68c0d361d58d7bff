"""Sessions of the life before: who may come back under them, and what is left of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import pytest

from kvtier.clock import SystemClock
from kvtier.core.engines import ProcessState
from kvtier.core.instructions import AcknowledgeQuiet, RecallSlots, RequestQuiet
from kvtier.core.manager import BlockManager, ManagerConfig
from kvtier.errors import Unauthenticated
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.pools.slot_table import SlotTable
from kvtier.server.core_loop import CoreLoop
from kvtier.server.holder import close_all
from kvtier.server.keeping import Keeper
from kvtier.server.peers import PidfdWatch
from kvtier.server.restored import NoLink
from kvtier.server.security import Peer, Tokens
from kvtier.server.sessions import Opening, SessionRecord, Sessions
from kvtier.types import EngineId, Role, SessionId
from tests.support.parking_places import MemoryParking

ENGINE = EngineId(b"e" * 16)


class Life:
    """The books on sessions of one daemon, around a real core."""

    def __init__(self, kept: dict[str, int], table: SlotTable) -> None:
        self.keeper = Keeper(MemoryParking(kept))
        config = ManagerConfig(slab_bytes=1 << 21, slab_count_max=1, grace_seconds=0.0)
        manager = BlockManager(config, make_policy=LruPolicy)
        self.core = CoreLoop(manager, clock=SystemClock(), metrics=Metrics())
        self.tokens = Tokens()
        self.sessions = Sessions(
            self.core,
            self.tokens,
            PidfdWatch(asyncio.get_running_loop()),
            SystemClock(),
            sessions_max=8,
            keeper=self.keeper,
        )
        self.core._effects = {
            RequestQuiet: self.sessions.on_request_quiet,
            AcknowledgeQuiet: self.sessions.on_acknowledge_quiet,
            RecallSlots: self.sessions.on_recall_slots,
        }
        former = self.keeper.former
        if former is not None:
            self.sessions.revive(former.inventory.sessions, former.inventory.session_next)
        self.keeper.begin(7, table.fd if former is None else former.table_fd, 1.0)

    def open(self, old: SessionRecord | None = None, token: bytes = b"") -> SessionRecord:
        opening = Opening(
            engine=ENGINE,
            role=Role.BOTH,
            shards=(0,),
            name="engine",
            by_value=False,
            old_session=None if old is None else old.id,
            old_token=token or (b"" if old is None else old.caller.token),
        )
        return self.sessions.open(opening, NoLink(), os.pidfd_open(os.getpid()))  # type: ignore[arg-type]  # No client.

    def states(self) -> dict[SessionId, ProcessState]:
        return {one.session: one.process.state for one in self.core.sessions()}

    def end(self) -> None:
        """kill -9, as far as the parking place notices."""
        self.keeper.close()
        self.sessions.close()


Story = Callable[[Callable[[], Life]], None]


@pytest.fixture
def play() -> Iterator[Callable[[Story], None]]:
    kept: dict[str, int] = {}
    table = SlotTable(7)

    async def run(story: Story) -> None:
        story(lambda: Life(kept, table))

    yield lambda story: asyncio.run(run(story))
    close_all(list(kept.values()))
    table.close()


def test_a_client_comes_back_under_its_session_of_the_life_before(
    play: Callable[[Story], None],
) -> None:
    def story(new_life: Callable[[], Life]) -> None:
        first = new_life()
        old = first.open()
        first.end()
        second = new_life()
        assert second.states() == {old.id: ProcessState.LOST}
        new = second.open(old)
        assert (new.replaces, new.id > old.id) == (old.id, True)
        assert second.states() == dict.fromkeys((old.id, new.id), ProcessState.LIVE)
        assert second.sessions.check_invariants() == []
        second.end()

    play(story)


def test_nobody_else_comes_back_under_it(play: Callable[[Story], None]) -> None:
    def story(new_life: Callable[[], Life]) -> None:
        first = new_life()
        old = first.open()
        first.end()
        second = new_life()
        with pytest.raises(Unauthenticated):
            second.open(old, token=b"guessed")
        second.end()

    play(story)


def test_a_token_of_the_life_before_opens_no_call(play: Callable[[Story], None]) -> None:
    def story(new_life: Callable[[], Life]) -> None:
        first = new_life()
        first.open()
        first.end()
        second = new_life()
        assert len(second.tokens) == 0
        second.end()

    play(story)


def test_a_session_that_ended_in_order_is_not_one_of_the_next_life(
    play: Callable[[Story], None],
) -> None:
    def story(new_life: Callable[[], Life]) -> None:
        first = new_life()
        first.sessions.ended(first.open())
        first.end()
        second = new_life()
        assert ProcessState.LOST not in second.states().values()
        assert second.sessions.used_count == 0
        second.end()

    play(story)


@pytest.mark.parametrize("is_noted", [True, False])
def test_what_the_books_have_forgotten_and_the_core_waits_for_goes_on(
    play: Callable[[Story], None], is_noted: bool
) -> None:
    """The client uses its second session: the books drop the first one, whose slots are withheld
    until its process is quiet about it."""

    def story(new_life: Callable[[], Life]) -> None:
        first = new_life()
        old = first.open()
        new = first.open(old)
        first.sessions.confirm(new)
        assert first.sessions.get(old.id) is None
        if is_noted:
            first.sessions.keep()
        first.end()
        second = new_life()
        assert set(second.states()) == {old.id, new.id}
        assert (second.sessions.get(old.id) is None) == is_noted
        latest = second.open(new)
        second.sessions.confirm(latest)
        assert second.sessions.used_count == 1
        second.end()

    play(story)


def test_numbers_of_sessions_go_on_over_lives(play: Callable[[Story], None]) -> None:
    def story(new_life: Callable[[], Life]) -> None:
        seen: list[int] = []
        for _ in range(3):
            life = new_life()
            seen += [life.open().id, life.sessions.greet(Peer()).session]
            life.end()
        assert seen == sorted(set(seen))

    play(story)
