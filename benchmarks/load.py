"""Measures a server under open-loop load: `python -m benchmarks.load --url http://127.0.0.1:8000/v1 --rates 8,12,16`.

The clients are those of `tandem bench`, over OpenAI's HTTP API of any server or over gRPC (`--url grpc://HOST:PORT`).
Requests come from a trace or are random, with lognormal lengths. Each load has its own token ids, so that no prompt
hits prefix cache entries of an earlier load. `--sweep RATE` raises the rate up to the knee. The last line is one JSON
object with a row per load. `--save` saves it; figures of a GPU must be saved on the host of the server's GPU.

On that host the energy of all GPUs that `CUDA_VISIBLE_DEVICES` shows is measured, from the start of a load to its last
answer, and divided by the tokens of complete answers.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.command_line import exit_on_error
from benchmarks.results import run_facts, save_result
from benchmarks.sweep import knees, sweep
from tandem.cli.bench.servers import Server, find_server
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, report_of
from tandem.cli.load.slo import SloCell, parse_cell
from tandem.cli.load.spread import percentile
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.trace import read_trace
from tandem.cli.load.workload import Source, parse_rates
from tandem.engine.energy import open_energy_counter
from tandem.protocol.errors import InvalidArgument

CELLS = (SloCell("good_1000_25", 1.0, 0.025, 95), SloCell("good_300_60", 0.3, 0.060, 95))
"""Goodput cells: name, maximum TTFT and maximum 95th-percentile ITL of a request, both in seconds."""

Row = dict[str, object]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", required=True, help="http://HOST:PORT/v1 of any OpenAI server, or grpc://HOST:PORT")
    parser.add_argument("--model", default="", help="the name by which it serves its model; by default its first one")
    parser.add_argument("--api-key", default="", help="for a server that requires one")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--rates", default="8", help="requests a second, one load for each: 8,12,16")
    pace.add_argument("--sweep", type=float, metavar="RATE", help="from this rate up to the knee")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--drain-seconds", type=float, default=60.0, help="for answers after the last arrival")
    parser.add_argument("--trace", type=Path, help="Mooncake's .jsonl or Azure's .csv instead of drawn requests")
    parser.add_argument("--length-scale", type=float, default=1.0, help="of the trace's prompts, blocks and answers")
    parser.add_argument("--prompt-tokens", default="lognormal:1410:0.8", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--new-tokens", default="lognormal:239:0.6", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--cv", type=float, default=1.0, help="of the gaps between arrivals (1 = Poisson)")
    parser.add_argument("--context", type=int, default=8192, help="longest prompt and answer together")
    parser.add_argument("--vocab-size", type=int, default=100_000, help="by HTTP token ids are below it")
    parser.add_argument("--slo", action="append", default=[], metavar="NAME:TTFT_MS:GAP_MS[:PERCENT]")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and token ids")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--row", default="defaults", help="name of the server's settings in the result")
    parser.add_argument("--device", default="cuda", help="what the server runs on: cpu or cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's weights, for the name of the file")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


def make_source(arguments: argparse.Namespace) -> Source:
    """Return the trace, or a source of random requests."""
    if arguments.trace is not None:
        return read_trace(arguments.trace).scaled(arguments.length_scale)
    prompt = Lengths.parse("--prompt-tokens", arguments.prompt_tokens)
    return Synthetic(prompt, Lengths.parse("--new-tokens", arguments.new_tokens), arguments.cv)


def measurement(
    server: Server, source: Source, cells: Sequence[SloCell], arguments: argparse.Namespace, rows: list[Row]
) -> Callable[[float, int], LoadReport]:
    """Return a function that runs load `number` at a rate, adds its figures to `rows` and prints them at once."""
    settings = LoadSettings(arguments.clients, arguments.drain_seconds)
    gpus = torch.cuda.device_count()

    def measure(rate: float, number: int) -> LoadReport:
        workload = source.at(rate, arguments.seconds, arguments.seed + number).fitted(arguments.context)
        energy = open_energy_counter(torch.device("cuda", 0), gpus) if arguments.device != "cpu" and gpus else None
        report = report_of(workload, server.send(workload, settings, None), cells, settings)
        rows.append(figures(report, None if energy is None else energy.joules()))
        print(json.dumps(rows[-1]), flush=True)
        if all(record.error for record in report.records):
            raise InvalidArgument("--url", f"no request was answered: {', '.join(report.errors)}")
        return report

    return measure


def run(arguments: argparse.Namespace) -> tuple[list[LoadReport], list[Row]]:
    """Run one load per rate, or loads up to the knee; return their reports and their figures."""
    source, cells = make_source(arguments), [*CELLS, *map(parse_cell, arguments.slo)]
    rates = parse_rates(arguments.rates)
    server = find_server(
        arguments.url, arguments.api_key, arguments.model, "completions", arguments.vocab_size, ignore_eos=True
    )
    arguments.model = server.model
    rows: list[Row] = []
    measure = measurement(server, source, cells, arguments, rows)
    if arguments.sweep is not None:
        return sweep(measure, arguments.sweep), rows
    return [measure(rate, number) for number, rate in enumerate(rates)], rows


def figures(report: LoadReport, joules: float | None = None) -> Row:
    """Return the latencies of complete answers in ms, and the share of all requests that met each SLO cell.

    `joules` is the energy of the GPUs during the load; None = it was not measured.
    """
    records, workload = report.records, report.workload
    whole = [record for record in records if not record.error and record.token_s]
    tokens = sum(record.completion_tokens for record in whole)
    return {
        "rate": workload.rate,
        "n": len(records),
        "errors": len(records) - len(whole),
        "err": sorted(report.errors)[:2],
        "late_max": round(report.lateness.worst, 4),
        "chunks_per_token": round(sum(record.chunks for record in whole) / max(1, tokens), 3),
        "tok_s": round(tokens / report.makespan_s, 1),
        "ttft_ms": _in_ms([record.token_s[0] - record.due_s for record in whole], (50, 90, 99)),
        "gap_ms": _in_ms([gap for record in whole for gap in record.gaps_s], (50, 95, 99, 99.9)),
        "tpot_ms": _in_ms([record.tpot_s for record in whole if record.tpot_s is not None], (50, 90, 99)),
        "e2e_ms": _in_ms([record.end_to_end_s for record in whole], (50, 90, 99)),
        **{score.cell.name: round(score.share, 3) for score in report.scores},
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in workload.arrivals),
        "out_tokens": tokens,
        **({} if joules is None or not tokens else {"joules_per_token": round(joules / tokens, 4)}),
    }


def _in_ms(values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    return {f"{percent:g}": round(1e3 * percentile(values, percent), 2) for percent in percents} if values else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Send the loads, and print the result as JSON last."""
    parsed = parse_arguments(arguments)
    with exit_on_error():
        reports, rows = run(parsed)
    result = {"model": parsed.model, "rows": {parsed.row: rows}, "knee_goodput_per_s": knees(reports)}
    result |= {"dtype": parsed.dtype} | run_facts(parsed.device)
    if parsed.save:
        print("saved", save_result(f"http-{parsed.model.removeprefix('random-')}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
