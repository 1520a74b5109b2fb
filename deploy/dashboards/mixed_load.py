"""A sequence of loads with several SLO classes, so that every panel of the dashboards has data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.cli.load.record import RequestRecord
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.target import Target
from tandem.cli.load.workload import Block, Workload

_SHARED = Block(1 << 40, 96)
"""The common prefix of every second prompt. Its key differs from those of all other blocks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the load, whose requests all have the same SLO class.

    `rate` is in requests per second, and `share` is the section's fraction of the total time.
    """

    slo_class: str
    share: float
    rate: float
    source: Synthetic


PARTS = (
    Part("best_effort", 0.4, 1.5, Synthetic(Lengths(120, 0.8), Lengths(12, 0.5), cv=1.5)),
    Part("quick", 0.2, 3.0, Synthetic(Lengths(200, 1.0), Lengths(6, 0.5), cv=3.0)),
    Part("balanced", 0.15, 2.0, Synthetic(Lengths(60, 0.5), Lengths(10, 0.5))),
    Part("best_effort", 0.25, 2.0, Synthetic(Lengths(60, 0.5), Lengths(30, 0.3))),
)
"""The sections in order: short and long requests, steady and in bursts, with and without latency targets.

The rates suit a small model on a few cores.
"""


def run_mixed(target: Target, seconds: float, seed: int, clients: int = 2) -> dict[str, list[RequestRecord]]:
    """Run all parts one after another, and return the records of their requests by SLO class.

    The due times cover `seconds`; each part then also waits for its last answers.
    """
    records: dict[str, list[RequestRecord]] = {}
    for number, part in enumerate(PARTS):
        workload = _half_shared(part.source.at(part.rate, part.share * seconds, seed + number))
        settings = LoadSettings(clients=clients, slo_class=part.slo_class)
        records.setdefault(part.slo_class, []).extend(run_load(target, workload, (), settings).records)
    return records


def since_sent(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records with the due time replaced by the send time, because a router does not know due times."""
    return [replace(record, due_s=record.sent_s) for record in records]


def _half_shared(workload: Workload) -> Workload:
    arrivals = tuple(
        replace(arrival, prompt=(_SHARED, *arrival.prompt)) if number % 2 else arrival
        for number, arrival in enumerate(workload.arrivals)
    )
    return replace(workload, arrivals=arrivals)
