"""Writes docs/performance.md from the newest runs in benchmarks/results/: `python -m benchmarks.tables`.

It also checks these runs against their floors (`floors.py`); the exit status is 1 if one misses a floor.

Each section shows the key figures of its benchmark's newest run for each model and hardware. All other figures of a run
are in its file; earlier runs are in git.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import check
from benchmarks.results import RESULTS, Run, newest_result, read_results
from tandem.capacity.simulation.hardware import ITEM_BYTES
from tandem.cost_model.step_work import StepWork
from tandem.engine.model_sizes import model_sizes
from tandem.engine.models.shapes import shape_config

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
ENGINE_SHAPES = (
    "llama-3-8b",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "gemma-3-12b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
)
CELLS = ("strict", "balanced", "quick")
PEER_ROWS = {"vllm": "vLLM 0.33.0", "tandem": "Tandem"}
"""Rows of the served load in the comparison with vLLM, and their names in the table."""
_BATCHES = (1, 32, 128)
_DISAGGREGATED = "disaggregated"
_REMOVED_OPTIONS = re.compile(r" --direction \w+")
"""Options in saved commands that no longer exist: the direction of `benchmarks.kv_transfer`."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Figures of a served load that share a column: one number, or several percentiles of one distribution."""

    title: str
    figure: str
    percentiles: tuple[str, ...] = ()
    form: str = ",.0f"
    more_is_better: bool = False

    def numbers(self, load: Mapping[str, Any]) -> list[float]:
        """Return the column's figures for a load."""
        value = load[self.figure]
        return [float(value[percentile]) for percentile in self.percentiles] if self.percentiles else [float(value)]


_SERVED = (
    _Column("tokens/s", "tok_s", more_is_better=True),
    _Column("TTFT P50, P90, P99 ms", "ttft_ms", ("50", "90", "99")),
    _Column("ITL P50, P95, P99 ms", "gap_ms", ("50", "95", "99"), ".1f"),
    _Column("within 1 s, 25 ms", "good_1000_25", form=".0%", more_is_better=True),
    _Column("within 300 ms, 60 ms", "good_300_60", form=".0%", more_is_better=True),
)

_HEAD = """# Performance

The newest run for each model and hardware. `python -m benchmarks.tables` makes this page from the files in
[benchmarks/results](../benchmarks/results), which name command, commit, hardware and versions of each run and hold all
of its figures, checks whether the newest runs hold the floors that are set for them, and fails if one does not. Earlier
runs are in git.

**Method.** A share is a ratio to a ceiling measured in the same run: for decode, the bytes that a step must read (all
weights, the KV cache of its requests) per second, over the rate of a device copy; for prefill, the floating-point
operations of the prompt per second, over the rate of an 8,192³ product. Weights are random, which changes no step's
time. TTFT is the time from sending a request to its first token, ITL the time between two tokens of an answer, both on
the client's clock. Loads are open: a request leaves when it is due, whether or not earlier ones have been answered.
Goodput is the highest number of requests per second within the targets of a service class, among loads of which 90 %
are. Targets are for TTFT and for the 99th percentile of a request's own ITL: strict 2 s and two idle decode steps,
balanced 1 s and 25 ms, quick 300 ms and 60 ms.
"""
_OVER_HTTP = (
    "tandem up --random-weights llama-3-8b; "
    "python -m benchmarks.load --url http://127.0.0.1:8000/v1 --rates 8,12,16 --save"
)
_STRATEGIES = "python -m benchmarks.strategies --device cuda --shape MODEL --workers N --workloads NAME --save"
_PICTURES = """
![Two H200: requests within the targets of each class, by offered load](pictures/strategies-two-h200-balanced.png)

![One H200: the same](pictures/strategies-one-h200-balanced.png)
"""


def main() -> int:
    """Write the page, check the floors, and return the exit status."""
    PAGE.write_text(make_page(RESULTS), encoding="utf-8")
    print("wrote", PAGE.name)
    return check(RESULTS)


def make_page(folder: Path) -> str:
    """Return the page about the runs in `folder`. Raises LookupError if a section has no run there."""
    sections = (
        _engine,
        _by_batch,
        _chunks,
        _quantized,
        _experts,
        _latent,
        _served,
        _handoff,
        _goodput,
        _strategies,
        _batching,
        _planning,
        _peer,
        _router,
        _cpu,
    )
    return _HEAD + "".join(section(folder) for section in sections)


