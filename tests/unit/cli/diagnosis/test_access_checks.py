"""The checks of `tandem doctor` for files with API keys and certificates."""

from datetime import timedelta
from pathlib import Path

from tandem.cli.diagnosis.access_checks import check_certificate, check_key_file
from tandem.cli.diagnosis.checks import Check, Level
from tests.certificates import DAY, Authority


def only(checks: list[Check]) -> Check:
    (one,) = checks
    return one


def test_a_key_file(tmp_path: Path) -> None:
    assert check_key_file("") == []
    file = tmp_path / "keys"
    file.write_text("a b\nc name=ops role=operator")
    file.chmod(0o600)
    assert only(check_key_file(str(file))) == Check("API keys", Level.OK, "2 of role tenant, 1 of role operator")
    file.chmod(0o604)
    assert only(check_key_file(str(file))).level is Level.WARN
    file.write_text("secret role=root")
    wrong = only(check_key_file(str(file)))
    assert wrong.level is Level.FAIL
    assert "line 1: role" in wrong.found
    assert "secret" not in wrong.found
    assert "No such file" in only(check_key_file(str(tmp_path / "missing"))).found


def test_a_certificate(tmp_path: Path) -> None:
    assert check_certificate("", "", "") == []
    authority = Authority("a")

    def checked(lasts: timedelta) -> Check:
        certificate, key = authority.issue("server", lasts).save(tmp_path, "server")
        return only(check_certificate(str(certificate), str(key), ""))

    assert checked(30 * DAY).level is Level.OK
    soon = checked(3 * DAY)
    assert (soon.level, "renew it" in soon.advice) == (Level.WARN, True)
    assert checked(-DAY).level is Level.FAIL
    assert "--tls-key: is missing" in only(check_certificate(str(tmp_path / "server.crt"), "", "")).found
