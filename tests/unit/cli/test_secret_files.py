"""Secrets from files: accepted ones, rejected ones, and the warning where others may read them."""

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli.connection.secret_files import first_key, keys_in, one_key
from tandem.cli.main import app
from tandem.protocol.errors import InvalidArgument


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("first # of a client\n  second\tthird\n")
    path.chmod(0o640)
    return path


def test_what_a_file_holds(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert keys_in("--api-key-file", str(file)) == ("first", "second", "third")
    assert first_key("--api-key-file", "", str(file)) == "first"
    assert first_key("--api-key-file", "given", str(file)) == one_key("--token-file", "given", str(file)) == "given"
    assert one_key("--token-file", "", "") == ""
    assert caplog.records == []


def test_a_file_that_others_may_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(0o644)
    assert keys_in("--api-key-file", str(file))
    assert [(record.levelno, str(file) in record.message, "first" in record.message) for record in caplog.records] == [
        (logging.WARNING, True, False)
    ]


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe", b"one two"])
def test_a_file_without_the_secret_names_its_option(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(InvalidArgument, match=f"^--token-file: .*{path}"):
        one_key("--token-file", "", str(path))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["up"], "--api-key-file"),
        (["up"], "--token-file"),
        (["up"], "--metrics-key-file"),
        (["generate", "x", "--address", "127.0.0.1:1"], "--api-key-file"),
        (["status", "--address", "127.0.0.1:1"], "--api-key-file"),
        (["mode", "colocated", "--controller", "127.0.0.1:1"], "--token-file"),
        (["top", "--metrics", "127.0.0.1:1"], "--metrics-key-file"),
        (["why", "--metrics", "127.0.0.1:1"], "--metrics-key-file"),
        (["trace", "--router", "127.0.0.1:1"], "--metrics-key-file"),
    ],
)
def test_every_command_that_shows_a_secret_reads_it_from_a_file(
    command: list[str], option: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*command, option, str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert result.stderr == f"error: {option}: cannot read {tmp_path}/missing (No such file or directory)\n"


def test_a_key_that_no_client_could_show_names_the_option_of_its_file(file: Path) -> None:
    file.write_text("sécret")
    with pytest.raises(InvalidArgument, match=r"^--api-key-file: must be ASCII"):
        keys_in("--api-key-file", str(file))