def peer_tables(folder: Path) -> tuple[list[str], list[str]]:
    """Return the tables of the comparison with vLLM, decode steps and served load, which README.md contains as well."""
    _, run = newest_result(folder, "peer-vllm")
    engines = run["engine"]
    names = {"tandem": "Tandem", "vllm": PEER_ROWS["vllm"]}
    kinds = {
        f"{names[server]}, {kind.removeprefix('llama-3-8b').strip() or 'bf16'}": figures
        for server, by_kind in engines.items()
        for kind, figures in by_kind.items()
    }
    batches = (1, 8, 32, 128)
    steps = _table(
        ("decode step of llama-3-8b, ms", *(f"batch {batch}" for batch in batches)),
        ((name, *(_milliseconds(figures, batch) for batch in batches)) for name, figures in kinds.items()),
    )
    served = [
        ("requests/s", "server", *(column.title for column in _SERVED)),
        *(row for rate in _rates(run) for row in _served_rows(run, rate)),
    ]
    return steps, _table(served[0], served[1:])


def _milliseconds(figures: Mapping[str, Any], batch: int) -> str:
    """Return the time of a decode step of `batch` requests; a dash = not measured."""
    measured = figures.get(f"decode_ms_b{batch}")
    return "–" if measured is None else f"{measured:.2f}"


def _rates(run: Run) -> list[float]:
    """Return the rates at which every row of the served load was measured."""
    rates = [{float(load["rate"]) for load in run["serving"][key]} for key in PEER_ROWS]
    return sorted(set.intersection(*rates))


def _served_rows(run: Run, rate: float) -> list[list[str]]:
    """Return one row per server at `rate`, with the best figure of each column in bold."""
    loads = [next(load for load in run["serving"][key] if load["rate"] == rate) for key in PEER_ROWS]
    rows = [[f"{rate:g}", name] for name in PEER_ROWS.values()]
    for column in _SERVED:
        shown = [[f"{number:{column.form}}" for number in column.numbers(load)] for load in loads]
        for part, values in enumerate(zip(*(column.numbers(load) for load in loads), strict=True)):
            best = (max if column.more_is_better else min)(range(len(values)), key=values.__getitem__)
            for cells in [cells for cells in shown if cells[part] == shown[best][part]]:
                cells[part] = f"**{cells[part]}**"
        for row, cells in zip(rows, shown, strict=True):
            row.append(", ".join(cells))
    return rows


def _engine(folder: Path) -> str:
    runs = [newest_result(folder, f"engine-{shape}-", "prefill_flops_ratio_1x2048") for shape in ENGINE_SHAPES]
    return _section(
        "Engine",
        "Decode steps with a context of about 1,024 tokens, prefill of one prompt, bfloat16.",
        _table(
            (
                "model",
                "hardware",
                "decode share of bandwidth, batch 1, 32, 128",
                "decode step, ms",
                "prefill share of peak, 2,048 and 8,192 tokens",
                "start, s",
            ),
            (
                (
                    run["shape"],
                    run["hardware"]["name"],
                    _figures(run, "decode_bw_ratio_b", _BATCHES),
                    _figures(run, "decode_ms_b", _BATCHES),
                    _list((run[f"prefill_flops_ratio_1x{tokens}"] for tokens in (2048, 8192)), ".2f"),
                    f"{run['start_seconds']:.0f}",
                )
                for _, run in runs
            ),
        ),
        "python -m benchmarks.engine --device cuda --shape MODEL --save",
        runs,
    )


