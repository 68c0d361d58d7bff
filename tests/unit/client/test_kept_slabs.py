"""Slabs that stay mapped over a lost session: for nobody to use, until they are offered again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.client.arena import Arena, ArenaTable
from kvtier.client.values import Namespace, NamespaceState, SessionRef
from kvtier.errors import StaleSlot
from kvtier.io.memory import create_memfd
from kvtier.memory import HUGE_BYTES
from kvtier.namespace import NamespaceSpec
from kvtier.v1 import kvtier_pb2 as pb

SPEC = NamespaceSpec("m", "v1", "bf16", "LBHD", block_tokens=16, shard_bytes=4096)
OLD = SessionRef(generation=7, session_id=1)
NEW = SessionRef(generation=7, session_id=2)


class CountingPins:
    """What a device has pinned."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.given_up: list[int] = []

    def add(self, address: int, length_bytes: int) -> None:
        self.added.append(address)

    def give_up(self, address: int) -> bool:
        self.given_up.append(address)
        return True


class Client:
    """A table with one namespace, and the daemon's memfds."""

    def __init__(self) -> None:
        self.table = ArenaTable()
        self.table.enter_generation(7)
        self.pins = CountingPins()
        self.table.set_pins(self.pins)
        self.namespace = Namespace(SPEC, about=1)
        self.arena = Arena(self.table, self.namespace, 0)
        self.fds: list[int] = []

    def file(self) -> int:
        self.fds.append(create_memfd("kvtier-slab", HUGE_BYTES))
        return self.fds[-1]

    def offer(self, fd: int, session: SessionRef, slab: int = 1, slot_first: int = 0) -> None:
        self.namespace.state = NamespaceState(1, b"", 1, 4096, session, b"")
        offer = pb.SlabOffered(
            namespace_id=1,
            slab_id=slab,
            slot_first=slot_first,
            slot_count=16,
            slot_bytes=4096,
            slab_bytes=HUGE_BYTES,
        )
        self.table.add(offer, fd, session)

    def lose(self, session: SessionRef = OLD, *, keeps: bool = True) -> None:
        self.namespace.state = None
        self.table.refuse(session)
        self.table.void_all(keeps=keeps)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    for fd in client.fds:
        os.close(fd)


def test_a_slab_that_is_offered_again_is_neither_mapped_nor_pinned_again(client: Client) -> None:
    fd = client.file()
    client.offer(fd, OLD)
    client.arena.view(3, OLD)[:] = 42
    client.lose()
    client.offer(fd, NEW)
    assert (len(client.pins.added), client.pins.given_up) == (1, [])
    assert np.all(client.arena.view(3, NEW) == 42)
    assert not client.table.has_kept


def test_what_is_kept_is_for_nobody(client: Client) -> None:
    client.offer(client.file(), OLD)
    client.lose()
    for session in (OLD, NEW):
        with pytest.raises(StaleSlot):
            client.arena.view(3, session)
    client.offer(client.file(), NEW, slab=2, slot_first=16)
    with pytest.raises(StaleSlot):
        client.arena.view(3, NEW)


def test_another_file_under_the_same_number_is_mapped_anew(client: Client) -> None:
    client.offer(client.file(), OLD)
    client.arena.view(3, OLD)[:] = 42
    client.lose()
    client.offer(client.file(), NEW)
    assert np.all(client.arena.view(3, NEW) == 0)
    client.table.take_unmapped(NEW)
    assert len(client.pins.added) == 2
    assert client.pins.given_up == client.pins.added[:1]


def test_quiet_about_the_lost_session_waits_until_each_slab_is_offered_or_given_up(
    client: Client,
) -> None:
    one, other = client.file(), client.file()
    client.offer(one, OLD)
    client.offer(other, OLD, slab=2, slot_first=16)
    client.lose()
    assert not client.table.wait_quiet(OLD, 0.01)
    client.offer(one, NEW)
    assert not client.table.wait_quiet(OLD, 0.01)
    client.table.end_kept()
    assert client.table.wait_quiet(OLD, 0.01)


def test_quiet_about_the_lost_session_waits_for_a_copy_in_a_slab_that_is_ours_again(
    client: Client,
) -> None:
    fd = client.file()
    client.offer(fd, OLD)
    hold = client.arena.hold([3], OLD)
    hold.__enter__()
    client.lose()
    client.offer(fd, NEW)
    assert not client.table.wait_quiet(OLD, 0.01)
    hold.__exit__(None, None, None)
    assert client.table.wait_quiet(OLD, 0.01)


@pytest.mark.parametrize("is_offered_first", [True, False])
def test_quiet_about_the_lost_session_waits_for_the_last_view_under_it(
    client: Client, is_offered_first: bool
) -> None:
    """Somebody writes through a view without a hold, and was interrupted."""
    fd = client.file()
    client.offer(fd, OLD)
    view: np.ndarray | None = client.arena.view(3, OLD)[:100].view(np.uint32)
    client.lose()
    assert not client.table.wait_quiet(OLD, 0.01)
    if is_offered_first:
        client.offer(fd, NEW)
        mine = client.arena.view(3, NEW)
        assert not client.table.wait_quiet(OLD, 0.01)
        view = None
        assert client.table.wait_quiet(OLD, 0.01)
        mine[:] = 1
    else:
        view = None
        client.offer(fd, NEW)
        assert client.table.wait_quiet(OLD, 0.01)
    assert view is None


def test_a_withdrawn_slab_is_unmapped_after_its_last_view(client: Client) -> None:
    client.offer(client.file(), OLD)
    view: np.ndarray | None = client.arena.view(3, OLD)
    client.table.withdraw(0, 1)
    assert client.table.take_unmapped(OLD) == []
    assert view is not None
    view = None
    assert [offer.slab_id for offer in client.table.take_unmapped(OLD)] == [1]
    assert not client.table.is_leaving


def test_another_generation_and_an_end_keep_nothing(client: Client) -> None:
    client.offer(client.file(), OLD)
    client.lose()
    client.table.enter_generation(8)
    assert client.pins.given_up == client.pins.added
    assert not client.table.has_kept
    later = SessionRef(generation=8, session_id=1)
    client.offer(client.file(), later)
    client.lose(later, keeps=False)
    assert client.pins.given_up == client.pins.added
    assert not client.table.is_leaving, "the pages are still there"


def test_a_slab_kept_over_two_lost_sessions_is_known_still(client: Client) -> None:
    fd = client.file()
    client.offer(fd, OLD)
    client.lose(OLD)
    client.lose(NEW)
    latest = SessionRef(generation=7, session_id=3)
    client.offer(fd, latest)
    assert len(client.pins.added) == 1
    assert client.table.wait_quiet(OLD, 0.01)
