"""The results of `tandem bench`, as JSON and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from tandem.cli.load.report import LoadReport
from tandem.cli.load.slo import SloCell
from tandem.cli.load.spread import LEVELS, Spread

PERCENTS = ("mean", "p50", "p90", "p99")
_LATENCIES = {"ttft": "TTFT", "gaps": "ITL", "tpot": "TPOT", "end_to_end": "E2E"}


@dataclass(frozen=True, slots=True)
class Load:
    """The result of a load at one rate.

    `interrupted` is True if Ctrl-C ended the load; requests that had not ended by then are not counted.
    """

    report: LoadReport
    interrupted: bool = False

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of complete answers per second, from the start of the load to the end of its last request."""
        return sum(record.tokens for record in self.report.records if not record.error) / self.report.makespan_s

    @property
    def requests_per_s(self) -> float:
        """Complete answers per second, from the start of the load to the end of its last request."""
        return sum(not record.error for record in self.report.records) / self.report.makespan_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens of complete answers per second, over the same time as `output_tokens_per_s`."""
        whole = [record for record in self.report.records if not record.error]
        return sum(record.prompt_tokens + record.tokens for record in whole) / self.report.makespan_s

    def as_result(self) -> dict[str, object]:
        """Return the load as JSON; latencies are in milliseconds."""
        return self.report.as_result() | {
            "interrupted": self.interrupted,
            "requests_per_s": round(self.requests_per_s, 4),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "total_tokens_per_s": round(self.total_tokens_per_s, 2),
        }


def table(loads: Sequence[Load], targets: str) -> Table:
    """Return a table with one column per load; `targets` describes the goodput targets, if there are any."""
    made = Table("", *(f"{load.report.workload.rate:g}/s" for load in loads), title_justify="left")
    for column in made.columns[1:]:
        column.justify = "right"
    for name, cells in _rows(loads, targets).items():
        made.add_row(name, *cells)
    return made


def _rows(loads: Sequence[Load], targets: str) -> dict[str, list[str]]:
    reports = [load.report for load in loads]
    rows = {
        "requests": [_requests(load) for load in loads],
        "errors": [_errors(report.errors) for report in reports],
        "requests/s": [f"{load.requests_per_s:.2f}" for load in loads],
        "output tokens/s": [f"{load.output_tokens_per_s:.1f}" for load in loads],
        "total tokens/s": [f"{load.total_tokens_per_s:.1f}" for load in loads],
    }
    if targets:
        rows[f"goodput, requests/s ({targets})"] = [
            f"{report.scores[0].per_s:.2f} ({report.scores[0].share:.0%})" for report in reports
        ]
    for field, name in _LATENCIES.items():
        for percent in PERCENTS:
            rows[f"{name} {percent}, ms"] = [_ms(getattr(report, field), percent) for report in reports]
    if not all(report.valid for report in reports):
        rows["sent late, P99, ms"] = [_ms(report.lateness, "p99") for report in reports]
    return rows


def _requests(load: Load) -> str:
    return f"{len(load.report.records)}{' (interrupted)' if load.interrupted else ''}"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "0"


def _ms(spread: Spread, percent: str) -> str:
    return f"{getattr(spread, percent) * 1e3:.1f}" if spread.count else "–"


def result_of(model: str, seed: int, cells: Sequence[SloCell], loads: Sequence[Load]) -> dict[str, object]:
    """Return all loads as JSON."""
    return {
        "model": model,
        "workload": loads[0].report.workload.name,
        "seed": seed,
        "valid": all(load.report.valid for load in loads),
        "cells": {cell.name: cell.as_result() for cell in cells},
        "curve_levels": list(LEVELS),
        "loads": [load.as_result() for load in loads],
    }