def _by_batch(folder: Path) -> str:
    name, run = newest_result(folder, "engine-llama-3-8b-", "decode_ms_b256")
    eager_name, eager = newest_result(folder, "engine-llama-3-8b-", "decode_eager_ms_b1")
    sizes = model_sizes(shape_config(run["shape"]), ITEM_BYTES)
    text = (
        "Tokens per second of decode steps with a context of 1,024 tokens, beside what memory bandwidth and arithmetic "
        "alone would allow: the bytes of a step over the rate of a device copy, and its operations over the rate of a "
        "large product, both measured in the same run. The last line is what CUDA graphs save of a step whose kernels "
        "the host would launch one by one."
    )

    def compute_s(batch: int) -> float:
        flops = sizes.step_flops(StepWork(decode_rows=batch, decode_context_tokens=1024 * batch))
        return flops / float(run["matrix_tflops"] * 1e12)

    batches = [int(key.removeprefix("decode_ms_b")) for key in run if re.fullmatch(r"decode_ms_b\d+", key)]
    seconds = {batch: run[f"decode_ms_b{batch}"] / 1e3 for batch in batches}
    saved = {
        batch: eager.get(f"decode_eager_ms_b{batch}", math.nan) - eager[f"decode_ms_b{batch}"] for batch in batches
    }
    lines = _table(
        ("requests", *map(str, batches)),
        (
            ("measured, tokens/s", *(f"{batch / seconds[batch]:,.0f}" for batch in batches)),
            (
                "by bandwidth",
                *(f"{batch / (seconds[batch] * run[f'decode_bw_ratio_b{batch}']):,.0f}" for batch in batches),
            ),
            ("by arithmetic", *(f"{batch / compute_s(batch):,.0f}" for batch in batches)),
            ("saved by CUDA graphs, ms", *(_or_dash(saved[batch], ".2f") for batch in batches)),
        ),
    )
    title = f"Decode by batch: {run['shape']}, {run['hardware']['name']}"
    runs = [(name, run), (eager_name, eager)]
    command = "python -m benchmarks.engine --device cuda --shape llama-3-8b --eager --save"
    return _section(title, text, lines, command, runs)


def _or_dash(value: float, form: str) -> str:
    """Return a number as text; a dash if it was not measured."""
    return "–" if math.isnan(value) else f"{value:{form}}"


def _chunks(folder: Path) -> str:
    """Return the section on chunks beside answers; empty until a run is kept."""
    if not (runs := read_results(folder, "chunks-")):
        return ""
    name, run = runs[-1]
    text = (
        f"Steps of {run['decoding']} requests with contexts of {run['context']:,} tokens that also compute a chunk of "
        "a prompt. The time of the step is the ITL of all these requests."
    )
    lines = _table(
        ("prompt tokens of a step", "ITL ms", "prompt tokens/s", "answer tokens/s"),
        (
            (
                f"{row['chunk']:,}",
                f"{row['itl_ms']:.1f}",
                f"{row['prompt_tokens_per_s']:,.0f}",
                f"{row['answer_tokens_per_s']:,.0f}",
            )
            for row in run["rows"]
        ),
    )
    title = f"Chunks beside answers: {run['shape']}, {run['hardware']['name']}"
    return _section(title, text, lines, "python -m benchmarks.engine chunks --save", [(name, run)])


def _quantized(folder: Path) -> str:
    newest = {run["shape"]: (name, run) for name, run in read_results(folder, "engine-llama-3-8b_")}
    runs = [newest[shape] for shape in sorted(newest) if "decode_over_before_b1" in newest[shape][1]]
    batches = (1, 32, 128, 256)
    return _section(
        "Engine: quantized llama-3-8b",
        "Decode steps as above, and how many times as fast decode steps and prompts are as those in bfloat16, which the"
        " same run measures first. The share counts codes and scales as they are stored.",
        _table(
            (
                "weights and KV",
                "hardware",
                "decode share of bandwidth, batch 1, 32, 128, 256",
                "decode step, ms",
                "times as fast",
                "prompts of 512, 2,048, 8,192 tokens, times as fast",
                "KV tokens",
            ),
            (
                (
                    run["shape"].removeprefix("llama-3-8b_").replace("_", ", ").replace("kv-", "KV "),
                    run["hardware"]["name"],
                    _figures(run, "decode_bw_ratio_b", batches),
                    _figures(run, "decode_ms_b", batches),
                    _figures(run, "decode_over_before_b", batches),
                    _figures(run, "prefill_over_before_1x", (512, 2048, 8192)),
                    f"{run['kv_tokens']:,}",
                )
                for _, run in runs
            ),
        ),
        "python -m benchmarks.engine --device cuda --shape llama-3-8b --quantization WEIGHTS --kv-cache-dtype KV"
        " --before --save",
        runs,
    )


def _figures(run: Run, name: str, sizes: Iterable[int]) -> str:
    """Return the figures `name` for some sizes, with a dash for each size that exceeds the GPU's memory."""
    return ", ".join(f"{run[key]:.2f}" if (key := f"{name}{size}") in run else "–" for size in sizes)


