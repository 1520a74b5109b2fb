"""The elements of a dashboard, and their conversion to Grafana's JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.protocol.messages import Role

SCHEMA_VERSION = 39
"""The schema version of Grafana 10.4; newer versions of Grafana migrate it on loading."""
_COLUMNS = 24
_HEIGHT, _ROW_HEIGHT = 8, 1
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_FILLED, _PLAIN = 40, 8

Json = dict[str, Any]


class Kind(StrEnum):
    """Grafana's panel types; the values are the names in its JSON."""

    LINES = "timeseries"
    NUMBER = "stat"
    HEATMAP = "heatmap"
    TABLE = "table"


class Unit(StrEnum):
    """Grafana's units; the values are the names in its JSON."""

    SECONDS = "s"
    REQUESTS = "reqps"
    A_SECOND = "cps"
    BYTES = "bytes"
    BYTES_A_SECOND = "Bps"
    FLOPS = "flops"
    SHARE = "percentunit"
    NUMBER = "short"
    CELSIUS = "celsius"
    JOULES = "joule"
    WATTS = "watt"
    HERTZ = "hertz"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series, in which `{{label}}` stands for a label's value."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard; `about` is its description, and `width` is a number of Grafana's 24 columns."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    about: str = ""
    kind: Kind = Kind.LINES
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading. A folded row sends no queries until the user opens it."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A Grafana dashboard: rows of panels. `name` is the name of its file and part of its address in Grafana."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]

    def as_json(self) -> Json:
        """Return the dashboard in the JSON form that Grafana imports."""
        return {
            "uid": f"tandem-{self.name}",
            "title": self.title,
            "description": self.about,
            "tags": ["tandem"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "timezone": "browser",
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "annotations": {"list": []},
            "links": [{"type": "dashboards", "title": "Tandem", "tags": ["tandem"], "asDropdown": False,
                       "keepTime": True, "includeVars": True}],
            "templating": {"list": _variables()},
            "panels": list(_panels(self.rows)),
        }  # fmt: skip


def _variables() -> list[Json]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    namespaced = 'namespace=~"$namespace"'
    return [
        source,
        _variable("namespace", "Namespace", f.PROCESS_UP),
        _variable("model", "Model", f.PROCESS_UP, namespaced),
        _variable("role", "Role of workers", f.WORKER_INFO, f'{namespaced},model=~"$model"', "|".join(Role)),
    ]


def _variable(name: str, label: str, family: Family, matchers: str = "", everything: str = ".*") -> Json:
    """Return a dashboard variable with which the user selects values of the metric label `name`.

    The choices are the values in the series of `family` that `matchers` select. `everything` is the regular expression
    of the choice "All"; by default it also matches series without the label.
    """
    selected = f"{family.full_name}{{{matchers}}}" if matchers else family.full_name
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({selected}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": everything,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: Sequence[Row]) -> Iterator[Json]:
    """Yield the JSON of the rows and panels from top to bottom; ids start at 1, folded rows contain their panels."""
    number, top = 1, 0
    for row in rows:
        head: Json = {"id": number, "type": "row", "title": row.title, "collapsed": row.folded, "panels": []}
        head["gridPos"] = _place(0, top, _COLUMNS, _ROW_HEIGHT)
        number, top = number + 1, top + _ROW_HEIGHT
        placed, left = [], 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _HEIGHT
            placed.append(_panel(panel, number, _place(left, top, panel.width, _HEIGHT)))
            number, left = number + 1, left + panel.width
        top += _HEIGHT
        if row.folded:
            head["panels"] = placed
        yield head
        yield from () if row.folded else placed


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.about,
        "gridPos": place,
        "datasource": _SOURCE,
        "targets": [_target(panel, query, chr(ord("A") + i)) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel.kind),
    }


def _target(panel: Panel, query: Query, letter: str) -> Json:
    at_once = panel.kind is Kind.TABLE
    form = {Kind.TABLE: "table", Kind.HEATMAP: "heatmap"}.get(panel.kind, "time_series")
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "expr": re.sub(r"\s+", " ", query.expression).strip(),
        "legendFormat": "{{le}}" if panel.kind is Kind.HEATMAP else query.legend,
        "format": form,
        "instant": at_once,
        "range": not at_once,
    }


def _field(panel: Panel) -> Json:
    field: Json = {"unit": panel.unit.value}
    if panel.kind is Kind.LINES:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        filled = _FILLED if panel.stacked else _PLAIN
        field |= {"min": 0, "custom": {"drawStyle": "line", "fillOpacity": filled, "stacking": stacking}}
    return field


def _options(kind: Kind) -> Json:
    if kind is Kind.NUMBER:
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
    if kind is Kind.HEATMAP:
        return {
            "calculate": False,
            "cellGap": 0,
            "yAxis": {"unit": "s"},
            "color": {"mode": "scheme", "scheme": "Oranges"},
        }
    if kind is Kind.TABLE:
        return {"showHeader": True}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
