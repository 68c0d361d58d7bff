"""Writes deploy/grafana/*.json: the dashboards, from one list of panels.

    python -m scripts.dashboards

A test holds the files to this list, and every expression to a real Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.dashboard_panels import HEALTH, NAMESPACES, OVERVIEW, TIERS, Panel

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
WIDTH, HEIGHT = 8, 7
GRID_WIDTH = 24


@dataclass(frozen=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]
    by_namespace: bool = False


DASHBOARDS = (
    Dashboard("overview", "kvtier: does it pay?", OVERVIEW),
    Dashboard("tiers", "kvtier: tiers", TIERS),
    Dashboard("namespaces", "kvtier: namespaces", NAMESPACES, by_namespace=True),
    Dashboard("health", "kvtier: health", HEALTH),
)


def json_of(dashboard: Dashboard) -> dict[str, Any]:
    variables = [_variable("instance", "label_values(kvtier_uptime_seconds, instance)")]
    if dashboard.by_namespace:
        values = "label_values(kvtier_namespace_asked_blocks_total, namespace)"
        variables.append(_variable("namespace", values))
    data = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Prometheus",
    }
    return {
        "uid": f"kvtier-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["kvtier"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [data, *variables]},
        "links": [
            {"type": "dashboards", "tags": ["kvtier"], "asDropdown": True, "title": "kvtier"}
        ],
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    in_row = GRID_WIDTH // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": WIDTH * (number % in_row),
            "y": HEIGHT * (number // in_row),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(panel.queries)
        ],
    }


def texts() -> dict[str, str]:
    """File name -> contents."""
    return {
        f"kvtier-{one.name}.json": json.dumps(json_of(one), indent=1, ensure_ascii=False) + "\n"
        for one in DASHBOARDS
    }


def main(arguments: Sequence[str] = ()) -> None:
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
