"""Errors repeat a client's values in part only, and stay the same errors across a process or the wire."""

import pickle

import pytest

from tandem.protocol.errors import ECHO_CHARS, ContextLengthExceeded, InvalidArgument, clipped, from_code, shown

NAME = "x" * 20_000


def test_a_name_of_20_kb_is_clipped() -> None:
    """A client chooses the names of fields, and logs, statuses and answers repeat the message."""
    error = InvalidArgument(f"options.{NAME}", "is unknown")
    assert error.field == f"options.{NAME}"[: 2 * ECHO_CHARS - 1] + "…"
    assert error.message == str(error) == f"{error.field}: is unknown"
    assert error.problem == "is unknown"
    for same in (pickle.loads(pickle.dumps(error)), from_code(error.code, error.message)):
        assert (type(same), same.field, same.message) == (InvalidArgument, error.field, error.message)


def test_a_name_of_20_kb_is_clipped_where_the_message_does_not_begin_with_it() -> None:
    error = ContextLengthExceeded(NAME, "the context is too small")
    assert len(error.field) == 2 * ECHO_CHARS
    assert error.message == str(error) == "the context is too small"


@pytest.mark.parametrize("length", [ECHO_CHARS - 1, ECHO_CHARS, ECHO_CHARS + 1, 20_000])
def test_a_text_keeps_as_many_characters_as_fit(length: int) -> None:
    text = "x" * length
    assert clipped(text) == (text if length <= ECHO_CHARS else "x" * (ECHO_CHARS - 1) + "…")


@pytest.mark.parametrize(
    "value", [NAME, "\n" * 20_000, [NAME], {NAME: 1}, 10**400], ids=lambda value: type(value).__name__
)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    assert len(shown(value)) <= 2 * ECHO_CHARS
    assert shown(value).isprintable()
