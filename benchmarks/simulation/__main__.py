"""Simulates the strategy table under a virtual clock: `python -m benchmarks.simulation --shape llama-3-8b --workers 2`.

Rows, workloads, rates, cells and reports are those of `benchmarks.strategies`; only devices and networks are modelled.
By default the cost of a step is the roofline's of a `--gpu`, with weights and KV as `--quantization` and
`--kv-cache-dtype` say; `--costs FILE` takes fitted ones. `--against FILE` compares with a measured table: loads at
the same rates, seconds and seed, and knees where both have them; with `--fitted` each row's steps take the cost that
its workers had fitted during that load. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.load import sweep
from benchmarks.load.command import without_curves
from benchmarks.results import run_facts, save_result, scheme_suffix
from benchmarks.simulation.against import as_lines, compare
from benchmarks.simulation.stage import Stage
from benchmarks.strategies.part import Load, goodput_of, joined
from benchmarks.strategies.rows import ADAPTIVE, ALL, NONE, Strategy, asks, chosen, strategies
from benchmarks.strategies.table import as_text, figures, make_rows
from benchmarks.strategies.workloads import Offer, chosen_offers, offers
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.cli.load.slo import SloCell, standard_cells
from tandem.cli.load.workload import Workload, parse_rates
from tandem.cost_model.devices import DEVICES, device_kind
from tandem.cost_model.step_cost import CostParameters
from tandem.engine.config.quantization import Codes
from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.settings.engine import KV_DTYPES
from tandem.settings.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass

Fitted = Mapping[tuple[str, str, float], CostParameters]
"""Step costs by workload, row and rate."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Simulates rows of the table; it can be sent to other processes."""

    stage: Stage
    cells: Sequence[SloCell]
    arguments: argparse.Namespace
    fitted: Fitted = field(default_factory=dict)

    def loads(self, row: Strategy, offer: Offer) -> list[Load]:
        """Returns a row's loads under a workload by rising rate: the given ones, or up to the knee or trace's end."""
        loads: list[Load] = []
        while (rate := self._next_rate(offer, loads)) is not None:
            try:
                loads.append(self._load(row, offer, rate))
            except InvalidArgument:
                if not loads:
                    raise
                break
        return loads

    def _next_rate(self, offer: Offer, loads: Sequence[Load]) -> float | None:
        if self.arguments.rates:
            rates = parse_rates(self.arguments.rates)
            return rates[len(loads)] if len(loads) < len(rates) else None
        return sweep.next_rate(offer.first_rate * self.arguments.workers, [goodput_of(load) for load in loads])

    def _load(self, row: Strategy, offer: Offer, rate: float) -> Load:
        """Runs a load; one for each cell if its requests name classes, as in `benchmarks.strategies`."""
        named = asks(row, self.arguments.ask)
        classes = [slo for slo in DEFAULT_CLASSES if slo.has_targets] if named else [BEST_EFFORT]
        workload = offer.source.at(rate, self.arguments.seconds, self.arguments.seed)
        costs = self.fitted.get((offer.name, row.name, rate))
        stage = self.stage if costs is None else replace(self.stage, machine=self.stage.machine.with_costs(costs))
        return joined({slo.name: self._of_class(stage, row, workload, slo) for slo in classes})

    def _of_class(self, stage: Stage, row: Strategy, workload: Workload, slo: SloClass) -> Load:
        report, cluster = stage.simulate(row.settings, workload, self.cells, slo)
        quality = cluster.router.prediction_quality
        errors = {name: round(getattr(quality, name), 4) for name in ("ttft_error", "itl_error", "surprise_s")}
        busy = {peer.worker_id: round(each.busy_s / workload.seconds, 3) for peer, each in cluster.workers.items()}
        return {**report.as_result(), "prediction_quality": errors, "busy": busy}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="llama-3-8b", help="of the model")
    parser.add_argument("--workers", type=int, default=2, help="of every row")
    parser.add_argument("--only", default="", help="these rows, comma-separated")
    parser.add_argument("--workloads", default="", help="these workloads, comma-separated")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="Mooncake's .jsonl or Azure's .csv")
    parser.add_argument("--rates", default="", help="requests a second for all rows, 1.5,3; default: up to the knees")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for answers after the last arrival")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ask", choices=(ADAPTIVE, ALL, NONE), default=ADAPTIVE, help="rows that name classes")
    parser.add_argument("--costs", type=Path, default=None, help="JSON with the fields of CostParameters")
    parser.add_argument("--misjudged", type=float, default=1.0, help="predicted ÷ true seconds of a step")
    parser.add_argument(
        "--gpu", default="H200", help=f"of the roofline, when there is no --costs: {', '.join(DEVICES)}"
    )
    parser.add_argument("--quantization", choices=list(Codes), help="weights rounded at load, as with `tandem up`")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="as with `tandem up` (auto)")
    parser.add_argument("--kv-gib", type=float, default=100.0, help="KV cache of each worker")
    parser.add_argument("--network", type=Path, default=None, help="JSON with the fields of Network")
    parser.add_argument("--processes", type=int, default=1, help="rows that are simulated at a time")
    parser.add_argument("--against", type=Path, default=None, help="a table of benchmarks.strategies")
    parser.add_argument(
        "--fitted", action="store_true", help="steps take the costs that the workers of that table had fitted"
    )
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parsed = parser.parse_args(arguments)
    if parsed.fitted and parsed.against is None:
        parser.error("--fitted goes by the table of --against")
    return parsed


