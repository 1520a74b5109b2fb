"""Builds PromQL queries over Tandem's metrics, with the dashboards' variables in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.metrics import families as f
from tandem.metrics.family import Family, Kind

RATE_INTERVAL = "$__rate_interval"
"""Grafana's variable for an interval that contains at least four scrapes."""
_SCOPE = {"namespace": "$namespace", "model": "$model"}
_PROCESS_LABELS = {"namespace", "model", "role", "worker"}


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of the series of one metric."""

    text: str
    workers: bool = False
    """True = select only workers that have one of the chosen roles."""

    def narrowed(self, expression: str) -> str:
        """Restrict an expression over these series to workers of the chosen roles, if the series are workers'.

        A worker's role can change, so it is not a label of the worker's other series. A set operator is used because it
        cannot count a series twice.
        """
        return f"{expression} and on (namespace, model, worker) {_ROLES}" if self.workers else expression


def series(family: Family, suffix: str = "", **labels: str) -> Selection:
    """Select all series of a metric family in the chosen namespace and model. Raises ValueError for an unknown label.

    The values of `labels` are regular expressions. `suffix` is `_bucket`, `_sum` or `_count` of a histogram.
    """
    return Selection(_select(family, suffix, labels))


def of_workers(family: Family, suffix: str = "", **labels: str) -> Selection:
    """Select a metric family's series of the workers that have one of the chosen roles at present."""
    return Selection(_select(family, suffix, labels), workers=True)


def rate(selected: Selection, *by: str) -> str:
    """Return a query for the growth of counters per second, summed over all labels except `by`."""
    return f"{_sum(by)} ({selected.narrowed(f'rate({selected.text}[{RATE_INTERVAL}])')})"


def total(selected: Selection, *by: str) -> str:
    """Return a query for gauges, summed over all labels except `by`."""
    return f"{_sum(by)} ({selected.narrowed(selected.text)})"


def share(part: str, whole: str) -> str:
    """Return a query for one query divided by another."""
    return f"{part} / {whole}"


def peak_to_mean(query: str, *by: str) -> str:
    """Return a query for the maximum of a query's series / their mean, per label `by`."""
    return share(*(f"{function} by ({', '.join(by)}) ({query})" for function in ("max", "avg")))


def quantile(part: float, buckets: Selection, *by: str) -> str:
    """Return a query for a quantile of a histogram's `_bucket` series over all processes, per label `by`."""
    return f"histogram_quantile({part:g}, {rate(buckets, 'le', *by)})"


def mean(family: Family, *by: str, of: str = "") -> str:
    """Return a query for the mean of a histogram's observations per label `by`.

    `of` selects the histograms of routers (empty) or of `workers`.
    """
    select = of_workers if of == "workers" else series
    return share(rate(select(family, "_sum"), *by), rate(select(family, "_count"), *by))


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"


def _select(family: Family, suffix: str, labels: dict[str, str]) -> str:
    known = {*family.labels, *_PROCESS_LABELS}
    if unknown := labels.keys() - known:
        raise ValueError(f"{family.full_name} has no label {', '.join(sorted(unknown))}")
    if bool(suffix) is not (family.kind is Kind.HISTOGRAM):
        raise ValueError(f"{family.full_name} is a {family.kind}: it has no series {suffix or 'of that very name'}")
    matchers = ",".join(f'{name}=~"{value}"' for name, value in {**_SCOPE, **labels}.items())
    return f"{family.full_name}{suffix}{{{matchers}}}"


_ROLES = _select(f.WORKER_INFO, "", {"role": "$role"})
