"""The `tandem` command. Each command's file imports what it needs when it runs, so that --help is quick."""

import typer

from cli.chat import chat
from cli.doctor import doctor
from cli.down import down
from cli.drain import drain
from cli.generate import generate
from cli.logs import logs
from cli.mode import mode
from cli.plan import plan
from cli.ready import ready
from cli.scale import scale
from cli.status import status
from cli.top import top
from cli.trace import trace
from cli.up import up
from cli.why import why

app = typer.Typer(
    help="Serve a language model with prefill and decode on workers of their own.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option, 3 model cannot be served, "
    "4 no cluster runs or it is unavailable, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (up, generate, chat, status, top, why, trace, logs, mode, scale, drain, ready, plan, doctor, down):
    app.command()(command)


def main() -> None:
    """Entry point of the `tandem` script."""
    app()


if __name__ == "__main__":
    main()
