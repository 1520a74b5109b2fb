"""Runs the queries of a dashboard as Grafana would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.prometheus.server import Prometheus, Series

FOLDER = Path(__file__).parent
_NAME = "__name__"


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The time range of a dashboard, from `start` to `end` in Unix seconds, with one point every `step_s` seconds.

    Rates are computed over `rate_s` seconds.
    """

    start: float
    end: float
    rate_s: int = 15
    step_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A series of a panel; `name` is its text in the legend."""

    name: str
    series: Series


@dataclass(frozen=True, slots=True)
class Shown:
    """A panel with its data: its JSON in the dashboard's file, and the series that each of its queries returned."""

    panel: Mapping[str, Any]
    answers: tuple[tuple[Curve, ...], ...]

    @property
    def title(self) -> str:
        """The panel's title."""
        return str(self.panel["title"])

    @property
    def empty(self) -> list[str]:
        """The queries of the panel that returned no finite value."""
        answered = zip(self.panel["targets"], self.answers, strict=True)
        return [target["expr"] for target, curves in answered if not any(curve.series.finite for curve in curves)]


def read_dashboard(name: str) -> dict[str, Any]:
    """Read the dashboard named `name` from its file."""
    dashboard: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return dashboard


def names() -> list[str]:
    """Return the names of all dashboards."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def show(
    dashboard: Mapping[str, Any], prometheus: Prometheus, time_range: TimeRange, *, folded_row: str | None = None
) -> Iterator[Shown]:
    """Run the queries of a dashboard with all variables set to "All", and yield each panel with its results.

    The panels are those outside of folded rows or, if `folded_row` is given, those of the folded row with that title.
    """
    chosen = {variable["name"]: variable.get("allValue", "") for variable in dashboard["templating"]["list"]}
    rows = {panel["title"]: panel["panels"] for panel in dashboard["panels"] if panel["type"] == "row"}
    for panel in dashboard["panels"] if folded_row is None else rows[folded_row]:
        if panel["type"] != "row":
            asked = [_ask(target, prometheus, time_range, chosen) for target in panel["targets"]]
            yield Shown(panel, tuple(asked))


def _ask(
    target: Mapping[str, Any], prometheus: Prometheus, time_range: TimeRange, chosen: Mapping[str, str]
) -> tuple[Curve, ...]:
    expression = target["expr"].replace("$__rate_interval", f"{time_range.rate_s}s")
    for name, value in chosen.items():
        expression = expression.replace(f"${name}", value)
    if target["instant"]:
        results: Sequence[Series] = prometheus.at(expression, time_range.end)
    else:
        results = prometheus.between(expression, time_range.start, time_range.end, time_range.step_s)
    return tuple(Curve(_named(target["legendFormat"], series.labels), series) for series in results)


def _named(legend: str, labels: Mapping[str, str]) -> str:
    if not legend:
        return ", ".join(value for name, value in labels.items() if name != _NAME)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
