"""Addresses as text, and from where they can be reached."""

import pytest

from tandem.net.address import address_of, host_and_port, is_loopback


@pytest.mark.parametrize(
    ("host", "text"), [("127.0.0.1", "127.0.0.1:80"), ("localhost", "localhost:80"), ("::1", "[::1]:80")]
)
def test_ipv6_is_in_brackets(host: str, text: str) -> None:
    assert address_of(host, 80) == text
    assert host_and_port(text) == (host, 80)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.0.2.1", False),
        ("fe80::1%lo", False),
        ("name.invalid", False),
    ],
)
def test_only_loopback_is_private(host: str, *, loopback: bool) -> None:
    assert is_loopback(host) is loopback
