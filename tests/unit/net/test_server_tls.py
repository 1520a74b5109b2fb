"""The files of a server's certificate: what is refused, and what happens when they change."""

import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tandem.net.security.server_tls import ServerTls, load, tls_files
from tandem.protocol.errors import InvalidArgument
from tandem.settings.tls import TlsFiles
from tests.certificates import DAY, Authority, Pair, files_of


def encrypted(pair: Pair) -> bytes:
    key = serialization.load_pem_private_key(pair.key, None)
    encryption = serialization.BestAvailableEncryption(b"password")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def test_files_that_cannot_be_used_are_named_by_their_option(tmp_path: Path) -> None:
    authority = Authority("a")
    good, other = authority.issue("good"), authority.issue("other")
    cases: list[tuple[Pair, str]] = [
        (Pair(good.certificate, other.key), r"^--tls-key: .*server.key is not the key of .*server.crt"),
        (authority.issue("old", -DAY), r"^--tls-certificate: .* is valid from .* to .*, not today; renew it"),
        (Pair(b"nothing", good.key), r"^--tls-certificate: .* has no certificate in PEM format"),
        (Pair(good.certificate, b"nothing"), r"^--tls-key: .* has no private key in PEM format"),
        (Pair(good.certificate, encrypted(good)), r"^--tls-key: .* is encrypted; store it without a password"),
    ]
    for pair, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            load(files_of(tmp_path, pair))
    files = files_of(tmp_path, good, authority)
    assert files.client_ca is not None
    files.client_ca.write_text("nothing")
    with pytest.raises(InvalidArgument, match=r"^--tls-client-ca: .* has no certificate in PEM format"):
        load(files)
    files.client_ca.write_text("é")
    with pytest.raises(InvalidArgument, match=r"^--tls-client-ca: "):
        load(files)
    with pytest.raises(InvalidArgument, match=r"^--tls-client-ca: cannot read .* \(No such file or directory\)"):
        load(TlsFiles(files.certificate, files.key, tmp_path / "missing"))


def test_options_belong_together(tmp_path: Path) -> None:
    files = files_of(tmp_path, Authority("a").issue("server"))
    assert tls_files("", "", "") is None
    assert tls_files(str(files.certificate), str(files.key), "") == files
    for options, missing in (
        ((str(files.certificate), "", ""), "--tls-key"),
        (("", str(files.key), ""), "--tls-certificate"),
        (("", "", str(files.certificate)), "--tls-certificate"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{missing}: is missing"):
            tls_files(*options)


def test_a_change_that_cannot_be_used_leaves_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.net.security.watched_files.CHECK_S", 0.0)
    authority = Authority("a")
    first, second = authority.issue("first"), authority.issue("second", 2 * DAY)
    files = files_of(tmp_path, first)
    tls = ServerTls(files)
    before = tls.current()
    files.certificate.write_bytes(second.certificate)  # its key comes later
    with caplog.at_level(logging.ERROR):
        assert tls.current() is before
    assert "the certificate that was read before stays in use" in caplog.text
    files.key.write_bytes(second.key)
    assert tls.current().expires > before.expires + DAY / 2
    for broken in (authority.issue("expired", -DAY).certificate, b""):
        files.certificate.write_bytes(broken)
        assert tls.current().expires > before.expires + DAY / 2
    files.certificate.unlink()
    assert tls.current().expires > before.expires + DAY / 2
