"""Loads at rising rates up to the knee, the rate beyond which most requests no longer meet their targets."""

from collections.abc import Callable, Mapping, Sequence

from tandem.cli.load.report import LoadReport
from tandem.protocol.errors import InvalidArgument

GOODPUT_SHARE = 0.9
"""Share of all requests that must meet a cell; the knee is the highest goodput with that share."""
GROWTH = 1.5
"""Factor from one rate to the next."""
STEPS_MAX = 16

Measure = Callable[[float, int], LoadReport]
"""Runs a load at a rate; the load's number makes its tokens differ from those of earlier loads."""


Goodput = Mapping[str, tuple[float, float]]
"""The goodput of a load by cell: the share of its requests that met the cell, and their number per second."""


def sweep(measure: Measure, first: float) -> list[LoadReport]:
    """Raise the rate from `first` until no cell reaches its share of goodput.

    There are at most `STEPS_MAX` loads; a trace can end earlier.
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
    """Return the knees of a sweep's reports; see `knees_of`."""
    return knees_of([goodput(report) for report in reports])


def goodput(report: LoadReport) -> Goodput:
    """Return the goodput of one load by cell."""
    return {score.cell.name: (score.share, score.per_s) for score in report.scores}


def next_rate(first: float, loads: Sequence[Goodput]) -> float | None:
    """Return the next rate of a sweep from `first`; None = the knees of all cells are passed."""
    if len(loads) == STEPS_MAX or (loads and not any(share >= GOODPUT_SHARE for share, _ in loads[-1].values())):
        return None
    return first * GROWTH ** len(loads)


def knees_of(loads: Sequence[Goodput]) -> dict[str, float]:
    """Return, for each cell, the highest goodput with the required share in requests per second; 0 = no load has it."""
    goodputs: dict[str, float] = {}
    for cell, (share, per_s) in (item for load in loads for item in load.items()):
        goodputs[cell] = max(goodputs.get(cell, 0.0), per_s if share >= GOODPUT_SHARE else 0.0)
    return goodputs
