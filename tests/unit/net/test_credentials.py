"""The valid forms of an API key, and the key that a call presents."""

import pytest

from tandem.net.security.credentials import presented_key, shows_key
from tandem.protocol.errors import InvalidArgument
from tandem.settings.parsing import check_key


@pytest.mark.parametrize("key", ["", " ", "é", "a b", "a\n", "a\0"])
def test_a_key_that_no_header_carries_is_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check_key("--api-key", key)
    assert refusal.value.field == "--api-key"


def test_a_usual_key_is_none_of_them() -> None:
    check_key("--api-key", "sk-A1_b2.c3/+=~")


@pytest.mark.parametrize(
    ("header", "enters"),
    [
        ("Bearer right", True),
        (b"bearer right", True),
        ("Bearer other", True),
        ("Bearer wrong", False),
        ("right", False),
        ("Basic right", False),
        ("Bearerright", False),
        ("Bearer ", False),
        ("", False),
        (b"Bearer \xe9", False),
    ],
)
def test_only_a_bearer_of_a_known_key_enters(header: str | bytes, enters: bool) -> None:
    sent = [("accept", "*/*"), ("authorization", header)]
    assert shows_key(sent, ("right", "other", "")) is enters
    assert not shows_key(sent, ("",))


@pytest.mark.parametrize("header", ["Bearer right", b"bearer right", "BEARER   right", b"Bearer right  "])
def test_the_key_that_matched_is_returned_however_the_header_is_written(header: str | bytes) -> None:
    """Regression: tenants were identified by the header, which has many spellings of one key."""
    assert presented_key([("authorization", header)]) == b"right"
    assert presented_key([(b"authorization", header)]) == b"right"
    assert presented_key([]) is None


def test_a_header_that_is_sent_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 times"):
        presented_key([("authorization", "Bearer right"), (b"authorization", b"Bearer right")])
