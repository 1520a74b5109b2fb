"""Loads at rising rates, up to the knee: where the cluster stops to give most requests what they may expect."""

from collections.abc import Callable, Sequence

from benchmarks.load.report import LoadReport

GOODPUT_SHARE = 0.9
"""Part of all requests that must meet a cell; the knee is the highest goodput with that."""
GROWTH = 1.5
"""From one rate to the next."""
STEPS_MAX = 16

Measure = Callable[[float, int], LoadReport]
"""A load at a rate; the number of the load makes its tokens differ from those of the loads before."""


def at_rates(measure: Measure, rates: Sequence[float]) -> list[LoadReport]:
    """One load after the other."""
    return [measure(rate, number) for number, rate in enumerate(rates)]


def sweep(measure: Measure, first: float) -> list[LoadReport]:
    """From `first` upwards until no cell has its share of goodput any more, at most `STEPS_MAX` loads."""
    reports: list[LoadReport] = []
    for number in range(STEPS_MAX):
        reports.append(measure(first * GROWTH**number, number))
        if not any(score.share >= GOODPUT_SHARE for score in reports[-1].scores):
            break
    return reports


def knees(reports: Sequence[LoadReport]) -> dict[str, float]:
    """For each cell the highest goodput, in requests a second, of a load that kept the share; 0 if none did."""
    found: dict[str, float] = {}
    for score in (score for report in reports for score in report.scores):
        reached = score.per_s if score.share >= GOODPUT_SHARE else 0.0
        found[score.cell.name] = max(found.get(score.cell.name, 0.0), reached)
    return found
