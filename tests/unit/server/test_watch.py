"""Watchers: order, loss told in its place, and a limit."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.core.instructions import BlocksStored, NamespaceCleared
from kvtier.errors import LimitExceeded
from kvtier.metrics import Metrics
from kvtier.server.watch import WatchHub
from kvtier.types import BlockHash, NamespaceId, TierName

ONE = NamespaceId(1)
TWO = NamespaceId(2)


def hub_of(events_max: int = 2) -> WatchHub:
    return WatchHub(watchers_max=1, events_max=events_max, metrics=Metrics())


def stored(number: int, namespace: NamespaceId = ONE) -> BlocksStored:
    return BlocksStored(namespace, TierName.DRAM, [BlockHash(bytes([number]))], None)


def test_slow_watcher_is_told_where_and_how_much_it_lost() -> None:
    async def body() -> None:
        hub = hub_of()
        with hub.watching(ONE) as watcher:
            for number in range(5):
                hub.on_stored(stored(number))
            found = [await watcher.next_event() for _ in range(3)]
            assert [one.sequence for one in found] == [1, 2, 5]
            assert found[2].lost.count == 3
            hub.on_cleared(NamespaceCleared(ONE, 9))
            last = await watcher.next_event()
            assert (last.sequence, last.cleared.epoch) == (6, 9)

    asyncio.run(body())


def test_watcher_hears_of_its_namespace_only() -> None:
    async def body() -> None:
        hub = hub_of()
        with hub.watching(ONE) as watcher:
            hub.on_stored(stored(1, TWO))
            hub.on_stored(stored(2))
            assert (await watcher.next_event()).stored.hashes == b"\x02"

    asyncio.run(body())


def test_tokens_are_told_inside_the_bracket_only() -> None:
    async def body() -> None:
        hub = hub_of()
        with hub.watching(ONE) as watcher:
            with hub.describing({BlockHash(b"\x01"): [3, 4]}):
                hub.on_stored(stored(1))
            hub.on_stored(stored(1))
            assert list((await watcher.next_event()).stored.token_ids) == [3, 4]
            assert list((await watcher.next_event()).stored.token_ids) == []

    asyncio.run(body())


def test_watchers_are_limited_and_leave_nothing_behind() -> None:
    hub = hub_of()
    with hub.watching(ONE):
        with pytest.raises(LimitExceeded, match="watchers_max"), hub.watching(TWO):
            pass
        assert hub.is_watched(ONE)
    assert not hub.is_watched(ONE)
    assert len(hub) == 0


def test_loss_stands_where_the_lost_events_would_have_stood() -> None:
    async def body() -> None:
        hub = hub_of()
        with hub.watching(ONE) as watcher:
            for number in (1, 2, 3):
                hub.on_stored(stored(number))
            await watcher.next_event()
            hub.on_stored(stored(4))
            found = [await watcher.next_event() for _ in range(3)]
            assert [one.WhichOneof("event") for one in found] == ["stored", "lost", "stored"]
            assert [one.sequence for one in found] == [2, 3, 4]

    asyncio.run(body())
