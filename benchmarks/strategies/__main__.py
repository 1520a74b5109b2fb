"""Compares colocated, chunked, disaggregated and adaptive serving on the same GPUs under the same arrivals.

    python -m benchmarks.strategies --device cuda --shape llama-3-8b --workers 2
    python -m benchmarks.strategies --simulated --shape llama-3-8b --workers 2

Without `--simulated`, one cluster is started and switched from row to row without restarts. Each workload is a sweep of
rates up to the knee, or `--rates`; all rows are measured at one rate before any is measured at the next. Every load is
saved in `--parts` as soon as it is measured: a run that ends after `--minutes` continues when it is started again.

With `--simulated` the same table is made under a virtual clock: rows, workloads, rates, cells and reports are the same,
and only devices and networks are modelled. The cost of a step is that of the roofline of a `--gpu`, or that of `--costs
FILE`. `tandem plan --check FILE` compares a measured table with simulated knees.

The best placement depends on the SLO class, so the adaptive row has one load per cell, whose requests name the cell's
class. The other rows would behave the same for any class. The last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import add_model_options, choose_model
from benchmarks.command_line import at_least, exit_on_error, misplaced_options
from benchmarks.results import Run as Result
from benchmarks.results import run_facts, save_result, scheme_suffix
from benchmarks.strategies import simulated
from benchmarks.strategies.measured import Run
from benchmarks.strategies.parts import claim
from benchmarks.strategies.rows import ADAPTIVE, ALL, NONE
from benchmarks.strategies.table import as_text, common_load, figures, make_rows
from tandem.cli.load.run import LoadSettings
from tandem.cost_model.devices import DEVICES
from tandem.engine.config.quantization import AT_LOAD
from tandem.settings.engine import KV_DTYPES

_OF_ALL_LOADS = ("device", "workers", "set", "seconds", "drain_seconds", "seed", "length_scale", "slowdown", "ask")
"""Options that must be the same for all loads of one table."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Options of the other kind of table (measured or simulated) are errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=(__doc__ or "").split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--workers", type=int, default=2, help="of the cluster, one on each GPU")
    parser.add_argument("--only", default="", help="these rows, comma-separated")
    parser.add_argument("--workloads", default="", help="these workloads, comma-separated")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Mooncake's .jsonl or Azure's .csv")
    parser.add_argument("--rates", default="", help="requests a second for all rows, 1.5,3; default: up to the knees")
    parser.add_argument("--ask", choices=(ADAPTIVE, ALL, NONE), default=ADAPTIVE, help="rows with a load a class")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for answers after the last arrival")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    measured = parser.add_argument_group("measured")
    measured.add_argument("--device", default="cpu", help="cpu or cuda")
    measured.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ClusterSettings")
    measured.add_argument("--length-scale", type=float, default=1.0, help="of all prompts and answers")
    measured.add_argument("--slowdown", type=float, default=1.0, help="the first rates divided by this")
    measured.add_argument("--minutes", type=float, default=8.0, help="after which no load begins")
    measured.add_argument("--clients", type=int, default=LoadSettings().clients, help="client processes")
    measured.add_argument("--parts", type=Path, default=Path("strategy-parts"), help="folder of what was measured")
    measured.add_argument("--pictures", type=Path, default=None, help="folder for a picture of each workload")
    virtual = parser.add_argument_group("--simulated")
    virtual.add_argument("--simulated", action="store_true", help="under a virtual clock, with modelled devices")
    virtual.add_argument("--costs", type=Path, default=None, help="JSON with the fields of CostParameters")
    virtual.add_argument("--misjudged", type=float, default=1.0, help="predicted ÷ true seconds of a step")
    virtual.add_argument("--gpu", default="H200", help=f"of the roofline without --costs: {', '.join(DEVICES)}")
    virtual.add_argument("--quantization", choices=AT_LOAD, help="weights rounded at load, as with `tandem up`")
    virtual.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="as with `tandem up` (auto)")
    virtual.add_argument("--tensor-parallel-size", type=at_least(1), default=1, help="GPUs of each worker")
    virtual.add_argument("--kv-gib", type=float, default=100.0, help="KV cache of each GPU")
    virtual.add_argument("--network", type=Path, default=None, help="JSON with the fields of Network")
    virtual.add_argument("--processes", type=int, default=1, help="rows that are simulated at a time")
    parsed = parser.parse_args(arguments)
    misplaced_options(parser, parsed, measured if parsed.simulated else virtual, "--simulated", parsed.simulated)
    return parsed


