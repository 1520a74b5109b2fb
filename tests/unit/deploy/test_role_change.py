"""A worker that changes its role counts once in every panel, exactly like one that never changed."""

from __future__ import annotations

import asyncio
import json
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy.dashboards.__main__ import DASHBOARDS, text_of
from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.supervision.health import Health, Phase
from tandem.cost_model.roofline import ModelSizes, Roofline
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.family import Family, Kind
from tandem.metrics.registry import Registry
from tandem.settings.ceilings import Ceilings
from tandem.worker.reporting.metrics import Utilization, WorkerMetrics, engine_facts
from tests.soak import soak
from tests.unit.deploy.played import input_series, promtool, said
from tests.unit.deploy.promql import walk
from tests.unit.deploy.test_rules import RULES, needs_promtool

MINUTES, CHANGE = 20, 10
LOOKS = (6, 9, 10, 11, 12, 13, 18)
WINDOW = "4m"
HISTOGRAMS = tuple(family for family in f.FAMILIES if family.kind is Kind.HISTOGRAM)
VALUES = {
    "outcome": ("met", "failed"),
    "state": ("free", "quarantined"),
    "half": ("prefill", "decode"),
    "phase": ("prefill", "decode"),
    "graph": ("hit", "miss"),
}
WORKER, EVERYBODY, ROUTERS = "w-0", "prefill|decode|both", (f.REQUESTS_RUNNING, f.REQUESTS_WAITING)
ROOFLINE = Roofline(ModelSizes(1, 2, 1, 1, 1), Ceilings(1e6, 1e5, 0.0))


def changing(minute: int) -> str:
    return "prefill" if minute < CHANGE else "decode"


class World:
    """A cluster with its own namespace, in which every family grows by the minute."""

    def __init__(self, role: Callable[[int], str]) -> None:
        self.minute, self.role = 0, role
        graphs = SimpleNamespace(hits=0, misses=0, padded_tokens=0)
        engine: Any = SimpleNamespace(
            device_name="cpu",
            facts=SimpleNamespace(dtype="float32", summary=("tiny",)),
            graph_use=graphs,
            expert_tokens=SimpleNamespace(read=dict),
        )
        self.worker = Registry(WorkerMetrics("m", WORKER, Utilization(ROOFLINE)).registry.labels)
        self.worker.read(lambda: {f.WORKER_INFO: engine_facts(engine, lambda: role(self.minute))[f.WORKER_INFO]})
        self.worker.read(self._everything)
        router = Registry({"model": "m", "role": "router", "worker": "router"})
        router.read(lambda: dict.fromkeys(ROUTERS, 7.0 + self.minute))
        health = Health(WORKER, Phase.SERVING, 1, 1, 2, "")
        cluster = ClusterMetrics(
            "m", "", frozenset(), lambda: [("prefill", health)], lambda: {WORKER: self.role(self.minute)}
        )
        cluster._answered[WORKER] = True
        self.boards, self.cluster = (self.worker, router), cluster

    def scrapes(self, namespace: str) -> Iterator[dict[str, float]]:
        """Yields the series by name and labels, minute by minute."""
        for self.minute in range(MINUTES):
            for number, family in enumerate(HISTOGRAMS, 1):
                for cell in _cells(family):
                    self.worker.histogram(family, *cell).observe(family.buckets[1], number * (1 + self.minute))
            texts = (Exposition(registry).render()[0].decode() for registry in self.boards)
            text = merge([*texts, asyncio.run(self.cluster.text())])
            yield {
                name: 3.0 * self.minute if name.startswith("process_") else value
                for name, value in said(text, namespace).items()
            }

    @property
    def grown(self) -> float:
        """Growth that grows itself, so that extrapolation shows."""
        return float((1 + self.minute) ** 2)

    def _everything(self) -> dict[Family, dict[tuple[str, ...], float]]:
        given = {f.WORKER_INFO, f.PROCESS_UP, f.PROCESS_RESTARTS, f.TARGET_UP}
        plain = [family for family in f.FAMILIES if family not in {*HISTOGRAMS, *given}]
        return {family: dict.fromkeys(_cells(family), 5.0 + n * self.grown) for n, family in enumerate(plain)}


class Changing(UserDict[str, str]):
    """Labels with the role among them, evaluated at each scrape."""

    def __init__(self, world: World) -> None:
        super().__init__(world.worker.labels, role="")
        self.world = world

    def __getitem__(self, name: str) -> str:
        return self.world.role(self.world.minute) if name == "role" else super().__getitem__(name)


def _cells(family: Family) -> list[tuple[str, ...]]:
    return list(product(*(VALUES.get(label, (f"a {label}",)) for label in family.labels)))


def played(namespace: str, role: Callable[[int], str]) -> list[dict[str, str]]:
    return input_series(list(World(role).scrapes(namespace)))


def expressions() -> list[str]:
    asked = {
        target["expr"]
        for dashboard in DASHBOARDS
        for panel in walk(json.loads(text_of(dashboard))["panels"])
        for target in panel["targets"]
    }
    return sorted(query for query in asked if "DCGM_" not in query and "slo_burn" not in query)


def _of(expression: str, namespace: str, role: str) -> str:
    chosen = {"$__rate_interval": WINDOW, "$namespace": namespace, "$model": ".*", "$role": role}
    for variable, value in chosen.items():
        expression = expression.replace(variable, value)
    return f"sum({expression})"


def questions() -> Iterator[dict[str, Any]]:
    """Both clusters' panels agree at all times; panels of a role from the time at which the worker has it."""
    same, nothing = [{"labels": "{}", "value": 1}], []
    for expression in expressions():
        for role in (EVERYBODY, "decode"):
            pair = [_of(expression, namespace, role) for namespace in ("changes", "stays")]
            narrowed = role != EVERYBODY and "$role" in expression
            yield from (
                {
                    "expr": f"abs({pair[0]} - {pair[1]}) < bool 1e-9",
                    "eval_time": f"{minute}m",
                    "exp_samples": nothing if narrowed and minute < CHANGE else same,
                }
                for minute in LOOKS
            )


def compare(folder: Path) -> str:
    """Returns promtool's failures."""
    series = [*played("changes", changing), *played("stays", lambda _: "decode")]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": list(questions())}
    return promtool({"rule_files": [], "tests": [case]}, folder)


@needs_promtool
def test_panels_count_it_once(tmp_path: Path) -> None:
    assert len(expressions()) > 60
    assert not compare(tmp_path)


@soak
@needs_promtool
def test_a_label_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = World.__init__

    def with_role(self: World, role: Callable[[int], str]) -> None:
        made(self, role)
        self.worker.labels = Changing(self)

    monkeypatch.setattr(World, "__init__", with_role)
    assert "rate(tandem_engine_busy_seconds_total" in compare(tmp_path)


def test_rules_and_panels_match_roles_only_where_series_have_them() -> None:
    """A `role` matcher in any other selector would miss all series of workers."""
    asked = [
        *expressions(),
        *(rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]),
    ]
    for expression in asked:
        for name, role in re.findall(r'(\w+)\{[^}]*\brole=~?"([^"]*)"', expression):
            assert role == "router" or name in {f.WORKER_INFO.full_name, f.PROCESS_UP.full_name}, expression
