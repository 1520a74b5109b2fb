"""The `tandem` command. Each command imports what it needs only when it runs, so that --help is quick."""

from functools import partial
from typing import Annotated

import typer

from tandem.cli.bench.bench import bench
from tandem.cli.check.check import check
from tandem.cli.diagnosis.doctor import doctor
from tandem.cli.drafts.train_draft import train_draft
from tandem.cli.help_text import GroupedCommands, GroupedHelp, with_help_all
from tandem.cli.models.models_command import models_commands
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
from tandem.cli.planning.advise import advise
from tandem.cli.planning.plan import plan
from tandem.cli.quantization.quantize import quantize
from tandem.cli.requests.chat import chat
from tandem.cli.requests.generate import generate
from tandem.cli.start.settings_command import WAYS_TO_SET, SettingsCommand, with_model_argument
from tandem.cli.start.up import up
from tandem.version import installed_version


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {installed_version()}")
        raise typer.Exit


app = typer.Typer(
    help="Serve a language model with prefill and decode on workers of their own.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option, 3 model cannot be served, "
    "4 no cluster runs or it is unavailable, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=GroupedCommands,
)
SERVE, REQUESTS, OBSERVE, CHANGE, PREPARE = (
    "Start and stop", "Send requests", "Observe", "Change a running cluster", "Plan, and prepare models",
)  # fmt: skip
serving = partial(app.command, cls=SettingsCommand, epilog=WAYS_TO_SET, rich_help_panel=SERVE)
serving()(with_help_all(up))
serving("serve", help="Start a cluster that serves MODEL until Ctrl-C; the same as up.")(
    with_help_all(with_model_argument(up))
)
for group, commands in {
    SERVE: (down, doctor),
    REQUESTS: (generate, chat, bench, check),
    OBSERVE: (status, top, why, trace, logs, ready),
    CHANGE: (mode, scale, drain),
    PREPARE: (plan, advise, quantize, train_draft),
}.items():
    for command in commands:
        app.command(cls=GroupedHelp, rich_help_panel=group)(with_help_all(command))
app.add_typer(lora_commands, name="lora", rich_help_panel=CHANGE)
app.add_typer(models_commands, name="models", rich_help_panel=PREPARE)


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
