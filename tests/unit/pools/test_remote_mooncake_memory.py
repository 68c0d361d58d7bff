"""What a Mooncake client registers: buffers, once, for as long as anybody may touch them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.io.giving_way import NICE_STEPS, GivingWay
from kvtier.memory import Bytes
from kvtier.pools.remote.buffers import Buffers, whole_of
from kvtier.pools.remote.engine import RemoteKey, RemoteOutcome
from kvtier.pools.remote.mooncake import MooncakeEngine, MooncakeSettings
from kvtier.pools.remote.mooncake_groups import DIRECT_BYTES_MIN
from tests.support.mooncake_master import needs_mooncake
from tests.support.processes import eventually

pytestmark = needs_mooncake
DONE, UNREACHABLE = RemoteOutcome.DONE, RemoteOutcome.UNREACHABLE
LARGE = DIRECT_BYTES_MIN + 5
KEY = RemoteKey("kvtier1/memory")


class FakeStore:
    """The library's calls as far as they touch memory; `code` is what the next transfers end with.

    It refuses what a real one may not touch: memory that is not registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.kept: dict[str, bytes] = {}
        self.addresses: list[int] = []
        self.priorities: list[int] = []  # Of the threads that called.
        self.code = 0

    def register_buffer(self, address: int, length: int) -> int:
        assert address not in self.registered, "registered twice"
        self.registered[address] = length
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        self._touch(addresses, sizes)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.kept[key] = ctypes.string_at(address, size)
        return [self.code] * len(keys)

    def batch_get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        self._touch(addresses, sizes)
        if self.code:
            return [self.code] * len(keys)
        for key, address in zip(keys, addresses, strict=True):
            ctypes.memmove(address, self.kept[key], len(self.kept[key]))
        return [len(self.kept[key]) for key in keys]

    def _touch(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.addresses = list(addresses)
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        for address, size in zip(addresses, sizes, strict=True):
            assert any(
                first <= address and address + size <= first + length
                for first, length in self.registered.items()
            ), "memory that is not registered"


class Rig:
    def __init__(self) -> None:
        self.store, self.buffers = FakeStore(), Buffers(kept_bytes_max=0)
        settings = MooncakeSettings("127.0.0.1:1", "127.0.0.1")
        self.engine = MooncakeEngine(settings, store=self.store, buffers=self.buffers)

    def value(self, length: int = LARGE) -> Bytes:
        value = self.buffers.take(length)
        np.copyto(value, np.arange(length) % 251, casting="unsafe")
        return value

    def put(self, value: Bytes) -> RemoteOutcome:
        [found] = asyncio.run(self.engine.put([(KEY, [value])], timeout_seconds=10.0))
        return found

    def get(self, length: int = LARGE) -> Bytes | RemoteOutcome:
        [found] = asyncio.run(self.engine.get([KEY], value_bytes_max=length, timeout_seconds=10.0))
        return found.outcome if found.value is None else found.value


def whole_address(value: Bytes) -> int:
    whole = whole_of(value)
    assert whole is not None
    return int(whole.ctypes.data)


def test_a_large_value_is_read_where_it_lies_and_registered_once() -> None:
    rig = Rig()
    value = rig.value()
    for _ in range(2):
        assert rig.put(value) is DONE
        assert rig.store.addresses == [value.ctypes.data]
    assert list(rig.store.registered) == [whole_address(value)]


def test_a_large_value_arrives_where_it_stays() -> None:
    rig = Rig()
    value = rig.value()
    rig.put(value)
    found = rig.get()
    assert not isinstance(found, RemoteOutcome)
    assert rig.store.addresses == [found.ctypes.data]
    assert np.array_equal(found, value)


@pytest.mark.parametrize("length", [100, LARGE])
def test_memory_of_others_is_copied_and_never_registered(length: int) -> None:
    rig = Rig()
    theirs = np.arange(length, dtype=np.uint32).astype(np.uint8)
    assert rig.put(theirs) is DONE
    assert theirs.ctypes.data not in rig.store.registered
    assert rig.store.kept[KEY] == theirs.tobytes()


def test_small_values_share_one_registered_buffer() -> None:
    rig = Rig()
    kept = [rig.value(100) for _ in range(3)]
    for value in kept:
        assert rig.put(value) is DONE
    found = rig.get(100)
    assert not isinstance(found, RemoteOutcome)
    assert np.array_equal(found, kept[-1])
    assert len(rig.store.registered) <= 4  # One a thread.


def test_a_buffer_that_nobody_has_any_more_is_unregistered_before_its_memory_goes() -> None:
    rig = Rig()
    value = rig.value()
    rig.put(value)
    assert rig.store.registered
    del value
    eventually(lambda: not rig.store.registered, "it is unregistered")  # The thread has to let go.


@pytest.mark.skipif(not GivingWay().is_possible, reason="this process may not raise a priority")
def test_a_call_that_asks_without_a_rest_gives_way() -> None:
    rig = Rig()
    rig.put(rig.value())
    rig.get()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert rig.store.priorities == [min(before + NICE_STEPS, 19)] * 2


def test_memory_of_a_call_that_failed_stays_registered_for_a_while() -> None:
    """The library may still write into it."""
    rig = Rig()
    rig.store.code = -800
    assert rig.get() is UNREACHABLE
    assert len(rig.store.registered) == 1
    for _ in range(100):  # Not without end.
        rig.get()
    assert len(rig.store.registered) <= 65


def test_the_end_unregisters_all() -> None:
    rig = Rig()
    value = rig.value()
    rig.put(value)
    asyncio.run(rig.engine.close())
    assert not rig.store.registered
    del value
