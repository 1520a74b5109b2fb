"""Sends open-loop load through the router: `python -m benchmarks.load --rates 1,2,4 --seconds 30`.

Several processes send requests when they are due, to a running cluster (`--address`) or to one that is started.
`--trace FILE` replays a trace, otherwise arrivals and lengths are random. `--sweep RATE` raises the rate up to the
knee. The last line is one JSON object; latencies count from a request's due time, in milliseconds.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.load.served_model import ServedModel, add_model_options, choose_model
from benchmarks.load.stage import parse_setting, running_cluster
from benchmarks.load.sweep import at_rates, knees, sweep
from benchmarks.results import run_facts, save_result
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.slo import SloCell, parse_cell, standard_cells
from tandem.cli.load.spread import LEVELS
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.target import Target, find_target, warm_up
from tandem.cli.load.trace import Trace, read_trace
from tandem.cli.load.workload import Source, Workload, parse_rates
from tandem.protocol.errors import InvalidArgument, TandemError

Figures = dict[str, object]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    defaults = LoadSettings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n", 1)[0])
    add_model_options(parser)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--address", default=None, help="host:port of a running router; else a cluster is started")
    cluster.add_argument("--api-key", default="", help="for a running router that asks for one")
    cluster.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    cluster.add_argument("--prefill", type=int, default=1, help="prefill workers")
    cluster.add_argument("--decode", type=int, default=1, help="decode workers")
    cluster.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other field of ClusterSettings; repeatable",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--trace", type=Path, default=None, help="Mooncake's .jsonl or Azure's .csv")
    load.add_argument("--length-scale", type=float, default=1.0, help="of the trace's prompts, blocks and answers")
    load.add_argument("--prompt-tokens", default="512", help="a number, or lognormal:MEAN:SIGMA")
    load.add_argument("--new-tokens", default="128", help="a number, or lognormal:MEAN:SIGMA")
    load.add_argument("--cv", type=float, default=1.0, help="of the gaps between arrivals: 1 = Poisson, above = bursts")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument("--rates", default="1", help="requests a second, one load for each: 1,2,4")
    pace.add_argument("--sweep", type=float, default=None, metavar="RATE", help="from this rate up to the knee")
    pace.add_argument("--speed", type=float, default=None, help="the trace so many times as fast as it was")
    load.add_argument("--seconds", type=float, default=30.0, help="of each load")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and token ids")
    load.add_argument("--clients", type=int, default=defaults.clients, help="client processes")
    load.add_argument(
        "--drain-seconds", type=float, default=defaults.drain_s, help="for answers after the last arrival"
    )
    load.add_argument(
        "--slo", action="append", default=[], metavar="NAME:TTFT_MS:GAP_MS[:PERCENT]", help="another cell; repeatable"
    )
    kept = parser.add_argument_group("results")
    kept.add_argument("--name", default=None, help="of the workload, in results and pictures")
    kept.add_argument("--records", type=Path, default=None, help="write every request of every load there, JSON lines")
    kept.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


def make_source(arguments: argparse.Namespace) -> Source:
    """Returns the trace, or a source of random requests."""
    if arguments.trace is not None:
        return read_trace(arguments.trace).scaled(arguments.length_scale)
    prompt = Lengths.parse("--prompt-tokens", arguments.prompt_tokens)
    return Synthetic(prompt, Lengths.parse("--new-tokens", arguments.new_tokens), arguments.cv)


def known_workloads(source: Source, arguments: argparse.Namespace) -> list[Workload]:
    """Returns the workloads known in advance; a sweep has one. InvalidArgument if one of them is impossible."""
    if not arguments.seconds > 0:
        raise InvalidArgument("--seconds", f"{arguments.seconds:g} is not above 0")
    if arguments.speed is not None:
        if not isinstance(source, Trace):
            raise InvalidArgument("--speed", "is a trace's; give --trace, or --rates")
        return [source.at_speed(arguments.speed, arguments.seconds, arguments.seed)]
    rates = parse_rates(arguments.rates) if arguments.sweep is None else [arguments.sweep]
    return [source.at(rate, arguments.seconds, arguments.seed) for rate in rates]


def run_loads(
    target: Target, source: Source, cells: Sequence[SloCell], arguments: argparse.Namespace
) -> list[LoadReport]:
    """Runs the load at every rate, and prints a line for each."""
    settings = LoadSettings(arguments.clients, arguments.drain_seconds)

    def measure(rate: float, number: int) -> LoadReport:
        workload = source.at(rate, arguments.seconds, arguments.seed)
        return show(run_load(target, replace(workload, seed=arguments.seed + number), cells, settings))

    if arguments.speed is not None:
        return [show(run_load(target, each, cells, settings)) for each in known_workloads(source, arguments)]
    if arguments.sweep is not None:
        return sweep(measure, arguments.sweep)
    return at_rates(measure, parse_rates(arguments.rates))


def show(report: LoadReport) -> LoadReport:
    """Prints a load in one line; returns it."""
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


def as_result(reports: Sequence[LoadReport], cells: Sequence[SloCell], step_s: float) -> Figures:
    """Returns all loads of one run for JSON."""
    return {
        "workload": reports[0].workload.name,
        "valid": all(report.valid for report in reports),
        "unloaded_step_ms": round(step_s * 1e3, 4),
        "cells": {cell.name: cell.as_result() for cell in cells},
        "knee_goodput_per_s": {name: round(rate, 4) for name, rate in knees(reports).items()},
        "curve_levels": list(LEVELS),
        "loads": [report.as_result() for report in reports],
    }


def without_curves(value: object) -> object:
    """Returns the result without curves, for a terminal."""
    if isinstance(value, dict):
        return {name: without_curves(each) for name, each in value.items() if not name.startswith("curve")}
    return [without_curves(each) for each in value] if isinstance(value, list) else value


def _write_records(file: Path, reports: Sequence[LoadReport]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for report in reports:
            for record in report.records:
                out.write(json.dumps({"rate": report.workload.rate} | asdict(record)) + "\n")


def _stage(arguments: argparse.Namespace) -> tuple[AbstractContextManager[str], Figures]:
    """Returns the router's address as a context, and the settings of the cluster that is started for it."""
    if arguments.address is not None:
        return nullcontext(arguments.address), {}
    settings: Figures = {"device": arguments.device, "prefill": arguments.prefill, "decode": arguments.decode}
    settings |= dict(parse_setting(each) for each in arguments.set)
    return _own_cluster(choose_model(arguments.model, arguments.shape), settings), settings


