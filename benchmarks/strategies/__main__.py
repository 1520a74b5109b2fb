"""Compares colocated, chunked, disaggregated and adaptive serving on the same GPUs under the same arrivals.

Run `python -m benchmarks.strategies --device cuda --shape llama-3-8b --workers 2`.

One cluster is started and switched from row to row without restarts. Each workload is a sweep of rates up to the knee,
or `--rates`; every row is measured at a rate before any at the next. Every load is saved in `--parts` as soon as it is
measured: a run that ends after `--minutes` continues when it is started again. At the end the command prints the table,
draws a picture for each workload, and prints one JSON object as the last line.

The best placement depends on the class, so the adaptive row has a load for each cell, whose requests name the cell's
class. The other rows would do the same for any class.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from zlib import crc32

from benchmarks.load.command import show, without_curves
from benchmarks.load.served_model import ServedModel, add_model_options, choose_model
from benchmarks.load.stage import parse_setting, running_cluster
from benchmarks.load.sweep import STEPS_MAX
from benchmarks.results import run_facts, save_result
from benchmarks.strategies.folder import claim, damaged, read_kept
from benchmarks.strategies.part import Load, Part, joined
from benchmarks.strategies.rows import ADAPTIVE, ALL, NONE, Strategy, asks, chosen, strategies
from benchmarks.strategies.steps import steps_of
from benchmarks.strategies.switch import BY_SWITCH, Switch, settings_for_all
from benchmarks.strategies.table import as_text, common_load, figures, make_rows
from benchmarks.strategies.workloads import Offer, chosen_offers, offers
from tandem.capacity.planner.reading import fitted
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.slo import SloCell, standard_cells
from tandem.cli.load.spread import LEVELS
from tandem.cli.load.target import Target, find_target, warm_up
from tandem.cli.load.workload import Workload, parse_rates
from tandem.cli.observe.top import scrape
from tandem.cluster.launcher import Endpoints
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.errors import InvalidArgument, TandemError

_PARTS_BITS = 16
"""Bits for the number of a load: more than rows times loads times classes."""
_CLASSES_MAX = 4
CELLS = len(standard_cells(1.0))
"""The number of the table's cells."""
_OF_ALL_LOADS = ("device", "workers", "set", "seconds", "drain_seconds", "seed", "length_scale", "slowdown", "ask")
"""Options that all loads of one table must share."""
_SPARE_S = 5.0
"""Seconds before the end of the time in which no load begins."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load: a workload at a rate in requests per second in a row; saved in `part`."""

    row: Strategy
    offer: Offer
    rate: float
    part: Part


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running cluster's listeners, target and cells."""

    listeners: Endpoints
    target: Target
    cells: Sequence[SloCell]


class Run:
    """One start of the command: measures missing loads until the time is over."""

    def __init__(self, arguments: argparse.Namespace, model: ServedModel) -> None:
        self._arguments = arguments
        self._model = model
        self._ends_at: float = time.monotonic() + 60 * arguments.minutes
        self._step_file = arguments.parts / "unloaded_step.json"
        self._every = strategies(arguments.workers)
        self._rates = parse_rates(arguments.rates) if arguments.rates else []
        extra = dict(parse_setting(each) for each in arguments.set)
        self._settings = settings_for_all(extra, arguments.device, arguments.workers)
        self.rows = chosen(self._every, arguments.only)
        every_offer = offers(arguments.trace, arguments.length_scale, arguments.slowdown)
        self.offers = chosen_offers(every_offer, arguments.workloads)

    def part(self, row: Strategy, offer: Offer) -> Part:
        """Returns the file of a row and workload."""
        return Part(row.name, offer.name, self._arguments.parts / f"{offer.name}--{row.name}.json")

    def missing(self) -> Iterator[Turn]:
        """Yields the missing loads: each workload at a rate in every row before the next rate."""
        for number in range(len(self._rates) or STEPS_MAX):
            for offer in self.offers:
                for row in self.rows:
                    part = self.part(row, offer)
                    rate = self._rate(offer, part, number)
                    if rate is not None:
                        yield Turn(row, offer, rate, part)

    def _rate(self, offer: Offer, part: Part, number: int) -> float | None:
        """Returns rate number `number` of a part; None if it was measured or does not exist."""
        if self._rates:
            rate = self._rates[number]
            return None if any(load["rate"] == rate for load in part.loads()) else rate
        if len(part.loads()) != number:
            return None
        next_rate = part.next_rate(offer.first_rate * self._arguments.workers)
        return next_rate if next_rate is None or not number or self._goes_to(offer, next_rate) else None

    def _goes_to(self, offer: Offer, rate: float) -> bool:
        """Returns False if the trace is too short for this rate, which ends the sweep."""
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
        """Measures missing loads; returns True if none is missing any more."""
        known = list(self.missing())
        if not known:
            return True
        # Errors of the options are reported before the start, which can take minutes.
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
                found = self._load(turn, Cluster(listeners, target, standard_cells(step_s)))
                self._keep(turn, target, found | {"switch_s": round(switch_s, 3), "costs": fitted_costs(listeners)})
        return True

    def _load(self, turn: Turn, at: Cluster) -> Load:
        classes = [cell.name for cell in at.cells] if asks(turn.row, self._arguments.ask) else [""]
        return joined({name: self._load_of_class(turn, at, place, name) for place, name in enumerate(classes)})

    def _keep(self, turn: Turn, target: Target, load: Load) -> None:
        facts = run_facts("cuda" if target.on_gpus else "cpu") | {"reached_by": BY_SWITCH}
        turn.part.add(load, {"curve_levels": list(LEVELS), **target.as_result(), **facts})

    def _load_of_class(self, turn: Turn, at: Cluster, place: int, slo_class: str) -> Load:
        """Runs the load of class number `place`."""
        workload = self._workload(turn.offer, turn.rate)
        settings = self._load_settings(slo_class)
        print(f"{turn.offer.name:>14} {turn.row.name:>18} {slo_class:>8} ", end="")
        fresh = replace(workload, seed=self._token_seed(turn, len(turn.part.loads()), place))
        before = scraped(at.listeners)
        load = show(run_load(at.target, fresh, at.cells, settings)).as_result()
        return load | {"steps": steps_of(ScrapeInterval(before, scraped(at.listeners)))}

    def _token_seed(self, turn: Turn, number: int, place: int) -> int:
        """Returns the token seed of load `number` of a part, class number `place`.

        All parts share one cluster, so each needs its own tokens to avoid prefix cache hits. Arrivals and lengths are
        the same for all rows.
        """
        seed: int = self._arguments.seed
        of_workload = crc32(turn.offer.name.encode()) << _PARTS_BITS
        of_load = number * len(self._every) + self._every.index(turn.row)
        return seed + of_workload + of_load * _CLASSES_MAX + place

    @property
    def unloaded_step_s(self) -> float | None:
        """The step that defines the strict cell; None before the first start.

        InvalidArgument if the file is damaged.
        """
        if not self._step_file.exists():
            return None
        step_s = read_kept(self._step_file)
        if not isinstance(step_s, float):
            raise damaged(self._step_file)
        return step_s

    def _unloaded_step(self, target: Target) -> float:
        """Returns the step in seconds, measured once for all starts: the strict cell is the same for every row."""
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
    """Returns the cluster's present metrics."""
    return asyncio.run(scrape(listeners.metrics, listeners.metrics_key))


