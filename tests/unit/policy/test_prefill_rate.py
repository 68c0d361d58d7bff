"""What a token of a prefill takes."""

from __future__ import annotations

import pytest

from kvtier.policy.prefill_rate import PrefillRate


def test_small_steps_do_not_count_beside_large_ones() -> None:
    rate = PrefillRate()
    rate.note(8, 1.0)
    assert rate.token_seconds is None
    rate.note(1000, 2.0)
    rate.note(64, 64.0)  # A batch of decodes.
    assert rate.token_seconds == pytest.approx(0.002)


def test_the_rate_follows_the_engine() -> None:
    rate = PrefillRate()
    rate.note(400, 0.4)
    for _ in range(30):
        rate.note(400, 0.8)
    assert rate.token_seconds == pytest.approx(0.002, rel=0.01)
