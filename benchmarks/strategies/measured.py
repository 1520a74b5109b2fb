"""Measures the loads of the strategy table on one cluster, which is switched from row to row without restarts."""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from benchmarks.cluster import ServedModel, parse_setting, running_cluster
from benchmarks.results import run_facts
from benchmarks.strategies.parts import Load, Part, damaged, joined, read_kept
from benchmarks.strategies.rows import Strategy, asks, chosen, strategies
from benchmarks.strategies.switch import BY_SWITCH, Switch, settings_for_all, steps_of
from benchmarks.strategies.workloads import Offer, chosen_offers, offers
from benchmarks.sweep import STEPS_MAX
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.slo import SloCell, standard_cells
from tandem.cli.load.spread import LEVELS
from tandem.cli.load.target import Target, find_target, warm_up
from tandem.cli.load.workload import Workload, parse_rates
from tandem.cli.observe.top import scrape
from tandem.cluster.launcher import Endpoints
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.errors import InvalidArgument

_PARTS_BITS = 16
"""Bits of a load's number in its token seed; enough for rows × loads × classes."""
_CLASSES_MAX = 4
CELLS = len(standard_cells(1.0))
"""The number of SLO cells of the table."""
_SPARE_S = 5.0
"""Seconds before the end of the allowed time in which no new load begins."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load to measure: a row under a workload at a rate in requests per second; its result goes to `part`."""

    row: Strategy
    offer: Offer
    rate: float
    part: Part


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The running cluster's listeners, load target and SLO cells."""

    listeners: Endpoints
    target: Target
    cells: Sequence[SloCell]


