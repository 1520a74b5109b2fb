"""Extracts the metrics and labels that a PromQL expression uses, and lists the exported ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector

from tandem.metrics.families import FAMILIES
from tandem.metrics.family import Kind

PROCESS = {"namespace", "model", "worker"}
"""Labels of every series; `namespace` and discovery's labels are added by the scrape."""
ROUTER = PROCESS | {"role"}
"""Labels of a router's series; a worker's role is in a series of its own."""
DCGM_LABELS = {"Hostname", "gpu"}
_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\s*\{([^}]*)\}")
_NAME = re.compile(r"(?<![\w$.:])([A-Za-z_:][\w:]*)(?![\w:]*\s*\()")


def known() -> dict[str, set[str]]:
    """Returns every series that a cluster exports, with its labels."""
    labels_of = {}
    for family in FAMILIES:
        labels = {*ROUTER, *family.labels}
        if family.kind is Kind.HISTOGRAM:
            labels_of[f"{family.full_name}_bucket"] = labels | {"le"}
            labels_of[f"{family.full_name}_count"] = labels_of[f"{family.full_name}_sum"] = labels
        else:
            labels_of[family.full_name] = labels
    registry = CollectorRegistry(auto_describe=False)
    for metric in ProcessCollector(registry=registry).collect():
        for sample in metric.samples:
            labels_of[sample.name] = set(PROCESS)
    return labels_of


def selected(expression: str) -> list[tuple[str, set[str]]]:
    """Returns each selected metric with the labels of its matchers."""
    bare = _STRING.sub('""', expression)
    pairs = [(name, _labels(inside)) for name, inside in _SELECTOR.findall(bare)]
    rest = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", _SELECTOR.sub("", bare)))
    return pairs + [(name, set()) for name in _NAME.findall(rest) if name not in _WORDS]


def grouped(expression: str) -> set[str]:
    """Returns the labels by which an expression groups or joins."""
    inside = _GROUPING.findall(_STRING.sub('""', expression))
    return {label.strip() for inner in inside for label in inner.split(",") if label.strip()}


def strangers(expression: str, series: dict[str, set[str]]) -> list[str]:
    """Returns the metrics and labels of an expression that `series` does not have."""
    asked = selected(expression)
    wrong = [name for name, _ in asked if name not in series]
    wrong += [f"{name}{{{label}}}" for name, labels in asked if name in series for label in labels - series[name]]
    have: set[str] = set().union(*(series.get(name, set()) for name, _ in asked))
    return wrong + [f"by ({label})" for label in grouped(expression) - have]


def _labels(inside: str) -> set[str]:
    return set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))


def walk(panels: Iterable[dict]) -> Iterable[dict]:
    """Yields all panels but rows, those inside of folded rows too."""
    for panel in panels:
        if panel["type"] == "row":
            yield from walk(panel["panels"])
        else:
            yield panel
