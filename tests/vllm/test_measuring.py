"""What the metrics of vLLM's users are made of."""

from __future__ import annotations

import pytest

from kvtier.connector.stats import ConnectorStats
from kvtier.connector.vllm.measuring import Meter
from tests.support.clock import ManualClock

pytestmark = pytest.mark.vllm


def test_deadline_of_a_request_told_before_is_not_the_next_ones_reason() -> None:
    """A preempted request asks again, and is counted as missed once."""
    meter, stats = Meter(ManualClock()), ConnectorStats()
    stats.deadline_missed_requests += 1
    meter.note_miss(stats, is_connected=True)
    meter.take(stats)
    stats.deadline_missed_requests += 1  # The same request's, again.
    meter.take(stats)
    meter.note_miss(stats, is_connected=True)
    told = meter.take(stats)
    assert told is not None
    assert told.data == {"missed_requests absent": 1}
