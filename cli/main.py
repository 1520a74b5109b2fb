"""The `tandem` command. Each command imports what it needs only when it runs, so that --help is quick."""

import typer

from cli.diagnosis.doctor import doctor
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
from cli.start.up import up

app = typer.Typer(
    help="Serve a language model with prefill and decode on workers of their own.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option, 3 model cannot be served, "
    "4 no cluster runs or it is unavailable, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    up, generate, chat, status, top, why, trace, logs, mode, scale, drain, ready, plan, quantize, doctor, down,
):  # fmt: skip
    app.command()(command)


def main() -> None:
    """Runs the `tandem` script."""
    app()


if __name__ == "__main__":
    main()
