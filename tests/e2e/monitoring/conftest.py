"""One loaded daemon with four tiers for all tests here; the last file of them kills it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.daemon import RunningDaemon
from tests.support.metric_load import MetricLoad, four_tiers, metric_load
from tests.support.prometheus_server import PrometheusServer, scraping

SETTLE_SECONDS = 3.5  # A little more than the window of a rate.


@dataclass
class Stage:
    folder: Path
    daemon: RunningDaemon
    load: MetricLoad
    prometheus: PrometheusServer


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        four_tiers(folder) as daemon,
        scraping(folder / "prometheus", daemon.ready["admin"]) as prometheus,
        metric_load(daemon) as load,
    ):
        time.sleep(SETTLE_SECONDS)
        yield Stage(folder, daemon, load, prometheus)
