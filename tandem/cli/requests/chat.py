"""`tandem chat`: a conversation at the terminal."""

from typing import TYPE_CHECKING

from tandem.cli.connection.options import RouterOptions, SamplingOptions
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from tandem.cli.connection.router import Sampling
    from tandem.client import Client, Message

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


@plain_errors
@option_groups
def chat(*, drawn: SamplingOptions, router: RouterOptions) -> None:
    """Talk to the model; the conversation is remembered until it ends."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())

    sampling = drawn.sampling
    with router.client() as client:
        print(HELP)
        messages: list[Message] = []
        while (line := _read()) is not None:
            if line == "/clear":
                messages.clear()
            elif not line:
                print("the prompt is empty; type a question")
            elif line.startswith("/"):
                print(f"{line.split()[0]} is no command: {HELP}")
            else:
                _turn(client, sampling, messages, line)


def _turn(client: "Client", sampling: "Sampling", messages: "list[Message]", line: str) -> None:
    """Send one message and stream its answer; append both to `messages` if the answer is complete."""
    import sys

    from tandem.cli.requests.answering import answer_chat
    from tandem.client import Message, TandemError

    question = Message("user", line)
    try:
        answer = answer_chat(client, [*messages, question], sampling)
    except KeyboardInterrupt:
        print("(stopped)")
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
    else:
        messages += [question, Message("assistant", answer.text)]


def _read() -> str | None:
    """Read the user's next line, or None if the user has ended the conversation."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line in ("/exit", "/quit") else line
