"""Compares what `tandem plan` predicts with kept measurements: `python -m benchmarks.planning [--save]`, on a CPU.

The knees of the newest strategy tables of each workload and number of GPUs, the price of a million tokens at these
knees, and the speedup by draft tokens with its break-even point. Loads are simulated, which takes minutes. What is
farther off than `NEAR` is listed under `missed`.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command_line import Measured, run_case
from benchmarks.results import RESULTS, Run, newest_result, read_results, run_facts
from tandem.capacity.plan.measured_knees import MIXES, NEAR, check, is_near
from tandem.capacity.plan.speculation import Drafting
from tandem.capacity.plan.worker_kind import WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.cost_model.devices import DEVICES
from tandem.cost_model.step_cost import StepCost
from tandem.engine.models.shapes import shape_config

_ROWS = {"shared", "adaptive"}
"""Rows that a strategy table must have to be compared."""
_HOUR_S = 3600.0
_GPU_NAMES = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100"}
"""Names of `DEVICES` by the names that drivers report."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the kept runs")
    parser.add_argument("--workload", choices=MIXES, action="append", help="only knees of these workloads")


def measure(options: argparse.Namespace) -> Measured:
    """Compare everything, and print what is farther off than `NEAR`."""
    knees = [row for file in tables(options.results, options.workload or MIXES) for row in knee_rows(file)]
    name, run = newest_result(options.results, "speculation-speed-llama-3-8b", "rows")
    rows = [*knees, *speedup_rows(run), break_even_row(run)]
    missed = [row for row in rows if not row["near"]]
    for row in missed:
        print(f"off by more than {NEAR:.0%}: {row}", flush=True)
    runs = sorted({*(row["run"] for row in knees), name})
    return "planning-llama-3-8b", {
        "near": NEAR, "rows": rows, "missed": len(missed), "runs": runs, "dtype": "bfloat16", **run_facts("cpu")
    }  # fmt: skip


def tables(folder: Path, workloads: Mapping[str, object] | list[str]) -> list[Path]:
    """Return the newest strategy table of each workload and number of GPUs."""
    newest: dict[tuple[str, int], str] = {}
    for name, run in read_results(folder, "strategies-llama-3-8b"):
        for workload, table in run["tables"].items():
            if workload in workloads and table["rows"].keys() >= _ROWS:
                newest[workload, int(run["workers"])] = name
    return [folder / name for name in dict.fromkeys(newest.values())]


def knee_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield each knee of a strategy table in requests/s, and the price of a million tokens at it.

    Prices are for GPUs at $1 an hour, and count tokens of prompts and answers.
    """
    _, run = newest_result(file.parent, file.stem)
    kind = worker_kind(run)
    for knee in check(file, kind.hardware(Demand(1.0, 2000.0, 500.0))):
        mix, gpus = MIXES[knee.workload], int(run["workers"])
        tokens = (mix.prompt_tokens + mix.answer_tokens) / gpus
        yield {
            "kind": "knee",
            "run": file.name,
            "what": f"{knee.workload}, {gpus} GPUs, {knee.row}, {knee.cell}",
            "measured": [knee.kept, knee.lost],
            "predicted": round(knee.predicted, 3),
            "near": knee.near,
            "price_measured": [_price(tokens, knee.lost), _price(tokens, knee.kept)],
            "price_predicted": _price(tokens, knee.predicted),
        }


def _price(tokens: float, rate: float | None) -> float | None:
    """Return the price of a million tokens at a rate of requests with `tokens` on each GPU; None without a rate."""
    return round(1e6 / _HOUR_S / (rate * tokens), 4) if rate else None


def speedup_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the speedup of decoding by each number of drafts.

    Drafts were accepted by chance, so the prediction has the number of accepted ones of the run itself.
    """
    cost, context = StepCost(worker_kind(run).costs), int(run["context"])
    for row in run["rows"]:
        for drafts, cell in row["fixed"].items():
            drafting = Drafting(float(row["alpha"]), int(drafts), 0.0)
            chance = float(cell["tokens_a_step"]) / drafting.tokens
            predicted = drafting.speedup(cost, int(row["batch"]), context) * chance
            yield {
                "kind": "speedup",
                "what": f"batch {row['batch']}, {drafts} drafts, {row['alpha']} accepted",
                "measured": cell["over_off"],
                "predicted": round(predicted, 3),
                "near": is_near(predicted, cell["over_off"], cell["over_off"]),
            }


def break_even_row(run: Run) -> dict[str, Any]:
    """Return the smallest number of requests for which drafts do not pay, as measured and as predicted."""
    cost, context = StepCost(worker_kind(run).costs), int(run["context"])
    acceptance = float(run["rows"][0]["alpha"])
    rows = [row for row in run["rows"] if row["alpha"] == acceptance]
    best = {int(row["batch"]): max(float(cell["over_off"]) for cell in row["fixed"].values()) for row in rows}
    tried = {int(drafts) for row in rows for drafts in row["fixed"]}
    paying = max((batch for batch, speedup in best.items() if speedup > 1), default=0)
    lost = min((batch for batch, speedup in best.items() if speedup <= 1 and batch > paying), default=None)
    predicted = max(Drafting(acceptance, drafts, 0.0).break_even(cost, context) for drafts in tried)
    return {
        "kind": "break-even",
        "what": f"{acceptance} accepted",
        "measured": [paying, lost],
        "predicted": predicted,
        "near": is_near(predicted, paying, lost),
    }


def worker_kind(run: Run) -> WorkerKind:
    """Return a worker of the model and the GPU that a run has measured."""
    return WorkerKind(str(run["model"]), shape_config(str(run["model"])), DEVICES[_GPU_NAMES[run["hardware"]["name"]]])


if __name__ == "__main__":
    run_case("planning", __doc__ or "", {"predictions": "benchmarks.planning"})
