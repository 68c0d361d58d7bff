"""The last day's writes are counted; those before are not."""

from __future__ import annotations

from kvtier.server.wear import DAY_SECONDS, WearMeter

HOUR = 3600.0


def test_a_day_counts_what_lies_in_it_to_a_quarter_of_an_hour() -> None:
    meter = WearMeter()
    meter.note(100, now=0.0)
    meter.note(20, now=HOUR)
    meter.note(3, now=20 * HOUR)
    assert meter.day_bytes(now=20 * HOUR) == 123
    assert meter.day_bytes(now=DAY_SECONDS) == 123
    assert meter.day_bytes(now=DAY_SECONDS + 900.0) == 23
    assert meter.day_bytes(now=DAY_SECONDS + HOUR + 900.0) == 3
    assert meter.day_bytes(now=3 * DAY_SECONDS) == 0
    assert meter.written_bytes == 123


def test_memory_is_that_of_a_day_however_often_it_is_told() -> None:
    meter = WearMeter()
    for second in range(0, 4 * 86_400, 30):
        meter.note(1, now=float(second))
    assert len(meter._steps) <= 97
    assert abs(meter.day_bytes(now=4 * DAY_SECONDS) - 2880) <= 30
