"""Loads at rising rates, up to the knee: where the cluster stops to give most requests what they may expect."""

import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.load.report import LoadReport
from wire.errors import InvalidArgument

GOODPUT_SHARE = 0.9
"""Part of all requests that must meet a cell; the knee is the highest goodput with that."""
GROWTH = 1.5
"""From one rate to the next."""
STEPS_MAX = 16

Measure = Callable[[float, int], LoadReport]
"""A load at a rate; the number of the load makes its tokens differ from those of the loads before."""


Goodput = Mapping[str, tuple[float, float]]
"""Of a load, by cell: the part of its requests that met it, and how many did a second."""


def parse_rates(text: str) -> list[float]:
    """From "1,2.5,4"; rising. InvalidArgument if it is no list of numbers above 0."""
    try:
        rates = sorted(float(rate) for rate in text.split(","))
    except ValueError:
        raise InvalidArgument("--rates", f"{text!r} is no list of numbers") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise InvalidArgument("--rates", f"{text!r} has a rate that is not above 0")
    return rates


def at_rates(measure: Measure, rates: Sequence[float]) -> list[LoadReport]:
    """One load after the other."""
    return [measure(rate, number) for number, rate in enumerate(rates)]


def sweep(measure: Measure, first: float) -> list[LoadReport]:
    """From `first` upwards until no cell has its share of goodput any more, at most `STEPS_MAX` loads, and as far as a
    trace goes.
    """
    reports: list[LoadReport] = []
    while (rate := next_rate(first, [goodput(report) for report in reports])) is not None:
        try:
            reports.append(measure(rate, len(reports)))
        except InvalidArgument:
            if not reports:
                raise
            break
    return reports


def knees(reports: Sequence[LoadReport]) -> dict[str, float]:
    """As `knees_of`."""
    return knees_of([goodput(report) for report in reports])


def goodput(report: LoadReport) -> Goodput:
    """Of one load."""
    return {score.cell.name: (score.share, score.per_s) for score in report.scores}


def next_rate(first: float, loads: Sequence[Goodput]) -> float | None:
    """What to measure after these loads of a sweep from `first`; None = the knees of all cells lie behind."""
    if len(loads) == STEPS_MAX or (loads and not any(share >= GOODPUT_SHARE for share, _ in loads[-1].values())):
        return None
    return first * GROWTH ** len(loads)


def knees_of(loads: Sequence[Goodput]) -> dict[str, float]:
    """For each cell the highest goodput, in requests a second, of a load that kept the share; 0 if none did."""
    found: dict[str, float] = {}
    for cell, (share, per_s) in (item for load in loads for item in load.items()):
        found[cell] = max(found.get(cell, 0.0), per_s if share >= GOODPUT_SHARE else 0.0)
    return found
