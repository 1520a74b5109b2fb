"""Sends open-loop load over OpenAI's HTTP API, the same for any server.

Run `python -m benchmarks.http_load --url http://127.0.0.1:8000/v1 --rates 8,12,16 --seconds 20`.

Prompts are random token ids, so that servers do the same work whatever their tokenizers; lengths are lognormal. The
last line is one JSON object with a row of loads; `--save` keeps it, which needs the GPU that the server runs on.
"""

import argparse
import json
from collections.abc import Sequence

from benchmarks.command_line import exit_on_error
from benchmarks.results import run_facts, save_result
from router.observability.request_outcome import Outcome
from tandem.cli.bench.servers import list_models
from tandem.cli.load.http_client import HttpShare, run_http_share
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.run import deal, run_clients
from tandem.cli.load.slo import SloCell
from tandem.cli.load.spread import percentile
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.workload import Workload, parse_rates
from tandem.protocol.errors import InvalidArgument

GOOD = {
    "good_1000_25": SloCell("1000 and 25 ms", 1.0, 0.025, 95),
    "good_300_60": SloCell("300 and 60 ms", 0.3, 0.060, 95),
}
"""Service levels: limits of TTFT, and of the ITL at the request's 95th percentile."""

Row = dict[str, object]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_load", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", required=True, help="http://HOST:PORT/v1 of any OpenAI server")
    parser.add_argument("--model", default="", help="the name by which it serves its model; by default its first one")
    parser.add_argument("--api-key", default="", help="for a server that asks for one")
    parser.add_argument("--rates", default="8", help="requests a second, one load for each: 8,12,16")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--drain-seconds", type=float, default=60.0, help="for answers after the last arrival")
    parser.add_argument("--prompt-tokens", default="lognormal:1410:0.8", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--new-tokens", default="lognormal:239:0.6", help="a number, or lognormal:MEAN:SIGMA")
    parser.add_argument("--context", type=int, default=8192, help="longest prompt and answer together")
    parser.add_argument("--vocab-size", type=int, default=100_000, help="token ids are below it")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and token ids")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--row", default="defaults", help="name of the server's settings in the result")
    parser.add_argument("--device", default="cuda", help="what the server runs on: cpu or cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's weights, for the name of the file")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs a load at each rate, and prints its figures at once."""
    arguments.model = arguments.model or str(list_models(arguments.url, arguments.api_key)[0]["id"])
    source = Synthetic(
        Lengths.parse("--prompt-tokens", arguments.prompt_tokens), Lengths.parse("--new-tokens", arguments.new_tokens)
    )
    rows = []
    for number, rate in enumerate(parse_rates(arguments.rates)):
        # Each load has its own seed, so that no prompt of an earlier one is in a prefix cache.
        workload = source.at(rate, arguments.seconds, arguments.seed + number).fitted(arguments.context)
        rows.append(figures(workload, _send(workload, arguments)))
        print(json.dumps(rows[-1]), flush=True)
        if rows[-1]["errors"] == rows[-1]["n"]:
            raise InvalidArgument("--url", f"no request was answered: {rows[-1]['err']}")
    return rows


def _send(workload: Workload, arguments: argparse.Namespace) -> list[RequestRecord]:
    give_up_s = workload.seconds + arguments.drain_seconds
    shares = [
        HttpShare(
            arguments.url, arguments.model, arguments.api_key, workload.seed, arguments.vocab_size, each, give_up_s
        )
        for each in deal(workload, arguments.clients)
    ]
    return [record for result in run_clients(run_http_share, shares) for record in result.records]


def figures(workload: Workload, records: Sequence[RequestRecord]) -> Row:
    """Returns latencies of the completed requests, and shares of all requests."""
    whole = [record for record in records if not record.error and record.token_s]
    tokens = sum(record.completion_tokens for record in whole)
    gaps = [gap for record in whole for gap in record.gaps_s]
    return {
        "rate": workload.rate,
        "n": len(records),
        "errors": len(records) - len(whole),
        "err": sorted({record.error for record in records if record.error})[:2],
        "late_max": round(max(record.lateness_s for record in records), 4),
        "chunks_per_token": round(sum(record.chunks for record in whole) / max(1, tokens), 3),
        "tok_s": round(tokens / max(record.ended_s for record in records), 1),
        "ttft_ms": _in_ms([record.token_s[0] - record.due_s for record in whole], (50, 90, 99)),
        "gap_ms": _in_ms(gaps, (50, 95, 99, 99.9)),
        "tpot_ms": _in_ms([record.tpot_s for record in whole if record.tpot_s is not None], (50, 90, 99)),
        **{name: _share(cell, records) for name, cell in GOOD.items()},
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in workload.arrivals),
        "out_tokens": tokens,
    }


def _in_ms(values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    return {f"{percent:g}": round(1e3 * percentile(values, percent), 2) for percent in percents} if values else {}


def _share(cell: SloCell, records: Sequence[RequestRecord]) -> float:
    return round(sum(cell.judge(record) is Outcome.MET for record in records) / len(records), 3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sends the loads, and prints the result as JSON last."""
    parsed = parse_arguments(arguments)
    with exit_on_error():
        rows = measure(parsed)
    result = {"model": parsed.model, "rows": {parsed.row: rows}, "dtype": parsed.dtype} | run_facts(parsed.device)
    if parsed.save:
        print("saved", save_result(f"http-{parsed.model.removeprefix('random-')}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