def _experts(folder: Path) -> str:
    name, run = newest_result(folder, "experts-")
    rows: dict[str, dict[int, float]] = {}
    for entry in run["experts"]:
        rows.setdefault(entry["shape"], {})[entry["tokens"]] = entry["copy_share"]
    tokens = sorted(next(iter(rows.values())))
    return _section(
        "Experts alone",
        "A layer's experts, without shared ones: the bytes of the experts that a step of that many tokens chooses per"
        f" second, over the rate of a device copy. {run['hardware']['name']}, bfloat16.",
        _table(
            ("tokens", *(f"{count:,}" for count in tokens)),
            ((shape, *(f"{shares[count]:.2f}" for count in tokens)) for shape, shares in rows.items()),
        ),
        "python -m benchmarks.kernels experts --save",
        [(name, run)],
    )


def _latent(folder: Path) -> str:
    name, run = newest_result(folder, "latent-attention-")
    sizes = ("64x4096", "128x4096", "1x32768")
    return _section(
        "Latent attention",
        "Decode attention of DeepSeek-V2-Lite's 16 heads over rows of that many cached tokens: the bytes of the latents"
        f" per second, over the rate of a device copy. {run['hardware']['name']}, bfloat16.",
        _table(
            ("rows x tokens", *(size.replace("x", " x ") for size in sizes)),
            (
                ("attention", *(f"{run[f'latent_bw_ratio_{size}_h16']:.2f}" for size in sizes)),
                ("with its four products", *(f"{run[f'latent_whole_bw_ratio_{size}_h16']:.2f}" for size in sizes)),
            ),
        ),
        "python -m benchmarks.kernels latent --save",
        [(name, run)],
    )


def _served(folder: Path) -> str:
    name, run = newest_result(folder, "http-llama-3-8b-")
    loads = next(iter(run["rows"].values()))
    text = (
        "Over HTTP, with all defaults of `tandem up`: one worker that prefills and decodes, `--step-policy "
        "decode-priority --step-budget 512`. Prompts have 1,480 tokens on average, answers 240."
    )
    lines = _table(
        ("requests/s", "tokens/s", "TTFT P50, P99 ms", "ITL P50, P99 ms", "within 1 s, 25 ms"),
        (
            (
                f"{load['rate']:g}",
                f"{load['tok_s']:,.0f}",
                _list(load["ttft_ms"][percentile] for percentile in ("50", "99")),
                _list((load["gap_ms"][percentile] for percentile in ("50", "99")), ".1f"),
                _percent(load["good_1000_25"]),
            )
            for load in loads
        ),
    )
    return _section(f"Served: llama-3-8b, {run['hardware']['name']}", text, lines, _OVER_HTTP, [(name, run)])


def _handoff(folder: Path) -> str:
    name, run = newest_result(folder, "kv-transfer-2-gpus", "handover_ms_8192")
    text = (
        f"A prompt of {run['prompt_tokens']:,} tokens, prefilled on one GPU and decoded on another; the prefill worker "
        "writes the pages, over NVLink. The hand-over is the time from the end of the prompt's last chunk to its first "
        "decode step, and may wait for the decode step that runs."
    )
    shares = (run["transfer_bw_ratio_one_page"], run["transfer_bw_ratio_8192"])
    rows = (
        ("hand-over; a decode step", f"{run['handover_ms_8192']:.1f} ms; {run['decode_step_ms']:.1f} ms"),
        (
            "share of TTFT and hand-over in which the request waits for its pages",
            f"{run['exposed_share_8192']:.1%}",
        ),
        ("transfer's share of bandwidth, one page and the whole prompt", _list(shares, ".2f")),
        ("prefill with transfers ÷ without", f"{run['prefill_with_over_without_transfer']:.3f}"),
        ("decode step with transfers ÷ without", f"{run['decode_step_with_over_without_transfers']:.3f}"),
    )
    title = f"Hand-over: {run['model']}, {run['gpus']} × {run['hardware']['name']}"
    return _section(title, text, _table(("figure", ""), rows), _command(run), [(name, run)])


def _newest_strategies(folder: Path) -> dict[tuple[str, str, int], tuple[str, Run]]:
    """Return the newest run with colocated and adaptive rows of each model, workload and number of GPUs."""
    newest: dict[tuple[str, str, int], tuple[str, Run]] = {}
    for name, run in read_results(folder, "strategies-"):
        for workload, table in run["tables"].items():
            if {"shared", "adaptive"} <= table["rows"].keys() and isinstance(run["workers"], int):
                newest[run["model"], workload, run["workers"]] = name, run
    return dict(sorted(newest.items()))


