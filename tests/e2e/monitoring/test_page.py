"""The status page, as a browser shows it: live, whole in itself, and true to /metrics."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier.server
from tests.e2e.monitoring.conftest import Stage
from tests.support.browser import go_between, needs_browser, opened
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.prometheus_server import needs_prometheus

pytestmark = [pytest.mark.slow]
PAGE = Path(kvtier.server.__file__).parent / "status_page.html"
OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(|import\s*\(""")


@pytest.fixture(scope="module")
def idle() -> Iterator[RunningDaemon]:
    with running_daemon(dram_bytes="16MiB", slab_bytes="4MiB") as daemon:
        yield daemon


def words_of(elements: str) -> str:
    """What a reader sees, one line."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", elements, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def figure(words: str, pattern: str) -> float:
    found = re.search(pattern, words)
    assert found is not None, f"{pattern!r} is not in: {words}"
    return float(found[1])


@needs_browser
@needs_prometheus
def test_page_shows_what_the_daemon_does(stage: Stage, tmp_path: Path) -> None:
    with go_between(stage.daemon.ready["admin"], "/status.json", 0.3) as between:
        elements = opened(between, "/", tmp_path, milliseconds=9000)
    words = words_of(elements)
    assert 30 < figure(words, r"Hit ratio ([\d.]+) %") < 100
    assert figure(words, r"Time saved, each second ([\d.]+) \w*s\b") > 0
    assert figure(words, r"([\d.]+) blocks/s asked for") > 0
    assert figure(words, r"Onboarded ([\d.]+) [KM]B/s") > 0
    assert figure(words, r"Rates are those of the last (\d+) seconds") >= 1
    # Of one second: on a busy machine not every tier has had a hit in it.
    shares = [figure(words, rf"{tier} ([\d.]+) %") for tier in ("dram", "cxl", "nvme", "remote")]
    assert 30 < sum(shares) <= 101
    assert figure(words, r"unseen ([\d.]+)") > 0
    assert len(re.findall(r"crash@[0-9a-f]{8}", words)) == 2
    assert "nvme on cxl on remote, read closed remote, write closed" in words
    assert set(between.asked) <= {"/", "/status.json", "/favicon.ico"}
    assert between.asked.count("/status.json") >= 4, "it is not live"


@needs_browser
def test_page_fits_a_phone(idle: RunningDaemon, tmp_path: Path) -> None:
    with go_between(idle.ready["admin"], "/status.json", 0.0) as between:
        elements = opened(between, "/status", tmp_path, milliseconds=2500, size="360,700")
    assert "no word from the daemon" not in words_of(elements)
    assert "width=device-width" in elements


def test_page_is_whole_in_itself(idle: RunningDaemon) -> None:
    page = PAGE.read_text()
    assert not OUTSIDE.search(page)
    assert "innerHTML" not in page, "names come from engines: they are text"
    assert "prefers-color-scheme: dark" in page
    for path in ("/", "/status"):
        assert idle.http(path) == page


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://cdn.example/d3.js"></script>',
        "<link rel=stylesheet href=//fonts.example/x.css>",
        "<style>@import 'x.css'</style>",
    ],
)
def test_page_that_loads_something_from_outside_is_seen(planted: str) -> None:
    assert OUTSIDE.search(PAGE.read_text() + planted)


def test_metrics_that_the_page_names_exist(idle: RunningDaemon) -> None:
    lines = idle.http("/metrics").splitlines()
    declared = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    named = set(re.findall(r"kvtier_[a-z_]*[a-z]\b", PAGE.read_text()))
    assert len(named) > 15
    assert named <= declared
