"""The `tandem` command. Each command imports what it needs only when it runs, so that --help is quick."""

import importlib.metadata
from typing import Annotated

import typer

from cli.bench.bench import bench
from cli.diagnosis.doctor import doctor
from cli.drafts.train_draft import train_draft
from cli.observe.logs import logs
from cli.observe.status import status
from cli.observe.top import top
from cli.observe.trace import trace
from cli.observe.why import why
from cli.operations.down import down
from cli.operations.drain import drain
from cli.operations.mode import mode
from cli.operations.ready import ready
from cli.operations.scale import scale
from cli.planning.plan import plan
from cli.quantization.quantize import quantize
from cli.requests.chat import chat
from cli.requests.generate import generate
from cli.start.settings import SettingsCommand, with_model_argument
from cli.start.up import up


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {importlib.metadata.version('tandem')}")
        raise typer.Exit


app = typer.Typer(
    help="Serve a language model with prefill and decode on workers of their own.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option, 3 model cannot be served, "
    "4 no cluster runs or it is unavailable, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(cls=SettingsCommand)(up)
serve_help = "Start a cluster that serves MODEL until Ctrl-C; the same as up."
app.command("serve", cls=SettingsCommand, help=serve_help)(with_model_argument(up))
for command in (
    generate, chat, bench, status, top, why, trace, logs, mode, scale, drain, ready, plan, quantize, train_draft,
    doctor, down,
):  # fmt: skip
    app.command()(command)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Holds the options of all commands."""


def main() -> None:
    """Runs the `tandem` script."""
    app()


if __name__ == "__main__":
    main()
