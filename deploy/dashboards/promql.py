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
    """A PromQL selector of series of one metric; `text` is the selector."""

    text: str
    workers: bool = False
    """True if only workers with one of the roles chosen in the dashboard are selected; see `narrowed`."""

    def narrowed(self, expression: str) -> str:
        """Return `expression`, a query over these series, limited to workers of the chosen roles if `workers` is set.

        A role can change, so it is not a label of a worker's series, and the query joins with the metric that has the
        roles. The set operator `and` cannot count a series twice.
        """
        return f"{expression} and on (namespace, model, worker) {_ROLES}" if self.workers else expression


def series(family: Family, suffix: str = "", **labels: str) -> Selection:
    """Select the series of a metric family with the namespace and model that are chosen in the dashboard.

    The values of `labels` are regular expressions. `suffix` is `_bucket`, `_sum` or `_count` of a histogram. Raises
    ValueError for an unknown label or a wrong suffix.
    """
    return Selection(_select(family, suffix, labels))


def of_workers(family: Family, suffix: str = "", **labels: str) -> Selection:
    """Select the series, as `series` does, but only of workers that have one of the chosen roles at present."""
    return Selection(_select(family, suffix, labels), workers=True)


def rate(selected: Selection, *by: str) -> str:
    """Return a query for the increase of counters per second, summed over all labels except `by`."""
    return f"{_sum(by)} ({selected.narrowed(f'rate({selected.text}[{RATE_INTERVAL}])')})"


def total(selected: Selection, *by: str) -> str:
    """Return a query for the sum of gauges over all labels except `by`."""
    return f"{_sum(by)} ({selected.narrowed(selected.text)})"


def share(part: str, whole: str) -> str:
    """Return a query for `part` divided by `whole`, both of which are queries."""
    return f"{part} / {whole}"


def peak_to_mean(query: str, *by: str) -> str:
    """Return a query for the maximum of the series of `query` divided by their mean, per label `by`."""
    return share(*(f"{function} by ({', '.join(by)}) ({query})" for function in ("max", "avg")))


def quantile(part: float, buckets: Selection, *by: str) -> str:
    """Return a query for the quantile `part` (0 to 1) of a histogram over all processes, per label `by`.

    `buckets` selects the `_bucket` series of the histogram.
    """
    return f"histogram_quantile({part:g}, {rate(buckets, 'le', *by)})"


def mean(family: Family, *by: str, of: str = "") -> str:
    """Return a query for the mean of a histogram's observations per label `by`.

    If `of` is "workers", only the workers with one of the chosen roles count; otherwise all series count.
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
