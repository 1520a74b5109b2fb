"""`tandem generate`: one prompt, one streamed answer."""

from typing import Annotated

import typer

from tandem.cli.connection.options import RouterOptions, SamplingOptions, checked_prompt
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors


@plain_errors
@option_groups
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The question; with --raw the text to continue. None or - reads it from stdin."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where the time went.")] = False,
    drawn: SamplingOptions,
    router: RouterOptions,
) -> None:
    """Send one prompt and stream the answer."""
    from tandem.cli.requests.answering import answer_one

    text = checked_prompt("PROMPT", _piped() if prompt is None or prompt == "-" else prompt)
    sampling = drawn.sampling
    with router.client() as client:
        answer = answer_one(client, text, sampling, raw=raw)
    if timeline:
        from rich.console import Console

        from tandem.cli.requests.timeline_table import timeline_table

        Console().print(timeline_table(answer))


def _piped() -> str:
    """Return stdin without the newline that `echo` adds.

    Raises InvalidArgument if stdin is a terminal, because reading would wait for input.
    """
    import sys

    from tandem.protocol.errors import InvalidArgument

    if sys.stdin.isatty():
        raise InvalidArgument("PROMPT", "is missing; give it as an argument or pipe it in")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n")
