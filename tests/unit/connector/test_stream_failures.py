"""What an engine may do after the streams were given up with copies still under way."""

from __future__ import annotations

import pytest

from kvtier.connector.jobs import FailReason
from tests.unit.connector.test_stream_copying import Bench


def test_a_failed_load_writes_nothing_more_once_its_engine_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine computes into the blocks itself; CUDA is alive, and the copy is in flight."""
    bench = Bench()
    bench.slab.array[:] = 7
    bench.cuda.compute(bench.compute, 5e-3, name="busy")
    bench.start(bench.onboard(1, [1], [1]))
    bench.lane.step()
    assert not bench.blocks.streams.is_idle

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(bench.blocks.streams, "poll", fail)
    bench.lane.step()
    [result] = bench.worker.poll()
    assert result.failed is FailReason.COPY
    bench.fill(1, 3)
    seen = bench.read(1)
    bench.cuda.advance(1.0)
    assert seen == [3]
    bench.cuda.checker.assert_no_races()
    bench.worker.close()
