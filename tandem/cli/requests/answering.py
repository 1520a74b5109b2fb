"""Answers streamed to the terminal as they come."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from tandem.cli.connection.client import Answer, RouterClient, Sampling
from tandem.protocol.errors import InvalidArgument, TandemError


def answer_one(client: RouterClient, prompt: str, sampling: Sampling, *, raw: bool = False) -> Answer:
    """Prints the answer to one prompt piece by piece and returns it; `raw` continues the text without a template.

    A model without a chat template continues the text too.
    """
    return asyncio.run(_answer_one(client, prompt, sampling, raw))


async def _answer_one(client: RouterClient, prompt: str, sampling: Sampling, raw: bool) -> Answer:
    if not raw:
        try:
            return await answer_chat(client, [("user", prompt)], sampling)
        except InvalidArgument as error:
            if "template" not in error.message:
                raise
    return await _on_lines_of_its_own(lambda on_text: client.complete(prompt, sampling, on_text))


async def answer_chat(client: RouterClient, messages: list[tuple[str, str]], sampling: Sampling) -> Answer:
    """Prints the answer to a conversation of (role, content) pairs and returns it."""
    return await _on_lines_of_its_own(lambda on_text: client.chat(messages, sampling, on_text))


async def _on_lines_of_its_own(ask: Callable[[Callable[[str], None]], Awaitable[Answer]]) -> Answer:
    """Streams an answer so that any later output, an error or Ctrl-C's echo included, begins on a new line."""
    begun = False

    def on_text(text: str) -> None:
        nonlocal begun
        begun = True
        show(text)

    try:
        answer = await ask(on_text)
    except asyncio.CancelledError:
        show("\n")
        raise
    except TandemError:
        show("\n" if begun else "")
        raise
    show("\n")
    return answer


def show(text: str) -> None:
    """Prints a piece at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
