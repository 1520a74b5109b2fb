"""`tandem generate`: one prompt, one streamed answer."""

from typing import Annotated

import typer

from cli.options import Address, ApiKey, MaxTokens, Seed, Temperature, address_or_newest, checked_prompt
from cli.plain_errors import plain_errors


@plain_errors
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The question; with --raw the text to continue. None or - reads it from stdin."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where the time went.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    address: Address = "",
    api_key: ApiKey = "",
) -> None:
    """Send one prompt and stream the answer."""
    from cli.answering import answer_one
    from cli.client import RouterClient, Sampling

    text = checked_prompt("PROMPT", _piped() if prompt is None or prompt == "-" else prompt)
    sampling = Sampling(max_tokens, temperature, seed)
    client = RouterClient(address_or_newest(address), api_key)
    answer = answer_one(client, text, sampling, raw=raw)
    if timeline:
        from rich.console import Console

        from cli.timeline_table import timeline_table

        Console().print(timeline_table(answer))


def _piped() -> str:
    """Stdin without the newline that `echo` adds. InvalidArgument where it is a terminal, which would just wait."""
    import sys

    from wire.errors import InvalidArgument

    if sys.stdin.isatty():
        raise InvalidArgument("PROMPT", "is missing; give it as an argument or pipe it in")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").removesuffix("\n")