def _goodput(folder: Path) -> str:
    newest = _newest_strategies(folder)
    text = (
        "Requests per second within each class, best of the colocated step policies / prefill and decode on a GPU "
        "each / adaptive, where the router chooses for each request and each request names its class. 0.0: less than "
        "90 % were within the class at every load; a dash: not measured. The pictures show every load of the balanced "
        "workload."
    )
    lines = _table(
        ("workload", "model", "GPUs", *CELLS),
        (
            (workload, model, str(workers), *(_of_cell(run["tables"][workload]["rows"], cell) for cell in CELLS))
            for (model, workload, workers), (_, run) in newest.items()
        ),
    )
    return _section("Goodput against colocated: H200", text, lines, _STRATEGIES, newest.values()) + _PICTURES


def _strategies(folder: Path) -> str:
    newest = _newest_strategies(folder)
    text = (
        "Latencies of the same runs, at the highest rate at which all rows were measured. *Shared:* prompts whole, "
        "beside the answers. *Chunked:* at most 512 or 2,048 tokens a step. *Priority:* short chunks beside answers; "
        "with 50 ms: chunks as long as a target of 50 ms for gaps allows."
    )
    lines = _table(
        ("model, workload, GPUs, requests/s", "strategy", "TTFT P50, P99 ms", "ITL P50, P99 ms", "tokens/s"),
        (
            (
                f"{model}, {workload}, {workers}, {run['tables'][workload]['rate']:.3g}",
                strategy,
                _list((row["ttft_p50_ms"], row["ttft_p99_ms"]), ",.0f"),
                _list((row["itl_p50_ms"], row["itl_p99_ms"]), ",.1f"),
                f"{row['tokens_per_s']:,.0f}",
            )
            for (model, workload, workers), (_, run) in newest.items()
            for strategy, row in run["tables"][workload]["rows"].items()
        ),
    )
    return _section("Strategies at one rate: H200", text, lines, _STRATEGIES + " --rates A,B,C", newest.values())


def _batching(folder: Path) -> str:
    name, run = newest_result(folder, "batching-")
    text = (
        f"One simulated {run['gpu']} with {run['slots']} places in the batch, prompts and answers of "
        f"{run['prompt_tokens']} and {run['new_tokens']} tokens, {run['seconds']:g} s of arrivals. *Static:* a batch "
        "begins when it is full and the one before has ended; *dynamic:* also when its oldest request has waited "
        f"{run['timeout']:g} s; *continuous:* a request joins at the next step, as in Tandem. Padding is the share of "
        "a batch's places in which the request has ended and another has not."
    )
    lines = _table(
        ("requests/s", "batching", "tokens/s", "places filled", "padding", "TTFT P50, P99 ms"),
        (
            (
                f"{row['rate']:g}",
                row["policy"],
                f"{row['tokens_per_s']:,.0f}",
                _percent(row["slots_filled"]),
                _percent(row["padding"]),
                _list((row["ttft_ms"][percentile] for percentile in ("50", "99")), ",.0f"),
            )
            for row in run["rows"]
        ),
    )
    title = f"Batching: {run['model']}, simulated"
    return _section(title, text, lines, "python -m benchmarks.batching --save", [(name, run)])


def _planning(folder: Path) -> str:
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
        *_table(("prediction", "compared", "near"), counts),
        "",
        *_table(("not near", "measured", "predicted", "price measured", "price predicted"), missed),
    ]
    title = "Predictions beside measurements"
    return _section(title, text, lines, "python -m benchmarks.planning --save", [(name, run)])


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


def _of_cell(rows: Mapping[str, Any], cell: str) -> str:
    reached = {name: row["goodput_per_s"][cell] for name, row in rows.items()}
    apart = [value for name, value in reached.items() if name.startswith(_DISAGGREGATED)]
    together = [value for name, value in reached.items() if not name.startswith((_DISAGGREGATED, "adaptive"))]
    return " / ".join(f"{max(values):.1f}" if values else "–" for values in (together, apart, [reached["adaptive"]]))


