"""Sections of docs/performance.md about ways to divide GPUs and batches, and predictions of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import Run, newest_result, read_results
from benchmarks.sections.markdown import listed, percent, section, table

CELLS = ("strict", "balanced", "quick")

_DISAGGREGATED = "disaggregated"

_STRATEGIES = "python -m benchmarks.strategies --device cuda --shape MODEL --workers N --workloads NAME --save"

_PICTURES = """
![Two H200: requests within the targets of each class, by offered load](pictures/strategies-two-h200-balanced.png)

![One H200: the same](pictures/strategies-one-h200-balanced.png)
"""


def _newest_strategies(folder: Path) -> dict[tuple[str, str, int], tuple[str, Run]]:
    """Return the newest run with colocated and adaptive rows of each model, workload and number of GPUs."""
    newest: dict[tuple[str, str, int], tuple[str, Run]] = {}
    for name, run in read_results(folder, "strategies-"):
        for workload, figures in run["tables"].items():
            if {"shared", "adaptive"} <= figures["rows"].keys() and isinstance(run["workers"], int):
                newest[run["model"], workload, run["workers"]] = name, run
    return dict(sorted(newest.items()))


def goodput(folder: Path) -> str:
    """Return the section on goodput of each division of GPUs."""
    newest = _newest_strategies(folder)
    text = (
        "Requests per second within each class, best of the colocated step policies / prefill and decode on a GPU "
        "each / adaptive, where the router chooses for each request and each request names its class. 0.0: less than "
        "90 % were within the class at every load; a dash: not measured. The pictures show every load of the balanced "
        "workload."
    )
    lines = table(
        ("workload", "model", "GPUs", *CELLS),
        (
            (workload, model, str(workers), *(_of_cell(run["tables"][workload]["rows"], cell) for cell in CELLS))
            for (model, workload, workers), (_, run) in newest.items()
        ),
    )
    return section("Goodput against colocated: H200", text, lines, _STRATEGIES, newest.values()) + _PICTURES


def strategies(folder: Path) -> str:
    """Return the section on latencies of each division of GPUs at one rate."""
    newest = _newest_strategies(folder)
    text = (
        "Latencies of the same runs, at the highest rate at which all rows were measured. *Shared:* prompts whole, "
        "beside the answers. *Chunked:* at most 512 or 2,048 tokens a step. *Priority:* short chunks beside answers; "
        "with 50 ms: chunks as long as a target of 50 ms for gaps allows."
    )
    lines = table(
        ("model, workload, GPUs, requests/s", "strategy", "TTFT P50, P99 ms", "ITL P50, P99 ms", "tokens/s"),
        (
            (
                f"{model}, {workload}, {workers}, {run['tables'][workload]['rate']:.3g}",
                strategy,
                listed((row["ttft_p50_ms"], row["ttft_p99_ms"]), ",.0f"),
                listed((row["itl_p50_ms"], row["itl_p99_ms"]), ",.1f"),
                f"{row['tokens_per_s']:,.0f}",
            )
            for (model, workload, workers), (_, run) in newest.items()
            for strategy, row in run["tables"][workload]["rows"].items()
        ),
    )
    return section("Strategies at one rate: H200", text, lines, _STRATEGIES + " --rates A,B,C", newest.values())


def _of_cell(rows: Mapping[str, Any], cell: str) -> str:
    reached = {name: row["goodput_per_s"][cell] for name, row in rows.items()}
    apart = [value for name, value in reached.items() if name.startswith(_DISAGGREGATED)]
    together = [value for name, value in reached.items() if not name.startswith((_DISAGGREGATED, "adaptive"))]
    return " / ".join(f"{max(values):.1f}" if values else "–" for values in (together, apart, [reached["adaptive"]]))


def batching(folder: Path) -> str:
    """Return the section on static, dynamic and continuous batching."""
    name, run = newest_result(folder, "batching-")
    text = (
        f"One simulated {run['gpu']} with {run['slots']} places in the batch, prompts and answers of "
        f"{run['prompt_tokens']} and {run['new_tokens']} tokens, {run['seconds']:g} s of arrivals. *Static:* a batch "
        "begins when it is full and the one before has ended; *dynamic:* also when its oldest request has waited "
        f"{run['timeout']:g} s; *continuous:* a request joins at the next step, as in Tandem. Padding is the share of "
        "a batch's places in which the request has ended and another has not."
    )
    lines = table(
        ("requests/s", "batching", "tokens/s", "places filled", "padding", "TTFT P50, P99 ms"),
        (
            (
                f"{row['rate']:g}",
                row["policy"],
                f"{row['tokens_per_s']:,.0f}",
                percent(row["slots_filled"]),
                percent(row["padding"]),
                listed((row["ttft_ms"][percentile] for percentile in ("50", "99")), ",.0f"),
            )
            for row in run["rows"]
        ),
    )
    title = f"Batching: {run['model']}, simulated"
    return section(title, text, lines, "python -m benchmarks.batching --save", [(name, run)])


def planning(folder: Path) -> str:
    """Return the section on predictions beside measurements."""
    name, run = newest_result(folder, "planning-")
    rows, near = run["rows"], run["near"]
    counts = [
        (
            kind,
            str(sum(row["kind"] == kind for row in rows)),
            str(sum(row["kind"] == kind and row["near"] for row in rows)),
        )
        for kind in dict.fromkeys(row["kind"] for row in rows)
    ]
    missed = [
        (row["what"], _measured_range(row["measured"]), f"{row['predicted']:.3g}", *_prices(row))
        for row in rows
        if not row["near"]
    ]
    text = (
        "What `tandem plan` predicts for llama-3-8b, by the roofline alone, beside runs that are kept. A measured knee "
        "lies between the highest rate that met its class and the next one that did not; a price is that of 1 million "
        f"tokens of prompts and answers at the knee, for GPUs at $1 an hour. Near: at most {near:.0%} outside. Below: "
        "what is not near. The row priority was measured in the week before its default budget grew with the backlog."
    )
    lines = [
        *table(("prediction", "compared", "near"), counts),
        "",
        *table(("not near", "measured", "predicted", "price measured", "price predicted"), missed),
    ]
    title = "Predictions beside measurements"
    return section(title, text, lines, "python -m benchmarks.planning --save", [(name, run)])


def _measured_range(measured: float | list[float | None]) -> str:
    if not isinstance(measured, list):
        return f"{measured:.3g}"
    return " to ".join("more" if value is None else f"{value:.3g}" for value in measured)


def _prices(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the measured and the predicted price of a knee; dashes for other predictions."""
    if "price_measured" not in row:
        return "–", "–"
    least, most = ("–" if price is None else f"{price:.3f}" for price in row["price_measured"])
    predicted = row["price_predicted"]
    return f"{least} to {most}", "–" if predicted is None else f"{predicted:.3f}"
