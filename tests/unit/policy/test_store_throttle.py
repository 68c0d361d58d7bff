"""Copies beside a decoding engine, in virtual time: how much they stretch its steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.policy.store_throttle import StoreThrottle

STEP_SECONDS, PREFILL_SECONDS = 10e-3, 80e-3
LINK = 50e9
PIECE_BYTES = 4 << 20


@dataclass
class Run:
    """What a decoding engine saw while there was always something to copy."""

    stretches: list[float]  # Of decode steps, against the same step alone.
    copied_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.copied_bytes / self.seconds


def play(
    throttle: StoreThrottle | None,
    interference: Callable[[int], float],
    *,
    steps: int = 4000,
    skipped: int = 1000,
    prefill_every: int = 0,
    phase_steps: int = 0,
    noise: float = 0.01,
) -> Run:
    """A step is longer by `interference` times the share of the link that copies had in it."""
    chance = random.Random(5)
    now, copied, run = 0.0, 0, Run([], 0, 0.0)
    for step in range(steps):
        is_prefill = prefill_every > 0 and step % prefill_every == 0
        is_large = phase_steps > 0 and step // phase_steps % 2 == 1
        alone = PREFILL_SECONDS if is_prefill else STEP_SECONDS * (1.4 if is_large else 1.0)
        alone *= 1 + chance.uniform(-noise, noise)
        if step % 97 == 0:
            alone *= 3  # A hiccup of the machine.
        # In slices: what was let through by then, at most what the link carries.
        sent, slices = 0, 50
        for index in range(slices):
            at = now + alone * index / slices
            while sent < LINK * alone * (index + 1) / slices and (
                throttle is None or throttle.may_send(PIECE_BYTES, at)
            ):
                sent += PIECE_BYTES
        seconds = alone * (1 + interference(step) * sent / (LINK * alone))
        now += seconds
        copied += sent
        if throttle is not None:
            throttle.note_step(seconds, 2048 if is_prefill else 100 if is_large else 30, sent)
        if step >= skipped:
            run.copied_bytes += sent
            run.seconds += seconds
            if not is_prefill:
                run.stretches.append(seconds / alone - 1)
    return run


@pytest.mark.parametrize("prefill_every", [0, 2, 20])
def test_decoding_is_stretched_by_as_much_as_is_allowed_and_copies_go_on(
    prefill_every: int,
) -> None:
    run = play(StoreThrottle(stretch_max=0.05), lambda _: 0.5, prefill_every=prefill_every)
    assert np.mean(run.stretches) <= 0.05
    # One burst and one piece more than the mean: what a single step may see.
    assert np.percentile(run.stretches, 99) <= 0.08
    ideal = 0.05 / 0.5 * LINK
    assert run.bytes_per_second >= 0.5 * ideal


def test_without_a_throttle_the_same_copies_stretch_it_by_far_more() -> None:
    run = play(None, lambda _: 0.5)
    assert np.mean(run.stretches) > 0.4


def test_copies_that_disturb_nobody_get_the_link() -> None:
    run = play(StoreThrottle(stretch_max=0.05), lambda _: 0.01)
    assert run.bytes_per_second > 0.8 * LINK


def test_the_rate_follows_when_the_interference_changes() -> None:
    run = play(
        StoreThrottle(stretch_max=0.05),
        lambda step: 0.2 if step < 1000 else 2.0,
        steps=4000,
        skipped=1600,
    )
    assert np.mean(run.stretches) <= 0.05
    assert run.bytes_per_second >= 0.4 * 0.05 / 2.0 * LINK


def test_steps_that_compute_more_are_not_taken_for_stretched_ones() -> None:
    run = play(StoreThrottle(stretch_max=0.05), lambda _: 0.5, steps=8000, phase_steps=100)
    assert np.mean(run.stretches) <= 0.05
    assert run.bytes_per_second >= 0.5 * 0.05 / 0.5 * LINK


def test_noise_alone_does_not_stop_copies() -> None:
    run = play(StoreThrottle(stretch_max=0.05), lambda _: 0.0, noise=0.03)
    assert run.bytes_per_second > 0.5 * LINK


def test_the_rate_never_falls_below_its_minimum() -> None:
    throttle = StoreThrottle(stretch_max=0.05, bytes_per_second_min=100e6)
    run = play(throttle, lambda _: 100.0)
    assert throttle.bytes_per_second >= 100e6
    assert run.copied_bytes > 0


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    throttle = StoreThrottle(bytes_per_second=1e9, burst_bytes=8 << 20)
    sent = 0
    for index in range(10_000):
        while throttle.may_send(1 << 20, index * 1e-4):
            sent += 1 << 20
    assert 1e9 <= sent <= 1e9 + (10 << 20)