def _peer(folder: Path) -> str:
    name, run = newest_result(folder, "peer-vllm")
    steps, served = peer_tables(folder)
    conditions = run["conditions"]
    seconds = run["start_seconds"]
    text = (
        f"{run['what']}, {run['date']}. *Steps:* {conditions['engine']}. *Served:* {conditions['serving']}. "
        f"*Caveats:* {conditions['caveats']} Servers were ready after {seconds['vllm_server']} s (vLLM) and "
        f"{seconds['tandem_server_all_ready']} s (Tandem).\n\n{run['reading']} Bold is the best at each rate."
    )
    return _section("Compared with vLLM: llama-3-8b, one H200", text, [*steps, "", *served], _OVER_HTTP, [(name, run)])


def _router(folder: Path) -> str:
    name, run = newest_result(folder, "router-")
    rows = (
        ("messages/s a core, a token each, by gRPC", f"{run['grpc_messages_per_s_core']:,.0f}"),
        ("the same by HTTP", f"{run['http_messages_per_s_core']:,.0f}"),
        (
            f"tokens/s a core, {run['coalesced_tokens_per_message']:.0f} a message",
            f"{run['coalesced_tokens_per_s_core']:,.0f}",
        ),
        (f"complete answers of {run['streams']:,} open streams", _percent(run["complete_share"])),
        (
            f"memory, growth over {run['stream_tokens_read'] / 1e6:.1f} million tokens of these",
            f"{run['memory_growth_mib']:.1f} MiB",
        ),
        (
            "age of a message at half load, P50, P99",
            f"{run['age_ms_p50']:.1f}, {run['age_ms_p99']:.1f} ms",
        ),
        (
            "the same beside two clients that do not read",
            f"{run['age_beside_unread_ms_p50']:.1f}, {run['age_beside_unread_ms_p99']:.1f} ms",
        ),
    )
    text = (
        "A stand-in worker sends the tokens. *A core* is a second of the router process's CPU time. Ages are from the "
        "worker's sending to the client's reading, three processes on the cores of the host; when they were measured, "
        f"others used it too: its load average was {run['load_average_before']:.1f} before."
    )
    title = f"Router: {run['hardware']['name']}, {run['hardware']['cores']} cores"
    return _section(title, text, _table(("figure", ""), rows), _command(run), [(name, run)])


def _cpu(folder: Path) -> str:
    engine = newest_result(folder, "engine-SmolLM2", "decode_ratio_b1")
    serving = newest_result(folder, "serving-SmolLM2", "cluster_efficiency_b8")
    handoff = newest_result(folder, "kv-transfer-SmolLM2", "handover_ms_1536")
    step = ("decode_ratio_b1", "decode_ratio_b8", "prefill_ratio_512")
    rows = (
        (
            "speed ÷ transformers: decode of 1 and 8 requests, prefill of 512 tokens",
            _list((engine[1][figure] for figure in step), ".1f"),
        ),
        ("tokens/s through a cluster of two workers ÷ of its engine", f"{serving[1]['cluster_efficiency_b8']:.2f}"),
        ("hand-over of 1,536 tokens over shared memory", f"{handoff[1]['handover_ms_1536']:.0f} ms"),
    )
    text = "The same cluster on two cores; both sides of a ratio ran in turns on one machine."
    title = f"CPU: {engine[1]['model']}, {engine[1]['hardware']['name']}"
    results = [engine, serving, handoff]
    return _section(title, text, _table(("figure", ""), rows), "; ".join(_command(run) for _, run in results), results)


def _command(run: Run) -> str:
    """Return the run's command without options that its benchmark no longer has."""
    return _REMOVED_OPTIONS.sub("", str(run["command"]))


def _section(title: str, text: str, lines: Iterable[str], command: str, runs: Iterable[tuple[str, Run]]) -> str:
    """Return a section: its description, table, the command to repeat it, and links to its runs."""
    links = ", ".join(
        f"[{str(run['commit'])[:8]} of {str(run['date'])[:10]}](../benchmarks/results/{name})"
        for name, run in dict(runs).items()
    )
    return "\n".join(
        [f"\n## {title}\n", f"{text}\n", *lines, "", f"To measure again: `{command}`. Shown: {links}.", ""]
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    cells = list(head)
    return [f"| {' | '.join(row)} |" for row in (cells, ["---"] * len(cells), *rows)]


def _list(values: Iterable[float], form: str = ".0f") -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def _percent(share: float) -> str:
    return f"{share:.0%}"


if __name__ == "__main__":
    sys.exit(main())