def summary(run: Run, arguments: argparse.Namespace) -> dict[str, object]:
    """Print the tables of all workloads, and return them together with their loads."""
    tables: dict[str, object] = {}
    loads: dict[str, object] = {}
    dtype: object = None
    for offer in run.offers:
        measured = {row: run.part(row, offer).loads() for row in run.rows}
        rows = make_rows(measured)
        if rows and common_load(rows) is None:
            print(f"\n{offer.name}: no rate was measured in every row yet; start again for what is missing")
        elif rows:
            loads[offer.name] = {
                row.name: without_curves(row_loads) for row, row_loads in measured.items() if row_loads
            }
            tables[offer.name] = table = figures(rows)
            dtype = run.part(rows[0].strategy, offer).fact("dtype")
            print(f"\n{offer.name}, latencies at {table['rate']:g} requests/s\n\n{as_text(table)}\n")
    result = {"tables": tables, "loads": loads, "dtype": dtype}
    if arguments.pictures is not None:
        _draw(result, arguments.pictures)
    return result


def without_curves(value: object) -> object:
    """Return a result without the curves of its distributions, which are needed for pictures only."""
    if isinstance(value, dict):
        return {name: without_curves(item) for name, item in value.items() if not name.startswith("curve")}
    return [without_curves(item) for item in value] if isinstance(value, list) else value


def _draw(result: Mapping[str, object], folder: Path) -> None:
    from benchmarks.strategies.pictures import draw_table, make_table

    draw_table(make_table("strategies", result), folder, "svg")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the table and print it, as JSON last. The exit status is 3 if loads are missing."""
    parsed = parse_arguments(arguments)
    if parsed.simulated:
        _simulated(parsed)
    else:
        _measured(parsed)


def _measured(parsed: argparse.Namespace) -> None:
    with exit_on_error():
        model = choose_model(parsed.model, parsed.shape)
        run = Run(parsed, model)
        claim(parsed.parts, {"model": model.name} | {name: getattr(parsed, name) for name in _OF_ALL_LOADS})
        complete = run.measure()
        tables_and_loads = summary(run, parsed)
    options = {
        name: str(getattr(parsed, name)) for name in ("seconds", "seed", "length_scale", "slowdown", "set", "ask")
    }
    result: Result = {
        "model": model.name,
        "workers": parsed.workers,
        "complete": complete,
        "unloaded_step_s": run.unloaded_step_s,
        **tables_and_loads,
        **options,
        **run_facts("cpu" if parsed.device == "cpu" else "cuda"),
    }
    if parsed.save and tables_and_loads["tables"]:
        print("saved", save_result(f"strategies-{model.name}", result))
    print(json.dumps({name: value for name, value in result.items() if name != "loads"}))
    if not complete:
        sys.exit(3)


def _simulated(parsed: argparse.Namespace) -> None:
    with exit_on_error():
        result = simulated.run(parsed)
    kept = {name: without_curves(value) for name, value in result.items()}
    if parsed.save:
        scheme = scheme_suffix(parsed.quantization, parsed.kv_cache_dtype)
        name = f"simulation-{result['model']}{scheme}-{parsed.workers}-workers-{parsed.ask}"
        print("saved", save_result(name, kept))
    print(json.dumps({name: value for name, value in kept.items() if name != "loads"}))


if __name__ == "__main__":
    main()
