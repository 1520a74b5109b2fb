"""Dashboards' queries as Grafana runs them: variables filled in, series named, queries without a number found."""

from __future__ import annotations

import math

from deploy.dashboards.panels import TimeRange, names, read_dashboard, show
from deploy.prometheus.server import Series

TIME_RANGE = TimeRange(100.0, 160.0, rate_s=20)


class Answers:
    """A Prometheus that returns the same values for every query, and records the queries."""

    def __init__(self, *values: float) -> None:
        self.values = values
        self.asked: list[str] = []

    def at(self, expression: str, when: float | None = None) -> list[Series]:
        assert when == TIME_RANGE.end
        return self._answer(expression)

    def between(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        assert (start, end, step_s) == (TIME_RANGE.start, TIME_RANGE.end, TIME_RANGE.step_s)
        return self._answer(expression)

    def _answer(self, expression: str) -> list[Series]:
        self.asked.append(expression)
        return [Series({"__name__": "x", "worker": "decode-0"}, [(1.0, value)]) for value in self.values]


def test_variables_are_filled_in_and_series_named() -> None:
    for name in names():
        answers = Answers(1.0)
        shown = list(show(read_dashboard(name), answers, TIME_RANGE))
        assert answers.asked
        assert not [query for query in answers.asked if "$" in query]
        assert not [query for query in answers.asked if "DCGM" in query], "a folded row asks nothing"
        assert any("[20s]" in query for query in answers.asked)
        assert [panel.empty for panel in shown] == [[]] * len(shown)
        called = {curve.name for panel in shown for curves in panel.answers for curve in curves}
        assert not [legend for legend in called if "{{" in legend]
    assert "decode-0" in called


def test_a_query_without_a_number_is_empty() -> None:
    dashboard = read_dashboard("serving")
    for nothing in ((), (math.nan,), (math.nan, math.inf)):
        shown = list(show(dashboard, Answers(*nothing), TIME_RANGE))
        assert all(len(panel.empty) == len(panel.panel["targets"]) for panel in shown)
    assert not any(panel.empty for panel in show(dashboard, Answers(math.nan, 0.0), TIME_RANGE))
