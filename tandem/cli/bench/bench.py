"""`tandem bench`: open-loop load against any server, with latencies, throughput and goodput at each rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.connection.options import ApiKey, ApiKeyFile, TlsClientCertificate, TlsClientKey, key_option
from tandem.cli.help_text import further_option
from tandem.cli.option_groups import option_groups
from tandem.cli.picture_file import check_picture, pictures
from tandem.cli.plain_errors import INTERRUPTED, plain_errors

if TYPE_CHECKING:
    from tandem.cli.bench.figures import Load
    from tandem.cli.bench.servers import Server
    from tandem.cli.connection.state import RunningCluster
    from tandem.cli.load.run import LoadSettings
    from tandem.cli.load.slo import SloCell
    from tandem.cli.load.workload import Source, Workload

request_option = further_option("Requests and clients")
_ARRIVALS = {"poisson": 1.0, "constant": 0.0}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options that describe the server under load."""

    url: Annotated[
        str,
        typer.Option(
            "--url", help="http://HOST:PORT/v1 of any OpenAI server, or grpc://HOST:PORT; default: the running cluster."
        ),
    ] = ""
    model: Annotated[str, typer.Option("--model", help="Name of the model; default: the first that it lists.")] = ""
    api_key: ApiKey = ""
    api_key_file: ApiKeyFile = ""
    tls_ca: Annotated[
        str,
        key_option(
            "--tls-ca",
            envvar="TANDEM_TLS_CA",
            help="PEM file with the authority of the server's certificate, for TLS by gRPC; by HTTPS that of "
            "SSL_CERT_FILE is trusted.",
        ),
    ] = ""
    tls_client_certificate: TlsClientCertificate = ""
    tls_client_key: TlsClientKey = ""
    api: Annotated[str, typer.Option("--api", help="By HTTP: completions, or chat.")] = "completions"
    vocab_size: Annotated[
        int, request_option("--vocab-size", min=1, help="Token ids of completions are drawn below it.")
    ] = 30_000
    ignore_eos: Annotated[
        bool, request_option(help="Ask for answers of exactly the drawn length; others then count as errors.")
    ] = True

    def find(self) -> Server:
        """Connect and return the server. Raises Unavailable if it does not respond."""
        from tandem.cli.bench.servers import find_server
        from tandem.cli.connection.options import shown_key
        from tandem.cli.connection.router import tls_of
        from tandem.cli.connection.state import newest
        from tandem.protocol.errors import InvalidArgument

        if self.api not in ("completions", "chat"):
            raise InvalidArgument("--api", f"{self.api!r} is neither completions nor chat")
        url = self.url or url_of(newest())
        key = shown_key(self.api_key, self.api_key_file)
        tls = tls_of(self.tls_ca, self.tls_client_certificate, self.tls_client_key)
        return find_server(url, key, self.model, self.api, self.vocab_size, ignore_eos=self.ignore_eos, tls=tls)