class Run:
    """One invocation of the command, which measures missing loads for `--minutes`."""

    def __init__(self, arguments: argparse.Namespace, model: ServedModel) -> None:
        self._arguments = arguments
        self._model = model
        self._ends_at: float = time.monotonic() + 60 * arguments.minutes
        self._step_file = arguments.parts / "unloaded_step.json"
        self._every = strategies(arguments.workers)
        self._rates = parse_rates(arguments.rates) if arguments.rates else []
        extra = dict(parse_setting(setting) for setting in arguments.set)
        self._settings = settings_for_all(extra, arguments.device, arguments.workers)
        self.rows = chosen(self._every, arguments.only)
        every_offer = offers(arguments.trace, arguments.length_scale, arguments.slowdown)
        self.offers = chosen_offers(every_offer, arguments.workloads)

    def part(self, row: Strategy, offer: Offer) -> Part:
        """Return the file of a row and a workload."""
        return Part(row.name, offer.name, self._arguments.parts / f"{offer.name}--{row.name}.json")

    def missing(self) -> Iterator[Turn]:
        """Yield the missing loads of each workload, all rows at one rate before the next rate."""
        for number in range(len(self._rates) or STEPS_MAX):
            for offer in self.offers:
                for row in self.rows:
                    part = self.part(row, offer)
                    rate = self._rate(offer, part, number)
                    if rate is not None:
                        yield Turn(row, offer, rate, part)

    def _rate(self, offer: Offer, part: Part, number: int) -> float | None:
        """Return the rate of load `number` of a part; None = it was measured already, or there is no such load."""
        if self._rates:
            rate = self._rates[number]
            return None if any(load["rate"] == rate for load in part.loads()) else rate
        if len(part.loads()) != number:
            return None
        next_rate = part.next_rate(offer.first_rate * self._arguments.workers)
        return next_rate if next_rate is None or not number or self._goes_to(offer, next_rate) else None

    def _goes_to(self, offer: Offer, rate: float) -> bool:
        """Return False if the trace is too short for this rate, which ends the sweep."""
        try:
            self._workload(offer, rate)
        except InvalidArgument:
            return False
        return True

    def _load_settings(self, slo_class: str = "") -> LoadSettings:
        return LoadSettings(self._arguments.clients, self._arguments.drain_seconds, slo_class=slo_class)

    def _workload(self, offer: Offer, rate: float) -> Workload:
        return offer.source.at(rate, self._arguments.seconds, self._arguments.seed)

    def measure(self) -> bool:
        """Measure missing loads, and return True if none is missing afterwards."""
        known = list(self.missing())
        if not known:
            return True
        # Report errors of the options before the start, which can take minutes.
        self._load_settings()
        _ = self.unloaded_step_s
        for turn in known:
            self._workload(turn.offer, turn.rate)
        if not self._time_for_a_load(known[0].row):
            return False
        with running_cluster(self._model, self._settings) as listeners:
            target = find_target(listeners.grpc)
            switch = Switch(listeners, target, self._arguments.drain_seconds)
            step_s = self._unloaded_step(target)
            for turn in self.missing():
                if not self._time_for_a_load(turn.row):
                    return False
                switch_s = switch.to(turn.row)
                load = self._load(turn, RunningCluster(listeners, target, standard_cells(step_s)))
                self._keep(turn, target, load | {"switch_s": round(switch_s, 3)})
        return True

    def _load(self, turn: Turn, at: RunningCluster) -> Load:
        named = [cell.name for cell in at.cells] if asks(turn.row, self._arguments.ask) else []
        classes = named or [turn.row.slo.name if turn.row.slo.has_targets else ""]
        return joined({name: self._load_of_class(turn, at, place, name) for place, name in enumerate(classes)})

    def _keep(self, turn: Turn, target: Target, load: Load) -> None:
        facts = run_facts("cuda" if target.on_gpus else "cpu") | {"reached_by": BY_SWITCH}
        turn.part.add(load, {"curve_levels": list(LEVELS), **target.as_result(), **facts})

    def _load_of_class(self, turn: Turn, at: RunningCluster, place: int, slo_class: str) -> Load:
        """Run the load of the class with number `place`."""
        workload = self._workload(turn.offer, turn.rate)
        settings = self._load_settings(slo_class)
        print(f"{turn.offer.name:>14} {turn.row.name:>18} {slo_class:>8} ", end="")
        fresh = replace(workload, seed=self._token_seed(turn, len(turn.part.loads()), place))
        before = scraped(at.listeners)
        load = show(run_load(at.target, fresh, at.cells, settings)).as_result()
        return load | {"steps": steps_of(ScrapeInterval(before, scraped(at.listeners)))}

    def _token_seed(self, turn: Turn, number: int, place: int) -> int:
        """Return the token seed of load `number` of a part, for the class with number `place`.

        All parts share one cluster, so each needs its own tokens to avoid prefix cache hits. Arrivals and lengths are
        the same for all rows.
        """
        seed: int = self._arguments.seed
        of_workload = crc32(turn.offer.name.encode()) << _PARTS_BITS
        of_load = number * len(self._every) + self._every.index(turn.row)
        return seed + of_workload + of_load * _CLASSES_MAX + place

    @property
    def unloaded_step_s(self) -> float | None:
        """The idle cluster's decode step in seconds, which defines the strict cell.

        None = it was not measured yet. Raises InvalidArgument if the file is damaged.
        """
        if not self._step_file.exists():
            return None
        step_s = read_kept(self._step_file)
        if not isinstance(step_s, float):
            raise damaged(self._step_file)
        return step_s

    def _unloaded_step(self, target: Target) -> float:
        """Return the idle cluster's decode step in seconds, measured by the first start of the command only.

        The strict cell must be the same for every row.
        """
        if (known := self.unloaded_step_s) is not None:
            return known
        step_s = warm_up(target)
        self._step_file.write_text(json.dumps(step_s), encoding="utf-8")
        return step_s

    def _time_for_a_load(self, row: Strategy) -> bool:
        loads = CELLS if asks(row, self._arguments.ask) else 1
        ends_at: float = time.monotonic() + loads * self._arguments.seconds + _SPARE_S
        return ends_at < self._ends_at


def scraped(listeners: Endpoints) -> Scrape:
    """Scrape the cluster's present metrics."""
    return asyncio.run(scrape(listeners.metrics, listeners.metrics_key))


def show(report: LoadReport) -> LoadReport:
    """Print a load in one line, and return it."""
    shares = ", ".join(f"{score.cell.name} {score.share:.0%}" for score in report.scores)
    errors = "".join(f", {count} {code}" for code, count in report.errors.items())
    print(
        f"{report.workload.rate:8.2f}/s: TTFT {report.ttft.p50 * 1e3:.0f}/{report.ttft.p99 * 1e3:.0f} ms,"
        f" gaps {report.gaps.p50 * 1e3:.1f}/{report.gaps.p99 * 1e3:.1f} ms (P50/P99),"
        f" {report.tokens_per_s:.0f} tokens/s,"
        f" met: {shares}{errors}{'' if report.valid else ' INVALID: the clients were late'}",
        flush=True,
    )
    return report
