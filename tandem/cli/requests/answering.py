"""Streaming of answers to the terminal as they arrive."""

import sys
from collections.abc import Sequence

from tandem.cli.connection.router import Sampling
from tandem.client import Answer, Chunk, Client, InvalidArgument, Message, Stream, TandemError


def answer_one(client: Client, prompt: str, sampling: Sampling, *, raw: bool = False) -> Answer:
    """Stream the answer to one prompt to the terminal, and return it.

    The prompt is sent as a user message. With `raw`, or if the model has no chat template, it is sent as text to
    continue.
    """
    if not raw:
        try:
            return answer_chat(client, [Message("user", prompt)], sampling)
        except InvalidArgument as error:
            if "template" not in error.message:
                raise
    return _show(client.stream_generate(prompt, **sampling.options()))


def answer_chat(client: Client, conversation: Sequence[Message], sampling: Sampling) -> Answer:
    """Stream the answer to a conversation to the terminal, and return it."""
    return _show(client.stream_chat(conversation, **sampling.options()))


def _show(stream: Stream) -> Answer:
    """Print the text of a stream as it arrives, and return the answer.

    A line end follows the text, even after an error or Ctrl-C.
    """
    reasoned = answered = False
    try:
        with stream:
            for chunk in stream:
                # Reasoning is printed but is not part of the answer.
                _print(_text_of(chunk, after_reasoning=reasoned and not answered))
                reasoned, answered = reasoned or bool(chunk.reasoning), answered or bool(chunk.text)
            answer = stream.answer()
    except KeyboardInterrupt:
        _print("\n")
        raise
    except TandemError:
        _print("\n" if reasoned or answered else "")
        raise
    _print("\n")
    return answer


def _text_of(chunk: Chunk, *, after_reasoning: bool) -> str:
    """Return a chunk's text for the terminal, with an empty line between reasoning and content."""
    divider = "\n\n" if chunk.text and (after_reasoning or chunk.reasoning) else ""
    return f"{chunk.reasoning}{divider}{chunk.text}"


def _print(text: str) -> None:
    """Print a piece of text and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
