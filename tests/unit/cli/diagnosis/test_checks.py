"""The output of `tandem doctor` for good and bad machines."""

import socket
from pathlib import Path

import pytest

from kv_transfer.backends import BackendReport
from tandem.cli.diagnosis import checks
from tandem.cli.diagnosis.checks import Check, Level
from tandem.cli.diagnosis.doctor import line


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


def test_a_gpu_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    capability = [(9, 0)]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability[0])
    assert checks.check_gpu() == Check("GPU", Level.OK, "NVIDIA H200")
    capability[0] = (8, 0)
    assert "take int8" in checks.check_gpu().advice
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without = checks.check_gpu()
    assert (without.level, without.advice) == (Level.FAIL, "pip install 'tandem-serving[gpu]'")


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
    (host,) = checks.check_listeners("nosuch.invalid", 0, 0, {})
    assert (host.level, host.name) == (Level.FAIL, "host 'nosuch.invalid'")
    assert "--host" in host.advice
    assert [check.level for check in checks.check_listeners("127.0.0.1", 0, 0, {})] == [Level.OK, Level.OK]


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


def test_a_running_tandem_that_shows_a_secret_is_warned_of() -> None:
    running = [
        (7, ["/usr/bin/python", "/opt/bin/tandem", "up", "--token", "s3cret", "--api-key=k3y"]),
        (8, ["python", "-m", "tandem.cli.main", "top", "--metrics-key", "k"]),
        (9, ["tandem", "up", "--token-file", "/run/token"]),
        (10, ["other", "--token", "s3cret"]),
        (11, []),
    ]
    one, other = checks.check_command_lines(running)
    assert (one.name, one.level, other.name) == ("process 7", Level.WARN, "process 8")
    assert "--token, --api-key" in one.found
    assert "--token-file and --api-key-file" in one.advice
    assert "s3cret" not in line(one) + line(other)
    assert checks.check_command_lines(running[2:])[0].level is Level.OK
    assert checks.check_command_lines(), "the processes of this host can be read"
