"""An emulated tier is as fast as was asked, to a tenth, on the wall clock as in its books."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from kvtier.clock import SystemClock
from kvtier.io.throttle import EmulatedSpeed, Throttle, TokenBucket
from tests.support.clock import ManualClock

MIB = 1 << 20


def arrays(count: int, length_bytes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, length_bytes, np.uint8) for _ in range(count)]
    return [np.zeros(length_bytes, np.uint8) for _ in range(count)], sources


class LateTimer:
    """Waits on a manual clock, each a little longer than asked, as the kernel's do."""

    def __init__(self, clock: ManualClock, late_seconds: float) -> None:
        self._clock = clock
        self._late_seconds = late_seconds

    def wait(self, seconds: float) -> None:
        self._clock.advance(seconds + self._late_seconds)


def test_the_books_put_copies_one_after_another() -> None:
    bucket = TokenBucket(EmulatedSpeed(1000.0))
    assert bucket.take(500, now=10.0) == 10.5
    assert bucket.take(500, now=10.1) == 11.0
    assert bucket.take(100, now=20.0) == pytest.approx(20.1), "an idle tier puts nothing by"


def test_what_a_wait_was_late_is_made_up_once_and_within_limits() -> None:
    bucket = TokenBucket(EmulatedSpeed(1000.0))
    bucket.take(1000, now=0.0)
    bucket.give_credit(0.001)
    assert bucket.take(1, now=1.001) == pytest.approx(1.001)
    assert bucket.take(1, now=5.0) == pytest.approx(5.001), "credit is used once"
    bucket.give_credit(3.0)
    assert bucket.take(1, now=9.0) == pytest.approx(9.0 - 0.010 + 0.001)


@pytest.mark.parametrize("late_seconds", [0.0, 60e-6, 500e-6])
def test_a_stream_of_blocks_has_the_bandwidth_asked_however_late_timers_are(
    late_seconds: float,
) -> None:
    clock = ManualClock()
    timer = LateTimer(clock, late_seconds)
    speed = EmulatedSpeed(4e9)
    throttle = Throttle(speed, clock.now, timer.wait)
    targets, sources = arrays(1, 2 * MIB)
    began = clock.now()
    for _ in range(200):
        throttle.copy_batch(targets, sources)
    measured = 200 * 2 * MIB / (clock.now() - began)
    assert measured == pytest.approx(speed.bytes_per_second, rel=0.1)


@pytest.mark.parametrize("late_seconds", [0.0, 60e-6])
def test_each_access_costs_its_latency(late_seconds: float) -> None:
    clock = ManualClock()
    throttle = Throttle(EmulatedSpeed(1e12, 0.001), clock.now, LateTimer(clock, late_seconds).wait)
    targets, sources = arrays(10, 64)
    began = clock.now()
    throttle.copy_batch(targets, sources)
    assert clock.now() - began == pytest.approx(0.010, rel=0.1)


def test_bytes_arrive_and_are_counted() -> None:
    clock = ManualClock()
    throttle = Throttle(EmulatedSpeed(1e6), clock.now, LateTimer(clock, 0).wait)
    targets, sources = arrays(3, 4096)
    throttle.copy_batch(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert (target == source).all()
    stats = throttle.stats()
    assert (stats.copied_bytes, stats.access_count, stats.late_count) == (3 * 4096, 3, 0)
    assert stats.busy_seconds == pytest.approx(3 * 4096 / 1e6)


def test_a_machine_slower_than_the_tier_it_plays_is_told() -> None:
    clock = ManualClock()

    def slow_now() -> float:
        clock.advance(0.001)  # Every look at the clock costs a millisecond here.
        return clock.now()

    throttle = Throttle(EmulatedSpeed(1e12), slow_now, LateTimer(clock, 0).wait)
    throttle.copy_batch(*arrays(1, 4096))
    assert throttle.stats().late_count == 1


def test_a_speed_is_shown_in_gigabytes_and_nanoseconds() -> None:
    assert str(EmulatedSpeed(2.5e9, 400e-9)) == "2.5 GB/s, 400 ns"


@pytest.mark.slow
@pytest.mark.parametrize("speed", [EmulatedSpeed(0.25e9), EmulatedSpeed(0.5e9, 50e-6)])
def test_the_wall_clock_agrees(speed: EmulatedSpeed) -> None:
    """On real memory and a real timer, in a stream of blocks from two threads.

    Never faster; slower only when somebody else has the machine, which some tries get over.
    """
    clock = SystemClock()
    count, length_bytes = 16, MIB
    pairs = [arrays(1, length_bytes) for _ in range(2)]
    asked = 2 * count * length_bytes / speed.bytes_per_second

    def stream(throttle: Throttle, targets: list[np.ndarray], sources: list[np.ndarray]) -> None:
        for _ in range(count):
            throttle.copy_batch(targets, sources)

    def measured_seconds() -> float:
        throttle = Throttle(speed, clock.now)
        threads = [threading.Thread(target=stream, args=(throttle, *pair)) for pair in pairs]
        began = clock.now()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert throttle.stats().copied_bytes == 2 * count * length_bytes
        return clock.now() - began

    tries = []
    while len(tries) < 20 and min(tries, default=math.inf) > asked * 1.1:
        tries.append(measured_seconds())
    assert min(tries) >= asked * 0.99
    assert min(tries) <= asked * 1.1
