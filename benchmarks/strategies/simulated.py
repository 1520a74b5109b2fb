"""Simulates the rows of the strategy table under a virtual clock."""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import sweep
from benchmarks.results import run_facts
from benchmarks.strategies.parts import Load, goodput_of, joined
from benchmarks.strategies.rows import Strategy, asks, chosen, strategies
from benchmarks.strategies.stage import Stage
from benchmarks.strategies.table import as_text, figures, make_rows
from benchmarks.strategies.workloads import Offer, chosen_offers, offers
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.cli.load.slo import SloCell, standard_cells
from tandem.cli.load.workload import Workload, parse_rates
from tandem.cost_model.devices import device_kind
from tandem.protocol.errors import InvalidArgument
from tandem.settings.slo import DEFAULT_CLASSES, SloClass

_SHAPE = "llama-3-8b"
"""The shape that is simulated by default."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Simulates rows of the table; the object is pickled to run in other processes."""

    stage: Stage
    cells: Sequence[SloCell]
    arguments: argparse.Namespace

    def loads(self, row: Strategy, offer: Offer) -> list[Load]:
        """Return a row's loads under a workload by ascending rate.

        The loads have the given rates, or go up to the knee or the trace's end.
        """
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
        """Simulate a load, or one load per cell if its requests name classes, as in `benchmarks.strategies`."""
        named = asks(row, self.arguments.ask)
        classes = [slo for slo in DEFAULT_CLASSES if slo.has_targets] if named else [row.slo]
        workload = offer.source.at(rate, self.arguments.seconds, self.arguments.seed)
        return joined({slo.name: self._of_class(row, workload, slo) for slo in classes})

    def _of_class(self, row: Strategy, workload: Workload, slo: SloClass) -> Load:
        report, cluster = self.stage.simulate(row.settings, workload, self.cells, slo)
        quality = cluster.router.prediction_quality
        errors = {name: round(getattr(quality, name), 4) for name in ("ttft_error", "itl_error", "prediction_error_s")}
        busy = {peer.worker_id: round(worker.busy_s / workload.seconds, 3) for peer, worker in cluster.workers.items()}
        return {**report.as_result(), "prediction_quality": errors, "busy": busy}


def read_object(file: Path, option: str) -> Any:
    """Read a JSON object. Raises InvalidArgument, which names the option."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(option, f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(option, f"{file} is no JSON object")
    return content


def read_network(file: Path) -> Network:
    """Read a network from a JSON object with the names of its fields."""
    content = read_object(file, "--network")
    known = [field.name for field in fields(Network)]
    if strange := sorted(content.keys() - set(known)):
        raise InvalidArgument("--network", f"{file} has {', '.join(strange)}; known are {', '.join(known)}")
    return Network(**content)


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Return the device and model that the options describe. Raises InvalidArgument, which names the option."""
    return hardware(
        arguments.shape or _SHAPE,
        arguments.costs,
        arguments.kv_gib,
        arguments.misjudged,
        device=device_kind("--gpu", arguments.gpu).ceilings,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        ranks=arguments.tensor_parallel_size,
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Simulate and print all tables."""
    if arguments.processes < 1:
        raise InvalidArgument("--processes", f"{arguments.processes} is less than 1")
    machine = hardware_of(arguments)
    network = Network() if arguments.network is None else read_network(arguments.network)
    rows = chosen(strategies(arguments.workers), arguments.only)
    selected_offers = chosen_offers(offers(arguments.trace, 1.0, 1.0), arguments.workloads)
    stage = Stage(machine, network, arguments.drain_seconds)
    step_s = stage.unloaded_step()
    simulated = Simulated(stage, standard_cells(step_s), arguments)
    tables: dict[str, object] = {}
    loads: dict[str, object] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        running = {offer.name: [pool.submit(simulated.loads, row, offer) for row in rows] for offer in selected_offers}
        for name, futures in running.items():
            measured = {row: future.result() for row, future in zip(rows, futures, strict=True)}
            tables[name] = table = figures(make_rows(measured))
            loads[name] = {row.name: row_loads for row, row_loads in measured.items()}
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
        "misjudged": arguments.misjudged,
        "network": asdict(network),
        "loads": loads,
        **run_facts("cpu"),
    }
