"""Files of API keys: their syntax, their errors, and their reload while a process runs."""

import hashlib
import logging
from pathlib import Path

import pytest

from tandem.capacity.simulation.clock import VirtualClock
from tandem.net.security.api_keys import (
    ApiKey,
    ApiKeys,
    KeyRole,
    KeySource,
    check_role,
    digest_of,
    parse_keys,
    plain_keys,
)
from tandem.net.security.watched_files import CHECK_S
from tandem.protocol.errors import InvalidArgument, PermissionDenied, Unauthenticated


def shown(key: str) -> list[tuple[str | bytes, str | bytes]]:
    return [("authorization", f"Bearer {key}")]


def test_a_line_has_a_key_and_its_settings() -> None:
    hashed = hashlib.sha256(b"third").hexdigest()
    text = (
        "first second== # two tenants, and base64\n\nfourth name=acme requests_per_minute=6 tokens_per_minute=70\n"
        f"sha256:{hashed} name=ops role=operator"
    )
    assert parse_keys(text) == (
        ApiKey(digest_of("first")),
        ApiKey(digest_of("second==")),
        ApiKey(digest_of("fourth"), "acme", KeyRole.TENANT, 6, 70),
        ApiKey(digest_of("third"), "ops", KeyRole.OPERATOR),
    )
    assert plain_keys(text.partition("\n\n")[2].split()) == ["fourth"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ok\nname=acme", "line 2: name= has no key before it"),
        ("SECRET role=root", "line 1: role: must be one of tenant, operator, reader"),
        ("SECRET name=", "line 1: name: must have 1 to 64"),
        ("SECRET tokens_per_minute=0", "line 1: tokens_per_minute: must be a whole number from 1"),
        ("SECRET tokens_per_minute=1e6", "line 1: tokens_per_minute: must be a whole number"),
        ("SECRET requests_per_minute=99999999999999999999", "line 1: requests_per_minute: must be a whole number"),
        ("SECRET request_per_minute=6", "line 1: has a setting that is not one of name=, role="),
        ("SECRET Role=operator", "line 1: has a setting that is not one of"),
        ("SECRET name = acme", "line 1: has a setting that is not one of"),
        ("SECRET=x", "line 1: has a setting that is not one of .* as its sha256:"),
        ("SECRET name=two words", "line 1: has a word after the settings"),
        ("sha256:SECRET", "line 1: sha256: is not followed by 64 hexadecimal digits"),
        ("SECRÉT", "line 1: must be ASCII"),
        ("SECRET name=a\nSECRET name=b", "one key is on two lines with different settings"),
        ("SECRET name=a\nother name=a role=operator", "the keys of a differ in role or quotas"),
    ],
)
def test_an_error_names_its_line_and_no_key(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_keys(text)
    assert "SECR" not in caught.value.message


def test_a_key_is_found_by_its_hash_and_its_settings_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sha256:{digest_of('hashed').hex()} name=h\nboth name=b requests_per_minute=1\n")
    keys = ApiKeys(KeySource(("given", "both"), file, frozenset({"metrics", ""})))
    for key, name, role in (("hashed", "h", "tenant"), ("given", "", "tenant"), ("metrics", "metrics", "reader")):
        match = keys.find(shown(key))
        assert match is not None
        assert (match.name, match.role) == (name, role)
    both = keys.find(shown("both"))
    assert both is not None
    assert both.requests_per_minute == 1, "a key given twice has the quota of the file"
    for wrong in ("", "other", digest_of("hashed").hex(), f"sha256:{digest_of('hashed').hex()}"):
        assert keys.find(shown(wrong)) is None
        with pytest.raises(Unauthenticated):
            keys.check(shown(wrong))
    assert "given" not in repr(KeySource(("given",)))


def test_keys_are_searched_by_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison a call, whatever the number of keys; a digest is compared in constant time."""
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = ApiKeys(KeySource(tuple(f"key-{number}" for number in range(1000))))
    match = keys.find(shown("key-7"))
    assert match is not None
    assert compared == [(digest_of("key-7"), digest_of("key-7"))]
    assert keys.find(shown("other")) is None
    assert len(compared) == 2


def test_keys_are_rotated_while_the_process_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys", VirtualClock()
    file.write_text("old")
    keys = ApiKeys(KeySource(file=file), clock)

    def accepted() -> list[str]:
        clock.now += CHECK_S
        return [key for key in ("old", "new") if keys.find(shown(key)) is not None]

    file.write_text("old new")
    assert accepted() == ["old", "new"], "both are valid together"
    (tmp_path / "next").write_text("new")
    (tmp_path / "next").replace(file)
    assert accepted() == ["new"], "as Kubernetes replaces it"
    for broken in ("new role=root", "# none left", None):
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            assert accepted() == ["new"], "an error in the file changes nothing, and opens nothing"
            assert "stay valid" in caplog.text
            caplog.clear()
            assert accepted() == ["new"]
            assert caplog.text == "", "it is said once"
    file.write_text("old")
    assert accepted() == ["old"]


def test_a_missing_or_empty_file_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        ApiKeys(KeySource(file=tmp_path / "keys"))
    (tmp_path / "keys").write_text("# none")
    with pytest.raises(InvalidArgument, match="no secret"):
        ApiKeys(KeySource(file=tmp_path / "keys"))


def test_a_role_is_needed() -> None:
    check_role(ApiKey(b"", role=KeyRole.OPERATOR), KeyRole.OPERATOR, KeyRole.READER)
    with pytest.raises(PermissionDenied, match="operator or reader; this key has the role tenant"):
        check_role(ApiKey(b""), KeyRole.OPERATOR, KeyRole.READER)
