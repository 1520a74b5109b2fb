"""The page of errors has every code and the messages that commands and APIs give, with what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from deploy import errors_page
from tandem.cli.main import app
from tandem.client.connection import PYTHON
from tandem.net.security.api_keys import no_valid_key
from tandem.protocol import errors
from tandem.protocol.errors import TandemError

KNOWN_CHARS = 15
"""The fewest characters of a message that must be on the page, so that a search can find it."""
MESSAGES = {message: key for key, texts in errors_page.messages().items() for message in texts}
WRONG = (
    ("up", "--host", "0.0.0.0"),
    ("up", "--model", "/nowhere"),
    ("up", "--workers", "0"),
    ("up", "--config", "/nowhere.yaml"),
    ("plan", "--shape", "llama-9"),
    ("plan", "--gpu", "L4", "--shape", "llama-3-70b"),
    ("plan", "--rate", "0"),
    ("status", "--address", "127.0.0.1:1"),
    ("generate", "Hello", "--address", "127.0.0.1:1", "--temperature", "9"),
    ("bench", "--url", "http://127.0.0.1:1/v1", "--rate", "x"),
    ("drain",),
)
"""Commands that fail before anything runs."""


def found(message: str) -> list[str]:
    """Returns the messages of the page that a run's message comes from and that have enough words to search for."""
    said = " ".join(message.split())
    return [
        listed
        for listed in MESSAGES
        if len(listed.replace(errors_page.UNKNOWN, "")) >= KNOWN_CHARS and errors_page.pattern(listed).fullmatch(said)
    ]


def test_each_code_has_a_section_and_what_to_do() -> None:
    codes = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)}
    assert errors_page.REMEDIES.keys() == codes
    page = errors_page.PAGE.read_text(encoding="utf-8")
    assert [code for code in codes if f"\n## {code}\n" not in page] == []


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_the_message_of_a_command_is_on_the_page(command: Sequence[str]) -> None:
    done = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    assert done.exit_code in (1, 2, 3, 4), done.output
    said = re.findall(r"^[Ee]rror: (.+)$", done.output, re.MULTILINE)
    assert said, done.output
    assert found(said[0]), said[0]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (no_valid_key().message, "UNAUTHENTICATED"),
        (PYTHON.unreachable.format(router="the router at a:1", details="refused"), "UNAVAILABLE"),
        ("no prefill worker is serving now; try again in a moment", "UNAVAILABLE"),
        ("1024 requests are waiting, the most this router queues; try again later", "RESOURCE_EXHAUSTED"),
    ],
)
def test_messages_of_the_apis_are_under_their_codes(message: str, code: str) -> None:
    assert {MESSAGES[listed][0] for listed in found(message)} == {code}


def test_texts_that_a_branch_or_a_variable_has_are_found() -> None:
    source = """
def f(x):
    what = "first" if x else f"second {x}"
    raise Unavailable(f"{what}: " + "ends")
"""
    listed = list(errors_page._messages_of(ast.parse(source)))
    assert listed == [("UNAVAILABLE", "first: ends"), ("UNAVAILABLE", "second …: ends")]
    pattern = errors_page.pattern("second …: ends")
    assert pattern.fullmatch("second 3: ends")
    assert not pattern.fullmatch("third 3: ends")
