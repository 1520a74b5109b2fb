"""Sections of docs/performance.md about serving: load, hand-overs, the comparison with vLLM, router and CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Run, newest_result, read_results
from benchmarks.sections.markdown import listed, percent, repeat_command, section, table

PEER_ROWS = {"vllm": "vLLM 0.33.0", "tandem": "Tandem"}
"""Rows of the served load in the comparison with vLLM, and their names in the table."""


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

_OVER_HTTP = (
    "tandem up --random-weights llama-3-8b; "
    "python -m benchmarks.load --url http://127.0.0.1:8000/v1 --rates 8,12,16 --save"
)


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
    steps = table(
        ("decode step of llama-3-8b, ms", *(f"batch {batch}" for batch in batches)),
        ((name, *(_milliseconds(figures, batch) for batch in batches)) for name, figures in kinds.items()),
    )
    served = [
        ("requests/s", "server", *(column.title for column in _SERVED)),
        *(row for rate in _rates(run) for row in _served_rows(run, rate)),
    ]
    return steps, table(served[0], served[1:])


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


def served(folder: Path) -> str:
    """Return the section on one server under load over HTTP."""
    name, run = newest_result(folder, "http-llama-3-8b-")
    loads = next(iter(run["rows"].values()))
    text = (
        "Over HTTP, with all defaults of `tandem up`: one worker that prefills and decodes, `--step-policy "
        "decode-priority --step-budget 512`. Prompts have 1,480 tokens on average, answers 240."
    )
    lines = table(
        ("requests/s", "tokens/s", "TTFT P50, P99 ms", "ITL P50, P99 ms", "within 1 s, 25 ms"),
        (
            (
                f"{load['rate']:g}",
                f"{load['tok_s']:,.0f}",
                listed(load["ttft_ms"][percentile] for percentile in ("50", "99")),
                listed((load["gap_ms"][percentile] for percentile in ("50", "99")), ".1f"),
                percent(load["good_1000_25"]),
            )
            for load in loads
        ),
    )
    return section(f"Served: llama-3-8b, {run['hardware']['name']}", text, lines, _OVER_HTTP, [(name, run)])


def handoff(folder: Path) -> str:
    """Return the section on hand-overs between two GPUs."""
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
        ("transfer's share of bandwidth, one page and the whole prompt", listed(shares, ".2f")),
        ("prefill with transfers ÷ without", f"{run['prefill_with_over_without_transfer']:.3f}"),
        ("decode step with transfers ÷ without", f"{run['decode_step_with_over_without_transfers']:.3f}"),
    )
    title = f"Hand-over: {run['model']}, {run['gpus']} × {run['hardware']['name']}"
    return section(title, text, table(("figure", ""), rows), repeat_command(run), [(name, run)])


def prefixes(folder: Path) -> str:
    """Return the section on common prefixes of prompts; empty until a run is kept."""
    if not (runs := read_results(folder, "prefixes-")):
        return ""
    name, run = runs[-1]
    text = (
        f"Prompts of {run['prompt_tokens']:,} tokens, one after the other on one worker, of which a share is cached. "
        "Saved ÷ predicted: the TTFT that the cache saved, and what the cost model that the worker has fitted predicts "
        f"of it. Looking up when nothing is cached: TTFT with ÷ without a prefix cache {run['lookup_over_none']:.3f}. "
        "Below: the tokens of all prompts of a use, those that were computed, and those that are distinct; and the "
        "share of the allocated KV memory that has tokens, by page size, beside an allocation of "
        f"the maximum length for each request: {percent(run['pages'][0]['contiguous'])}."
    )
    lines = [
        *table(
            ("share", "cached tokens", "TTFT ms", "saved ÷ predicted"),
            (
                (
                    f"{row['share']:g}",
                    f"{row['cached_tokens']:,.0f}",
                    f"{row['ttft_ms']:.1f}",
                    f"{row['saved_over_predicted']:.2f}" if "saved_over_predicted" in row else "–",
                )
                for row in run["shares"]
            ),
        ),
        "",
        *table(
            ("use", "tokens of prompts", "computed", "distinct"),
            (
                (row["use"], *(f"{row[count]:,}" for count in ("prompt_tokens", "computed", "distinct")))
                for row in run["uses"]
            ),
        ),
        "",
        *table(
            ("tokens of a page", *(str(row["page_tokens"]) for row in run["pages"])),
            (("fill", *(percent(row["fill"]) for row in run["pages"])),),
        ),
    ]
    title = f"Common prefixes: {run['model']}, {run['hardware']['name']}"
    command = "python -m benchmarks.serving prefixes --device cuda --shape llama-3-8b --save"
    return section(title, text, lines, command, [(name, run)])


def peer(folder: Path) -> str:
    """Return the section on the comparison with vLLM."""
    name, run = newest_result(folder, "peer-vllm")
    steps, loads = peer_tables(folder)
    conditions = run["conditions"]
    seconds = run["start_seconds"]
    text = (
        f"{run['what']}, {run['date']}. *Steps:* {conditions['engine']}. *Served:* {conditions['serving']}. "
        f"*Caveats:* {conditions['caveats']} Servers were ready after {seconds['vllm_server']} s (vLLM) and "
        f"{seconds['tandem_server_all_ready']} s (Tandem).\n\n{run['reading']} Bold is the best at each rate."
    )
    return section("Compared with vLLM: llama-3-8b, one H200", text, [*steps, "", *loads], _OVER_HTTP, [(name, run)])


def router(folder: Path) -> str:
    """Return the section on the router alone."""
    name, run = newest_result(folder, "router-")
    rows = (
        ("messages/s a core, a token each, by gRPC", f"{run['grpc_messages_per_s_core']:,.0f}"),
        ("the same by HTTP", f"{run['http_messages_per_s_core']:,.0f}"),
        (
            f"tokens/s a core, {run['coalesced_tokens_per_message']:.0f} a message",
            f"{run['coalesced_tokens_per_s_core']:,.0f}",
        ),
        (f"complete answers of {run['streams']:,} open streams", percent(run["complete_share"])),
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
    return section(title, text, table(("figure", ""), rows), repeat_command(run), [(name, run)])


def cpu(folder: Path) -> str:
    """Return the section on serving on CPUs."""
    alone = newest_result(folder, "engine-SmolLM2", "decode_ratio_b1")
    serving = newest_result(folder, "serving-SmolLM2", "cluster_efficiency_b8")
    handed = newest_result(folder, "kv-transfer-SmolLM2", "handover_ms_1536")
    step = ("decode_ratio_b1", "decode_ratio_b8", "prefill_ratio_512")
    rows = (
        (
            "speed ÷ transformers: decode of 1 and 8 requests, prefill of 512 tokens",
            listed((alone[1][figure] for figure in step), ".1f"),
        ),
        ("tokens/s through a cluster of two workers ÷ of its engine", f"{serving[1]['cluster_efficiency_b8']:.2f}"),
        ("hand-over of 1,536 tokens over shared memory", f"{handed[1]['handover_ms_1536']:.0f} ms"),
    )
    text = "The same cluster on two cores; both sides of a ratio ran in turns on one machine."
    title = f"CPU: {alone[1]['model']}, {alone[1]['hardware']['name']}"
    results = [alone, serving, handed]
    return section(
        title, text, table(("figure", ""), rows), "; ".join(repeat_command(run) for _, run in results), results
    )
