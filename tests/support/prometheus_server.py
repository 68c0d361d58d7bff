"""A real Prometheus that scrapes a daemon every 0.2 s, with the rules of deploy/ on a clock of
seconds; ended with its test."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import free_port

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    BINARY is None or PROMTOOL is None, reason="no prometheus is installed"
)
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
SCRAPE = "200ms"
WINDOW = "3s"  # Of every rate, in dashboards and rules.
START_SECONDS_MAX = 20.0


def hurried(rules: str) -> str:
    """The same rules with windows of seconds, and patience for one second."""
    return re.sub(r"\[\d+[smh]\]", f"[{WINDOW}]", re.sub(r"\bfor: \d+[smh]\b", "for: 1s", rules))


class PrometheusServer:
    """One server process, made by `scraping`."""

    def __init__(self, folder: Path, target: str) -> None:
        self.port = free_port()
        for path in RULES.glob("kvtier-*.yml"):
            (folder / path.name).write_text(hurried(path.read_text()))
        config = folder / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: {SCRAPE}, evaluation_interval: {SCRAPE}}}\n"
            "rule_files: ['kvtier-*.yml']\n"
            f"scrape_configs: [{{job_name: kvtier, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        assert BINARY is not None
        self.process = subprocess.Popen(
            [
                *(BINARY, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
                *(f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"),
            ],
            stderr=(folder / "prometheus.log").open("wb"),
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query; raises with Prometheus' own words when it is wrong."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """The sum over its series that are numbers; NaN when there is none."""
        numbers = [float(one["value"][1]) for one in self.query(expression)]
        numbers = [one for one in numbers if math.isfinite(one)]
        return sum(numbers) if numbers else math.nan

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._get("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def wait_firing(self, name: str, seconds: float = 20.0) -> None:
        self.wait(lambda: name in self.firing(), f"{name} does not fire", seconds)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return bool(self.query("up > 0"))
        except OSError:
            assert self.process.poll() is None, "prometheus has ended"
            return False

    def _get(self, what: str, **arguments: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise  # It starts.
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[PrometheusServer]:
    """A server that has scraped `target` once."""
    folder.mkdir(parents=True, exist_ok=True)
    server = PrometheusServer(folder, target)
    try:
        server.wait(server.is_ready, "prometheus does not scrape", START_SECONDS_MAX)
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(10)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def promtool(*arguments: str | Path) -> str:
    """Its words; AssertionError when it finds something wrong."""
    assert PROMTOOL is not None
    command: Sequence[str | Path] = (PROMTOOL, *arguments)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
