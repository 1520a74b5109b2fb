"""The `tandem` command. Each command imports what it needs only when it runs, so that --help is quick."""

import importlib.metadata
from typing import Annotated

import typer

from tandem.cli.bench.bench import bench
from tandem.cli.diagnosis.doctor import doctor
from tandem.cli.drafts.train_draft import train_draft
from tandem.cli.observe.logs import logs
from tandem.cli.observe.status import status
from tandem.cli.observe.top import top
from tandem.cli.observe.trace import trace
from tandem.cli.observe.why import why
from tandem.cli.operations.down import down
from tandem.cli.operations.drain import drain
from tandem.cli.operations.lora import lora_commands
from tandem.cli.operations.mode import mode
from tandem.cli.operations.ready import ready
from tandem.cli.operations.scale import scale
from tandem.cli.planning.plan import plan
from tandem.cli.quantization.quantize import quantize
from tandem.cli.requests.chat import chat
from tandem.cli.requests.generate import generate
from tandem.cli.start.settings_command import SettingsCommand, with_model_argument
from tandem.cli.start.up import up


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
app.add_typer(lora_commands, name="lora")


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Holds the options of all commands."""


def main() -> None:
    """Run the `tandem` script."""
    app()


if __name__ == "__main__":
    main()
