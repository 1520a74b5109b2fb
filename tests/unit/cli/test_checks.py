"""What the doctor says, for machines good and bad."""

import socket
from pathlib import Path

import pytest

from cli import checks
from cli.checks import Check, Level
from cli.doctor import line
from kv_transfer.backends import BackendReport


def test_python_versions() -> None:
    assert checks.check_python((3, 11, 0)).level is Level.OK
    old = checks.check_python((3, 10, 9))
    assert old.level is Level.FAIL
    assert "3.11" in old.advice


def test_cores() -> None:
    assert checks.check_cores(2).level is Level.OK
    assert checks.check_cores(1).level is Level.WARN


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checks.check_shared_memory(8 << 30).level is Level.OK
    small = checks.check_shared_memory(64 << 20)
    assert small.level is Level.FAIL
    assert "--shm-size" in small.advice
    monkeypatch.setattr(checks, "SHM", tmp_path / "none")
    assert checks.check_shared_memory().found == "missing"


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = checks.check_port("--grpc-port", "127.0.0.1", port, {})
        assert busy.level is Level.FAIL
        assert "--grpc-port" in busy.advice
        assert "in use" in busy.found
        ours = checks.check_port("--grpc-port", "127.0.0.1", port, {port: 42})
        assert ours.level is Level.OK
        assert "42" in ours.found
    assert checks.check_port("--grpc-port", "127.0.0.1", port, {}).level is Level.OK
    assert checks.port_problem("127.0.0.1", 0) is None
    assert checks.port_problem("192.0.2.77", 0) is not None


def test_a_host_that_is_none_fails_before_its_ports() -> None:
    (host,) = checks.check_doors("nosuch.invalid", 0, 0, {})
    assert (host.level, host.name) == (Level.FAIL, "host 'nosuch.invalid'")
    assert "--host" in host.advice
    assert [check.level for check in checks.check_doors("127.0.0.1", 0, 0, {})] == [Level.OK, Level.OK]


@pytest.mark.parametrize(
    ("report", "levels"),
    [
        (BackendReport("", (), (), "NIXL cannot be imported"), [Level.FAIL]),
        (BackendReport("nixl-cu12 1", ("POSIX",), (), ""), [Level.FAIL, Level.WARN]),
        (BackendReport("nixl-cu12 1", ("UCX",), (), ""), [Level.OK, Level.WARN]),
        (BackendReport("nixl-cu12 1", ("UCX",), ("mlx5_0",), ""), [Level.OK, Level.OK]),
    ],
)
def test_transfer(report: BackendReport, levels: list[Level], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.backends.available_backends", lambda: report)
    assert [check.level for check in checks.check_transfer()] == levels


def test_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SMOLLM2_GGUF", "/models/small.gguf")
    assert checks.check_default_model() == Check("small model", Level.OK, "/models/small.gguf")
    monkeypatch.delenv("TANDEM_SMOLLM2_GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = checks.check_default_model()
    assert missing.level is Level.WARN
    assert "--model" in missing.advice


def test_a_line_keeps_brackets_and_shows_advice() -> None:
    text = line(Check("x", Level.WARN, "a [b]", "do [c]"))
    assert "warn" in text
    assert r"a \[b]" in text
    assert r"do \[c]" in text
    assert "→" not in line(Check("x", Level.OK, "fine"))