def fitted_of(measured: Any) -> Fitted:
    """Returns the costs in a table of `benchmarks.strategies`. InvalidArgument for tables before 2026-11-22 13:00."""
    found = {
        (workload, row, load["rate"]): CostParameters(**load["costs"])
        for workload, rows in measured.get("loads", {}).items()
        for row, loads in rows.items()
        for load in loads
        if load.get("costs") is not None
    }
    if not found:
        raise InvalidArgument("--fitted", "that table does not have its workers' fitted costs; measure it again")
    return found


def read_object(file: Path, option: str) -> Any:
    """Reads a JSON object. InvalidArgument names the option."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(option, f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(option, f"{file} is no JSON object")
    return content


def read_network(file: Path) -> Network:
    """Reads a network by the names of its fields."""
    content = read_object(file, "--network")
    known = [each.name for each in fields(Network)]
    if strange := sorted(content.keys() - set(known)):
        raise InvalidArgument("--network", f"{file} has {', '.join(strange)}; known are {', '.join(known)}")
    return Network(**content)


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Returns the device and model that the options describe; InvalidArgument names the option."""
    return hardware(
        arguments.shape,
        arguments.costs,
        arguments.kv_gib,
        arguments.misjudged,
        device=device_kind("--gpu", arguments.gpu).ceilings,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )


def run(arguments: argparse.Namespace, measured_table: Any = None) -> dict[str, object]:
    """Simulates and prints all tables; with `--fitted` by the costs of a measured table."""
    if arguments.processes < 1:
        raise InvalidArgument("--processes", f"{arguments.processes} is less than 1")
    machine = hardware_of(arguments)
    network = Network() if arguments.network is None else read_network(arguments.network)
    rows = chosen(strategies(arguments.workers), arguments.only)
    found = chosen_offers(offers(arguments.trace, 1.0, 1.0), arguments.workloads)
    stage = Stage(machine, network, arguments.drain_seconds)
    costs = fitted_of(measured_table) if arguments.fitted else {}
    # The strict cell is in idle steps of the table that the costs come from.
    step_s = (costs and measured_table.get("unloaded_step_s")) or stage.unloaded_step()
    simulated = Simulated(stage, standard_cells(step_s), arguments, costs)
    tables: dict[str, object] = {}
    loads: dict[str, object] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        running = {offer.name: [pool.submit(simulated.loads, row, offer) for row in rows] for offer in found}
        for name, futures in running.items():
            measured = {row: future.result() for row, future in zip(rows, futures, strict=True)}
            tables[name] = table = figures(make_rows(measured))
            loads[name] = {row.name: each for row, each in measured.items()}
            print(f"\n{name}, latencies at {table['rate']:g} requests/s\n\n{as_text(table)}\n", flush=True)
            print(
                {key: value for key, value in table.items() if key not in {"rate", "rows", "invalid_loads"}}, flush=True
            )
    return {
        "model": machine.name,
        "workers": arguments.workers,
        "complete": True,
        "tables": tables,
        "dtype": "bfloat16",
        "gpu": arguments.gpu if arguments.costs is None else "",
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "kv_tokens": machine.pages * machine.page_tokens,
        "unloaded_step_ms": round(step_s * 1e3, 4),
        "ask": arguments.ask,
        "seconds": arguments.seconds,
        "seed": arguments.seed,
        "costs": asdict(machine.actual_cost),
        "fitted": arguments.fitted,
        "misjudged": arguments.misjudged,
        "network": asdict(network),
        "loads": loads,
        **run_facts("cpu"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates, prints and compares; JSON last. The result is saved and printed even if nothing is comparable."""
    parsed = parse_arguments(arguments)
    incomparable = ""
    try:
        measured = None if parsed.against is None else read_object(parsed.against, "--against")
        result = run(parsed, measured)
    except TandemError as error:
        raise SystemExit(error.message) from None
    if parsed.against is not None:
        try:
            compared = compare(result, measured)
            result["against"] = {"file": parsed.against.name, "figures": compared}
            print("\n".join(as_lines(compared)))
        except InvalidArgument as error:
            incomparable = error.message
    if parsed.save:
        scheme = scheme_suffix(parsed.quantization, parsed.kv_cache_dtype)
        name = f"simulation-{parsed.shape}{scheme}-{parsed.workers}-workers-{parsed.ask}"
        print("saved", save_result(name, without_curves(result)))  # type: ignore[arg-type]
    print(json.dumps(without_curves({key: value for key, value in result.items() if key != "loads"})))
    if incomparable:
        raise SystemExit(incomparable)


if __name__ == "__main__":
    main()
