"""Dashboards and rules, held to a real Prometheus that scrapes a real daemon with four tiers."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
import yaml

from scripts import dashboards
from tests.e2e.monitoring.conftest import Stage
from tests.support.prometheus_server import (
    RULES,
    WINDOW,
    hurried,
    needs_prometheus,
    promtool,
)

pytestmark = [pytest.mark.slow, needs_prometheus]
SETTLE_SECONDS = 3.5  # A little more than the window of a rate.
GROWTH_MIN = 1.2
FRAGMENTS = re.compile(r"^(?P<what>.*) (?P<sign>[<>]=?|==) (?P<value>[\d.]+)$")


def filled(expression: str) -> str:
    """As Grafana sends it, with all instances and namespaces chosen."""
    for variable in ("$instance", "$namespace"):
        expression = expression.replace(variable, ".*")
    return expression.replace("$__rate_interval", WINDOW)


def expressions() -> list[tuple[str, str]]:
    return [
        (f"{board.name}: {panel.title}: {legend}", filled(expression))
        for board in dashboards.DASHBOARDS
        for panel in board.panels
        for legend, expression in panel.queries
    ]


def moving() -> list[tuple[str, str]]:
    return [
        (f"{board.name}: {panel.title}", filled(expression))
        for board in dashboards.DASHBOARDS
        for panel in board.panels
        if panel.moves
        for _, expression in panel.queries[:1]
    ]


def alert_rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(hurried((RULES / "kvtier-alerts.yml").read_text()))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_no_panel_is_empty(stage: Stage) -> None:
    empty = [
        f"{name}: {expression}"
        for name, expression in expressions()
        if not math.isfinite(stage.prometheus.value(expression))
    ]
    assert not empty, "\n".join(empty)


def test_what_alerts_look_at_is_there(stage: Stage) -> None:
    empty = []
    for rule in alert_rules():
        parts = FRAGMENTS.match(rule["expr"])
        assert parts is not None, f"{rule['alert']} does not end in a comparison"
        if not math.isfinite(stage.prometheus.value(parts["what"])):
            empty.append(f"{rule['alert']}: {parts['what']}")
    assert not empty, "\n".join(empty)
    recorded = yaml.safe_load((RULES / "kvtier-rules.yml").read_text())["groups"][0]["rules"]
    assert not [one for one in recorded if not stage.prometheus.query(one["record"])]


def test_panels_move_when_the_load_doubles(stage: Stage) -> None:
    before = {name: stage.prometheus.value(one) for name, one in moving()}
    stage.load.start()
    time.sleep(SETTLE_SECONDS)
    after = {name: stage.prometheus.value(one) for name, one in moving()}
    still = {
        name: (before[name], after[name])
        for name in before
        if not after[name] > GROWTH_MIN * before[name] > 0
    }
    assert not still


def test_each_answer_of_metrics_adds_up_under_load(stage: Stage) -> None:
    for _ in range(20):
        found = stage.daemon.metrics()
        for call in ("match", "acquire", "get"):
            asked = found[f'kvtier_asked_blocks_total{{call="{call}"}}']
            assert asked > 0
            assert asked == _sum(found, "kvtier_hit_blocks_total", call) + _sum(
                found, "kvtier_miss_reason_blocks_total", call
            )
            assert asked == _sum(found, "kvtier_namespace_asked_blocks_total", call)
        for name in _namespaces(found):
            asked = _sum(found, "kvtier_namespace_asked_blocks_total", name)
            answered = _sum(found, "kvtier_namespace_hit_blocks_total", name)
            assert asked == answered + _sum(found, "kvtier_namespace_miss_blocks_total", name) > 0
        slots = {
            state: found[f'kvtier_tier_slots{{state="{state}",tier="dram"}}']
            for state in ("free", "ready", "reserved", "held")
        }
        assert sum(slots.values()) == stage_slots(stage)
    assert len(_namespaces(found)) == 2


def stage_slots(stage: Stage) -> int:
    """Four slabs of one MiB, of one shard; all of them are bound by now."""
    return (4 << 20) // (32 << 10)


def _sum(found: dict[str, float], metric: str, label: str) -> float:
    return sum(v for k, v in found.items() if k.startswith(metric + "{") and f'"{label}"' in k)


def _namespaces(found: dict[str, float]) -> set[str]:
    keys = [key for key in found if key.startswith("kvtier_namespace_asked_blocks_total")]
    return {re.findall(r'namespace="([^"]*)"', key)[0] for key in keys}


# --------------------------------------------------------------------------------- the files


def test_dashboards_are_written_from_the_list_of_panels() -> None:
    found = {path.name: path.read_text() for path in dashboards.FOLDER.glob("*.json")}
    assert found == dashboards.texts()


def test_rules_are_sound_and_hide_nothing() -> None:
    for path in sorted(RULES.glob("kvtier-*.yml")):
        promtool("check", "rules", path)
    promtool("check", "config", RULES / "prometheus.yml")
    texts = [path.read_text() for path in RULES.glob("*.yml")] + list(dashboards.texts().values())
    assert not [text for text in texts if "or vector(" in text]


def test_every_alert_has_its_heading_in_the_runbook() -> None:
    operations = (RULES.parents[1] / "docs" / "operations.md").read_text()
    for rule in yaml.safe_load((RULES / "kvtier-alerts.yml").read_text())["groups"][0]["rules"]:
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert f"\n### {name}\n" in operations, name


def test_misspelt_metric_is_seen(stage: Stage) -> None:
    """The check of empty panels can fail."""
    right = expressions()[0][1]
    assert math.isfinite(stage.prometheus.value(right))
    assert math.isnan(stage.prometheus.value(right.replace("hit_blocks", "hits_block")))


def test_json_is_what_grafana_reads() -> None:
    for text in dashboards.texts().values():
        board = json.loads(text)
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        assert all(panel["targets"] for panel in board["panels"])
