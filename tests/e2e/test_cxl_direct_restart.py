"""A hot restart beside a CXL tier that engines read: DRAM is taken over, the tier begins anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.test_cxl_direct import ONES_OWN, node_of_this_machine, read_or_error
from tests.support.daemon import RunningDaemon
from tests.support.hot_restart import (
    COUNT,
    check,
    end,
    kept_daemon,
    kill,
    running_holder,
    wait_mapped,
    wait_matched,
)
from tests.support.nvme_daemon import wait_metric
from tests.support.processes import engine_processes, eventually

pytestmark = pytest.mark.torture


def tier_options() -> dict[str, str]:
    node = str(node_of_this_machine())
    return {**ONES_OWN, "cxl.node": node, "cxl.bytes": "32MiB", "cxl.slab_bytes": "2MiB"}


@pytest.mark.parametrize("ending", [kill, end])
def test_memory_is_taken_over_and_the_tier_that_engines_read_begins_anew(
    ending: Callable[[RunningDaemon], None],
) -> None:
    labels = [f"chain {number}" for number in range(16)]  # Twice what is in memory.
    with (
        running_holder() as holder,
        kept_daemon(holder, tier_options(), dram_bytes="8MiB", slab_bytes="2MiB") as daemon,
        engine_processes() as engines,
    ):
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        engine = engines.start(daemon.socket, maps_segments=1)
        for number, label in enumerate(labels, start=1):
            assert engine.ask("offload", label=label, count=COUNT)["count"] == COUNT
            wait_metric(daemon, 'kvtier_tier_blocks{tier="cxl"}', number * COUNT)
        assert engine.ask("lease", label=labels[0], count=COUNT)["direct"] == COUNT
        ending(daemon)
        assert read_or_error(engine, labels[0]) in (COUNT, "StaleSlot")
        daemon.start()
        wait_metric(daemon, 'kvtier_cxl_state{state="on"}', 1)
        wait_matched(daemon, labels[-1])
        wait_mapped(engine)
        assert read_or_error(engine, labels[0]) == "StaleSlot"
        assert engine.ask("lease", label=labels[0], count=COUNT)["count"] == 0, "it was there only"
        assert engine.ask("onboard", label=labels[-1], count=COUNT)["count"] == COUNT
        for label in ("new 0", *labels[:8]):
            assert engine.ask("offload", label=label, count=COUNT)["count"] == COUNT
        eventually(lambda: engine.ask("lease", label="new 0", count=COUNT)["direct"] == COUNT, "it")
        assert read_or_error(engine, "new 0") == COUNT
        check(daemon)
