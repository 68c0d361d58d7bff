"""The harness that measures kvtier beside others: its arithmetic, its drivers' ends, its report."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import RIVALS, RIVALS_PLOT
from benchmarks.rivals import plot, report, schedule
from benchmarks.rivals.link import Link, NotMeasured, started
from benchmarks.rivals.schedule import Harness, Sizes, System, figures
from tests.support.processes import eventually

FAKE = Path(__file__).parents[1] / "support" / "fake_rival.py"
SIZES = Sizes(
    tokens=64,
    match_rounds=3,
    transfer_rounds=2,
    disk_rounds=1,
    starts=1,
    idle_seconds=0.01,
    warm_rounds=1,
)


def is_running(pid: int) -> bool:
    """Not one that is dead and waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def fake(folder: Path, name: str, mode: str = "well", scale: float = 1.0) -> System:
    @contextlib.contextmanager
    def start(life: str) -> Iterator[Link]:
        command = [sys.executable, str(FAKE), mode, str(scale)]
        with started(name, command, folder / f"{life}.log") as link:
            yield link

    return System(name, start)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "_SETTLE_SECONDS", 0.0)


def measured(folder: Path, *systems: System) -> dict[str, dict[str, Any]]:
    Harness(systems, SIZES, folder, "test").run()
    return {system.name: figures(system) for system in systems}


@pytest.mark.slow
def test_figures_are_medians_of_the_rounds_that_count(tmp_path: Path) -> None:
    found = measured(tmp_path, fake(tmp_path, "one"), fake(tmp_path, "two", scale=2.0))
    # The fake's matches take 1, 2, … ms; three come before the rounds that count.
    assert found["one"]["match_ms"] == 5.0
    assert found["two"]["match_ms"] == 10.0
    assert found["one"]["spread"]["match_ms"] == [4.0, 6.0]
    assert found["one"]["rounds"]["offload_ms"] == SIZES.transfer_rounds
    assert found["two"]["disk_write_ms"] == 60.0
    assert found["one"]["restart"]["read_count"] == 32
    assert found["one"]["rss_mib"] > 1.0


@pytest.mark.slow
def test_a_system_that_fails_is_left_out_and_says_why(tmp_path: Path) -> None:
    dying, well = fake(tmp_path, "dying", mode="dying"), fake(tmp_path, "well")
    refusing = fake(tmp_path, "refusing", mode="refusing")
    found = measured(tmp_path, dying, refusing, well)
    assert "no room left" in found["dying"]["not_measured"]["transfer"]
    assert found["dying"]["match_ms"] == 5.0, "what was measured before stays"
    assert "offload_ms" not in found["dying"]
    assert found["refusing"]["not_measured"] == {"disk": "it has no disk"}
    assert found["well"]["not_measured"] == {}
    assert found["well"]["offload_ms"] == 10.0


@pytest.mark.slow
def test_wrong_blocks_are_counted(tmp_path: Path) -> None:
    found = measured(tmp_path, fake(tmp_path, "wrong", mode="wrong"))
    # Of two rounds in memory, one of the disk, and the restart; each onboard has one.
    assert found["wrong"]["wrong_count"] == 4


def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(NotMeasured, match="No such file"),
        started("gone", [str(tmp_path / "python")], tmp_path / "log"),
    ):
        pass


def test_an_answer_that_does_not_come_ends_driver_and_daemon(tmp_path: Path) -> None:
    command = [sys.executable, str(FAKE), "silent", "1"]
    with started("silent", command, tmp_path / "log") as link:
        pids = link.ask("start", seconds_max=10.0, disk=False)["pids"]
        begun = time.monotonic()
        with pytest.raises(NotMeasured, match=r"no answer to onboard in 0\.1 s"):
            link.ask("onboard", seconds_max=0.1)
        assert time.monotonic() - begun < 5.0
        with pytest.raises(NotMeasured, match="has ended"):
            link.ask("match", seconds_max=1.0)
    # The kernel has been told; a killed process takes a moment to be gone.
    eventually(lambda: not any(is_running(pid) for pid in pids), "all are gone", seconds=5.0)


def test_a_driver_ends_with_its_link_and_takes_its_daemon_along(tmp_path: Path) -> None:
    with started("well", [sys.executable, str(FAKE), "well", "1"], tmp_path / "log") as link:
        pids = link.ask("start", seconds_max=10.0, disk=False)["pids"]
        assert all(is_running(pid) for pid in pids)
    # The kernel has been told; a killed process takes a moment to be gone.
    eventually(lambda: not any(is_running(pid) for pid in pids), "all are gone", seconds=5.0)


def test_a_driver_that_dies_does_not_leave_its_daemon_behind(tmp_path: Path) -> None:
    with started("dying", [sys.executable, str(FAKE), "dying", "1"], tmp_path / "log") as link:
        pids = link.ask("start", seconds_max=10.0, disk=False)["pids"]
        with pytest.raises(NotMeasured, match="no room left"):
            link.ask("offload", seconds_max=10.0)
    eventually(lambda: not any(is_running(pid) for pid in pids), "all are gone", seconds=5.0)


def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started("well", [sys.executable, str(FAKE), "well", "1"], log) as link:
        assert link.ask("about", seconds_max=10.0) == {"versions": {"python": "3"}}
        with pytest.raises(NotMeasured, match="unknown"):
            link.ask("unknown", seconds_max=10.0)
        assert link.ask("forget", seconds_max=10.0) == {}, "a mistake does not end the driver"
    assert "what a library prints" in log.read_text()


def result_of(**systems: dict[str, Any]) -> dict[str, Any]:
    common: dict[str, Any] = {"spread": {}, "rounds": {}, "wrong_count": 0, "not_measured": {}}
    environment = {"date": "2026-01-02T", "commit": "c", "cpu": "x", "cores": 2, "load_average": 1}
    return {
        "systems": {name: common | figures for name, figures in systems.items()},
        "sizes": {"tokens": 64},
        "environment": environment,
    }


def test_every_figure_that_somebody_else_is_better_in_is_told() -> None:
    text = report.section(
        result_of(
            kvtier={"match_ms": 2.0, "offload_ms": 5.0, "rss_mib": 60.0},
            lmcache={"match_ms": 1.0, "offload_ms": 6.0, "rss_mib": 61.0},
            mooncake={"not_measured": {"start": "it is not installed"}},
        )
    )
    lost = text.partition("What we lose:")[2].partition("Not measured:")
    assert "match of 64 tokens, all a hit: LMCache 1.00 ms; kvtier 2.00 ms" in lost[0]
    assert "offload" not in lost[0]
    assert "memory without pools" not in lost[0]
    assert "Mooncake, client daemon, start: it is not installed" in lost[2]


def test_the_longest_bar_belongs_to_the_largest_figure() -> None:
    drawn = plot.draw(result_of(kvtier={"match_ms": 2.0}, lmcache={"match_ms": 8.0}, mooncake={}))
    tree = ElementTree.fromstring(drawn)
    bars = [one for one in tree.iter("{http://www.w3.org/2000/svg}rect") if one.get("x")]
    widths = [float(str(bar.get("width"))) for bar in bars]
    assert len(widths) == 2, "what was not measured has no bar"
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)


def test_the_plot_is_drawn_from_the_committed_figures() -> None:
    drawn = plot.draw(json.loads(RIVALS.read_text()))
    assert RIVALS_PLOT.read_text(encoding="utf-8") == drawn, "run python -m benchmarks.document"