def fitted_costs(listeners: Endpoints) -> dict[str, float] | None:
    """Returns the cost parameters that workers have fitted, by name, for `benchmarks.simulation --fitted`.

    None if prompts or answers were not measured.
    """
    found = fitted(scraped(listeners))
    return None if found is None else asdict(found)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=(__doc__ or "").split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=2, help="of the cluster, one on each GPU")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ClusterSettings")
    parser.add_argument("--only", default="", help="these rows, comma-separated")
    parser.add_argument("--workloads", default="", help="these workloads, comma-separated")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Mooncake's .jsonl or Azure's .csv")
    parser.add_argument("--length-scale", type=float, default=1.0, help="of all prompts and answers")
    parser.add_argument("--rates", default="", help="requests a second for all rows, 1.5,3; default: up to the knees")
    parser.add_argument("--slowdown", type=float, default=1.0, help="the first rates divided by this")
    parser.add_argument(
        "--ask",
        choices=(ADAPTIVE, ALL, NONE),
        default=ADAPTIVE,
        help="rows that have a load for each cell, whose requests name its class",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for answers after the last arrival")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no load begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=LoadSettings().clients, help="client processes")
    parser.add_argument("--parts", type=Path, default=Path("strategy-parts"), help="folder of what was measured")
    parser.add_argument("--pictures", type=Path, default=None, help="folder for a picture of each workload")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    return parser.parse_args(arguments)


def summary(run: Run, arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the tables of all workloads and their loads; prints the tables."""
    tables: dict[str, object] = {}
    loads: dict[str, object] = {}
    dtype: object = None
    for offer in run.offers:
        measured = {row: run.part(row, offer).loads() for row in run.rows}
        rows = make_rows(measured)
        if rows and common_load(rows) is None:
            print(f"\n{offer.name}: no rate was measured in every row yet; start again for what is missing")
        elif rows:
            loads[offer.name] = {row.name: without_curves(each) for row, each in measured.items() if each}
            tables[offer.name] = found = figures(rows)
            dtype = run.part(rows[0].strategy, offer).fact("dtype")
            print(f"\n{offer.name}, latencies at {found['rate']:g} requests/s\n\n{as_text(found)}\n")
    result = {"tables": tables, "loads": loads, "dtype": dtype}
    if arguments.pictures is not None:
        _draw(result, arguments.pictures)
    return result


def _draw(found: Mapping[str, object], folder: Path) -> None:
    from benchmarks.pictures import draw_table, make_table

    draw_table(make_table("strategies", found), folder, "svg")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the tables; JSON last. The exit status is 3 if loads are missing."""
    parsed = parse_arguments(arguments)
    try:
        model = choose_model(parsed.model, parsed.shape)
        run = Run(parsed, model)
        claim(parsed.parts, {"model": model.name} | {name: getattr(parsed, name) for name in _OF_ALL_LOADS})
        complete = run.measure()
        found = summary(run, parsed)
    except TandemError as error:
        raise SystemExit(error.message) from None
    facts = run_facts("cpu" if parsed.device == "cpu" else "cuda")
    options = {
        name: str(getattr(parsed, name)) for name in ("seconds", "seed", "length_scale", "slowdown", "set", "ask")
    }
    result = {
        "model": model.name,
        "workers": parsed.workers,
        "complete": complete,
        "unloaded_step_s": run.unloaded_step_s,
        **found,
        **options,
        **facts,
    }
    if parsed.save and found["tables"]:
        print("saved", save_result(f"strategies-{model.name}", result))
    print(json.dumps({name: value for name, value in result.items() if name != "loads"}))
    if not complete:
        sys.exit(3)


if __name__ == "__main__":
    main()
