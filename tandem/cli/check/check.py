"""`tandem check`: whether a server answers right while clients leave, repeat, wait and a part of it restarts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.connection.options import ApiKey, ApiKeyFile, MetricsKey
from tandem.cli.help_text import further_option
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import FAILED, plain_errors

if TYPE_CHECKING:
    from tandem.cli.check.run import CheckResult, CheckSettings
    from tandem.cli.check.server import CheckedServer

request_option = further_option("Requests")
"""The defaults of these options are those of `CheckSettings`."""


@dataclass(frozen=True, slots=True)
class CheckedServerOptions:
    """The options that describe the server under test."""

    url: Annotated[
        str, typer.Option("--url", help="http://HOST:PORT/v1 of any OpenAI server; default: the running cluster.")
    ] = ""
    pair: Annotated[
        tuple[str, str],
        typer.Option(
            "--pair",
            metavar="PREFILL DECODE",
            help="Instead of --url: the URLs of a prefill and of a decode server of vLLM with a KV connector.",
        ),
    ] = ("", "")
    model: Annotated[str, typer.Option("--model", help="Name of the model; default: the first that it lists.")] = ""
    api_key: ApiKey = ""
    api_key_file: ApiKeyFile = ""
    metrics: Annotated[
        str, typer.Option("--metrics", help="URL of the server's metrics; default: its /metrics, without /v1.")
    ] = ""
    metrics_key: MetricsKey = ""
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds after which a request hangs.")] = 120.0

    def find(self) -> CheckedServer:
        """Return the server. Raises Unavailable if it does not list its models."""
        from tandem.cli.bench.bench import url_of
        from tandem.cli.bench.servers import list_models, with_version
        from tandem.cli.check.pair import PairServer
        from tandem.cli.check.server import CheckedServer
        from tandem.cli.connection.options import shown_key
        from tandem.cli.connection.state import newest
        from tandem.protocol.errors import InvalidArgument

        prefill, decode = self.pair
        if prefill and self.url:
            raise InvalidArgument("--pair", "is given together with --url; give one of them")
        key, metrics = shown_key(self.api_key, self.api_key_file), (self.metrics, self.metrics_key)
        if not prefill and not self.url:
            cluster = newest()
            url = url_of(cluster)
            metrics = metrics if self.metrics else (f"http://{cluster.metrics}/metrics", cluster.metrics_key)
        else:
            url = with_version(decode or self.url)
        model = self.model or str(list_models(url, key)[0]["id"])
        if prefill:
            return PairServer(with_version(prefill), url, model, key, self.timeout)
        return CheckedServer(url, model, key, self.timeout, metrics)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options that describe the requests."""

    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Name of a check to run; repeatable.")
    ] = None
    restart_command: Annotated[
        str,
        typer.Option(
            "--restart-command",
            help="Shell command that restarts a part of the server, for the check `restart`: docker restart decode-0.",
        ),
    ] = ""
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts.")] = 0
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of each check.")] = 3
    repeats: Annotated[int, request_option("--repeats", min=1, help="How often the same prompt is sent.")] = 1000
    concurrency: Annotated[int, request_option("--concurrency", min=4, help="Requests that run at once.")] = 16
    prompt_words: Annotated[
        int, request_option("--prompt-words", min=8, help="Different words of a prompt, which has each twice.")
    ] = 128
    answer_tokens: Annotated[int, request_option("--answer-tokens", min=4, help="Tokens of an answer.")] = 48
    settle: Annotated[
        float, request_option("--settle", min=0, help="Seconds until no request may remain after its client has left.")
    ] = 30.0
    tolerance: Annotated[
        float,
        request_option(
            "--tolerance",
            min=0,
            help="Nats between two tokens up to which rounding may choose either; 0: answers must be equal.",
        ),
    ] = 0.5
    recovery: Annotated[
        float, request_option("--recovery", min=0, help="Seconds after the restart until answers must be right again.")
    ] = 180.0

    def settings(self) -> CheckSettings:
        """Return the settings of the checks."""
        from tandem.cli.check.run import CheckSettings

        return CheckSettings(
            seed=self.seed,
            rounds=self.rounds,
            repeats=self.repeats,
            concurrency=self.concurrency,
            prompt_words=self.prompt_words,
            answer_tokens=self.answer_tokens,
            settle_s=self.settle,
            tolerance=self.tolerance,
            recovery_s=self.recovery,
        )


@plain_errors
@option_groups
def check(
    *,
    server: CheckedServerOptions,
    checks: CheckOptions,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    scripts: Annotated[
        Path | None, typer.Option("--scripts", help="Folder for a shell script for each check that fails.")
    ] = None,
) -> None:
    """Check that a server answers right while clients leave, repeat and wait; fails if an answer was wrong.

    Sends greedy requests to a server without other load, and compares each answer with the one that it gave alone.
    """
    import asyncio

    from tandem.cli.check.suite import chosen_checks, run_checks
    from tandem.protocol.errors import InvalidArgument

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise InvalidArgument("--json", f"{json_file.parent} is no folder; make it first")
    chosen = chosen_checks(checks.only or [], pair=bool(server.pair[0]), restart_command=checks.restart_command)
    target = server.find()
    results = asyncio.run(run_checks(target, chosen, checks.settings()))
    _write(target, checks, results, json_file, scripts)
    if any(result.level == "fail" for result in results):
        raise typer.Exit(FAILED)


def _write(
    target: CheckedServer,
    checks: CheckOptions,
    results: list[CheckResult],
    json_file: Path | None,
    scripts: Path | None,
) -> None:
    import sys
    from dataclasses import asdict

    from rich.console import Console

    from tandem.cli.check.report import as_json, table, write_scripts
    from tandem.cli.observe.status import WIDE

    reproducers = [f"tandem check {target.option} --only {one.name} --seed {checks.seed}" for one in results]
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    if target.unsupported:
        console.print(f"The server refuses {', '.join(sorted(target.unsupported))}: requests do without.")
    console.print(table(results, reproducers))
    if json_file is not None:
        about = {"url": target.url, "model": target.model, "refused_fields": sorted(target.unsupported)}
        json_file.write_text(as_json(about | asdict(checks.settings()), results, reproducers), encoding="utf-8")
    for file in [] if scripts is None else write_scripts(scripts, results):
        console.print(f"{file} sends the requests of a failure again")