def url_of(cluster: RunningCluster) -> str:
    """Return the URL of a cluster's OpenAI API."""
    scheme = "https" if cluster.certificate else "http"
    return f"{scheme}://{cluster.http.partition('://')[2] or cluster.http}/v1"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options that describe the requests and their arrival times."""

    rate: Annotated[str, typer.Option("--rate", "--rates", help="Requests a second, one load for each: 4,8,16.")] = ""
    duration: Annotated[float, typer.Option("--duration", help="Seconds of each load.")] = 30.0
    arrivals: Annotated[str, request_option("--arrivals", help="poisson, or constant gaps.")] = "poisson"
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", help="A number, or lognormal:MEAN:SIGMA.")] = "512"
    answer_tokens: Annotated[str, typer.Option("--answer-tokens", help="A number, or lognormal:MEAN:SIGMA.")] = "128"
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            help="JSON lines with prompt or messages, or a trace (timestamp, input_length, output_length); a trace "
            "without --rate has its own speed.",
        ),
    ] = None
    seed: Annotated[int, request_option("--seed", min=0, help="Of arrivals, lengths and token ids.")] = 0
    warm_up: Annotated[int, request_option("--warm-up", min=0, help="Requests before the load, in no figure.")] = 8
    drain: Annotated[float, request_option("--drain", help="Seconds for answers after the last arrival.")] = 60.0
    clients: Annotated[int, request_option("--clients", min=1, help="Client processes.")] = 2

    def settings(self) -> LoadSettings:
        """Return the settings of the client processes."""
        from tandem.cli.load.run import LoadSettings

        return LoadSettings(clients=self.clients, drain_s=self.drain)

    def workloads(self) -> list[Workload]:
        """Return one workload per rate. Raises InvalidArgument, which names the wrong option."""
        from dataclasses import replace

        from tandem.cli.load.trace import Trace
        from tandem.cli.load.workload import parse_rates
        from tandem.protocol.errors import InvalidArgument

        if not 0 < self.duration < float("inf"):
            raise InvalidArgument("--duration", f"{self.duration:g} is no number of seconds above 0")
        if not 0 <= self.drain < float("inf"):
            raise InvalidArgument("--drain", f"{self.drain:g} is no number of seconds")
        source = self._source()
        if isinstance(source, Trace) and not self.rate:
            return [source.at_speed(1.0, self.duration, self.seed)]
        made = [source.at(rate, self.duration, self.seed) for rate in parse_rates(self.rate or "1", "--rate")]
        # Each load has its own token ids, so that no prompt hits the prefix cache entries of an earlier load.
        return [replace(workload, seed=self.seed + number) for number, workload in enumerate(made)]

    def _source(self) -> Source:
        from tandem.cli.load.dataset import read_dataset
        from tandem.cli.load.synthetic import Lengths, Synthetic
        from tandem.protocol.errors import InvalidArgument

        if self.arrivals not in _ARRIVALS:
            raise InvalidArgument("--arrivals", f"{self.arrivals!r} is neither poisson nor constant")
        cv = _ARRIVALS[self.arrivals]
        answer = Lengths.parse("--answer-tokens", self.answer_tokens)
        if self.dataset is not None:
            return read_dataset(self.dataset, answer, cv)
        return Synthetic(Lengths.parse("--prompt-tokens", self.prompt_tokens), answer, cv)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """The options that describe the outputs of a run."""

    slo_ttft: Annotated[float | None, typer.Option(help="Target of goodput: milliseconds to the first token.")] = None
    slo_itl: Annotated[
        float | None, typer.Option(help="Target of goodput: milliseconds between tokens, of 99 in 100 gaps.")
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the latencies there: FILE.svg or FILE.png.")] = None

    def check(self) -> None:
        """Raise InvalidArgument, before any load, for an output file that cannot be written."""
        from tandem.protocol.errors import InvalidArgument

        if self.json_file is not None and not self.json_file.absolute().parent.is_dir():
            raise InvalidArgument("--json", f"{self.json_file.parent} is no folder; make it first")
        if self.plot is not None:
            check_picture(self.plot)

    def cells(self) -> list[SloCell]:
        """Return one cell with the goodput targets, or no cell if no target is given.

        A target that is not given is infinite. Raises InvalidArgument for a target that is not above 0.
        """
        import math

        from tandem.cli.load.slo import SloCell
        from tandem.cli.planning.plan_options import check_above_0

        for option, limit in (("--slo-ttft", self.slo_ttft), ("--slo-itl", self.slo_itl)):
            if limit is not None:
                check_above_0(option, limit)
        if self.slo_ttft is None and self.slo_itl is None:
            return []
        limits = (math.inf if limit is None else limit / 1e3 for limit in (self.slo_ttft, self.slo_itl))
        return [SloCell(self.targets(), *limits)]

    def targets(self) -> str:
        """Return the goodput targets as text for the table."""
        named = (("TTFT", self.slo_ttft), ("ITL", self.slo_itl))
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in named if limit is not None)


@plain_errors
@option_groups
def bench(*, server: ServerOptions, load: LoadOptions, results: ResultOptions) -> None:
    """Measure a server under open-loop load: latencies, throughput and goodput at each rate."""
    from rich.console import Console

    from tandem.cli.bench.measure import measure

    results.check()
    cells, workloads = results.cells(), load.workloads()
    console = Console(stderr=True)
    target = server.find()
    with console.status(f"warming up {target.model}"):
        target.warm_up(load.warm_up)
    loads = measure(target, workloads, cells, load.settings(), console)
    if not loads:
        raise typer.Exit(INTERRUPTED)
    _write(target, load, results, loads)
    if loads[-1].interrupted:
        raise typer.Exit(INTERRUPTED)


def _write(server: Server, load: LoadOptions, results: ResultOptions, loads: list[Load]) -> None:
    import json
    import sys

    from rich.console import Console

    from tandem.cli.bench.figures import result_of, table
    from tandem.cli.observe.status import WIDE

    (Console() if sys.stdout.isatty() else Console(width=WIDE)).print(table(loads, results.targets()))
    result = result_of(server.model, load.seed, results.cells(), loads)
    if results.json_file is not None:
        results.json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if results.plot is not None:
        plots = pictures()
        plots.draw_latencies(plots.run_of(server.model, result), results.plot)
