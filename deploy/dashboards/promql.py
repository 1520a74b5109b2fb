"""Queries over the metrics that Tandem exports, with the dashboards' variables in them."""

from __future__ import annotations

from collections.abc import Sequence

from telemetry.family import Family, Kind

RATE_INTERVAL = "$__rate_interval"
"""Grafana puts a stretch here that holds at least four scrapes."""
_SCOPE = {"namespace": "$namespace", "model": "$model"}
_WORKERS = {**_SCOPE, "role": "$role"}
_PROCESS_LABELS = {"namespace", "model", "role", "worker"}


def series(family: Family, suffix: str = "", **labels: str) -> str:
    """All series of a family in the chosen namespace and model. ValueError for a label that it does not have.

    Labels' values are regular expressions. `suffix` is `_bucket`, `_sum` or `_count` of a histogram.
    """
    return _select(family, suffix, _SCOPE, labels)


def of_workers(family: Family, suffix: str = "", **labels: str) -> str:
    """The same of workers, of the chosen roles."""
    return _select(family, suffix, _WORKERS, labels)


def rate(selected: str, *by: str) -> str:
    """How much counters grow a second, summed over all but the labels `by`."""
    return f"{_sum(by)} (rate({selected}[{RATE_INTERVAL}]))"


def total(selected: str, *by: str) -> str:
    """Gauges, summed over all but the labels `by`."""
    return f"{_sum(by)} ({selected})"


def share(part: str, whole: str) -> str:
    """One query by another."""
    return f"{part} / {whole}"


def quantile(part: float, buckets: str, *by: str) -> str:
    """A quantile of a histogram's `_bucket` series, over all processes but for the labels `by`."""
    return f"histogram_quantile({part:g}, {rate(buckets, 'le', *by)})"


def mean(family: Family, *by: str, of: str = "") -> str:
    """Of a histogram's observations, per label `by`; `of` chooses router's (empty) or workers' (`workers`) series."""
    select = of_workers if of == "workers" else series
    return share(rate(select(family, "_sum"), *by), rate(select(family, "_count"), *by))


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"


def _select(family: Family, suffix: str, scope: dict[str, str], labels: dict[str, str]) -> str:
    known = {*family.labels, *_PROCESS_LABELS}
    if unknown := labels.keys() - known:
        raise ValueError(f"{family.full_name} has no label {', '.join(sorted(unknown))}")
    if bool(suffix) is not (family.kind is Kind.HISTOGRAM):
        raise ValueError(f"{family.full_name} is a {family.kind}: it has no series {suffix or 'of that very name'}")
    matchers = ",".join(f'{name}=~"{value}"' for name, value in {**scope, **labels}.items())
    return f"{family.full_name}{suffix}{{{matchers}}}"
