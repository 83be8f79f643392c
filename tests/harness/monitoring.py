"""The shipped dashboards and alert rules, and the queries of a panel as Grafana sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.harness.chart import CHART

FOLDER = CHART / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
_VARIABLES = {"$__rate_interval": "20s", "$role": ".*", "$worker": ".*"}


def dashboard(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def panels(path: Path) -> list[dict[str, Any]]:
    """Lists the panels that show data."""
    return [p for p in dashboard(path)["panels"] if p["type"] != "row"]


def queries(path: Path) -> list[tuple[str, str]]:
    """Lists (panel title, expression with variables replaced) of every panel."""
    found = []
    for panel in panels(path):
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