@contextmanager
def _own_cluster(model: ServedModel, settings: Figures) -> Iterator[str]:
    with running_cluster(model, settings) as listeners:
        yield listeners.grpc


def measure(arguments: argparse.Namespace) -> Figures:
    """Runs everything from the start of a cluster to the result."""
    source, asked = make_source(arguments), [parse_cell(each) for each in arguments.slo]
    # Errors of the options are reported before the start, which can take minutes.
    LoadSettings(arguments.clients, arguments.drain_seconds)
    known_workloads(source, arguments)
    if arguments.records is not None and not arguments.records.absolute().parent.is_dir():
        raise InvalidArgument("--records", f"{arguments.records.parent} is no folder; make it first")
    stage, settings = _stage(arguments)
    with stage as address:
        target = find_target(address, arguments.api_key)
        step_s = warm_up(target)
        cells = [*standard_cells(step_s), *asked]
        reports = run_loads(target, source, cells, arguments)
    if arguments.records is not None:
        _write_records(arguments.records, reports)
    result = as_result(reports, cells, step_s) | ({"workload": arguments.name} if arguments.name else {})
    made = {"seed": arguments.seed, "clients": arguments.clients, "settings": {k: str(v) for k, v in settings.items()}}
    return result | made | target.as_result() | run_facts("cuda" if target.on_gpus else "cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the load, and prints it as JSON last."""
    parsed = parse_arguments(arguments)
    try:
        result = measure(parsed)
    except TandemError as error:
        raise SystemExit(error.message) from None
    if parsed.save:
        print("saved", save_result(f"load-{result['model']}-{result['workload']}", result))
    print(json.dumps(without_curves(result)))
