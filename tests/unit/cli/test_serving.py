"""One `tandem up` over a fake cluster: its output, and the files it leaves."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli.connection import state
from tandem.cli.connection.router import Sampling
from tandem.cli.main import app
from tandem.cli.observe import log_folder
from tandem.cli.start import serving
from tandem.cli.start.serving import FirstPrompt, StartView, serve
from tandem.cluster.launcher import Endpoints, Progress
from tandem.engine.warm_up import COMPILING
from tandem.protocol.errors import Unavailable
from tandem.settings.cluster import ClusterSettings
from tests.factories import write_tiny_model


class NoCluster:
    """A cluster that starts at once or fails as the test says, and ends when `wait` is called."""

    failure: BaseException | None = None
    endpoints = Endpoints("127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:9", "token", "127.0.0.1:10")
    waited = stopped = False
    interrupt: tuple[signal.Signals, ...] = ()
    """The signal that interrupts `wait`."""

    def __init__(self, config: ClusterSettings) -> None:
        self.config = config

    @classmethod
    def start(cls, config: ClusterSettings, _progress: object) -> "NoCluster":
        if cls.failure is not None:
            raise cls.failure
        cls.last = cls(config)
        return cls.last

    def wait(self) -> None:
        self.waited = True
        raise KeyboardInterrupt(*self.interrupt)

    def stop(self, *, leave_workers: bool) -> None:
        self.stopped, self.left_workers = True, leave_workers


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[NoCluster]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setattr(serving, "_with_model", lambda config, *_: config)
    monkeypatch.setattr(serving, "_answer", lambda console, *_: console.print("the answer"))
    kind = type("Clusters", (NoCluster,), {})
    monkeypatch.setattr(serving, "Cluster", kind)
    return kind


def config_of(**settings: Any) -> ClusterSettings:
    return ClusterSettings.of(model=Path("m"), served_model_names=("m",), grpc_port=0, http_port=0, **settings)


@pytest.mark.parametrize("once", [True, False])
def test_addresses_and_log_folder_are_printed_after_the_answer(
    once: bool, clusters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(config_of(), None, FirstPrompt("hi", Sampling()), once=once)
    output = capsys.readouterr().out
    (logs,) = (tmp_path / "tandem" / "logs").iterdir()
    places = ["the answer", "gRPC    127.0.0.1:7", "http://127.0.0.1:8/v1", str(logs), "nothing is left running"]
    assert [output.find(place) for place in places] == sorted(output.find(place) for place in places)
    assert all(place in output for place in places)
    assert ("Ctrl-C stops it" in output) is clusters.last.waited is not once
    assert clusters.last.stopped
    assert clusters.last.config.log_of("decode-0").file == logs / "decode-0.log"
    assert state.running() == []


@pytest.mark.parametrize(("number", "leaves"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, True)])
def test_only_an_interrupt_of_the_cluster_ends_workers_that_may_outlive_it(
    number: signal.Signals, leaves: bool, clusters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.interrupt = (number,)
    outliving = {"outlive_s": 9.0, "ray_address": "auto", "token": "t", "cluster_name": "north"}
    serve(config_of(**outliving), None, None, once=False)
    assert clusters.last.left_workers is leaves
    output = capsys.readouterr().out
    assert ("wait 9 s for one with --cluster-name north" in output) is leaves
    assert ("nothing is left running" in output) is not leaves


@pytest.mark.parametrize("outlive_s", [0.0, 9.0])
def test_a_start_that_is_interrupted_says_what_may_live_on(
    outlive_s: float, clusters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.failure = KeyboardInterrupt(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        serve(config_of(outlive_s=outlive_s, ray_address="auto", token="t"), None, None, once=False)
    output = capsys.readouterr().out
    assert ("nothing is left running" in output) is not bool(outlive_s)
    assert ("workers that served before live on" in output) is bool(outlive_s)


def test_the_note_about_the_workers_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    view = StartView(Console())
    with view:
        pass
    view.cluster_progress(Progress("workers", True, note="another `tandem up` has [them]"))
    assert capsys.readouterr().out == "another `tandem up` has [them]\n"


def test_without_a_terminal_each_thing_that_a_step_does_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The first start compiles and converts for a minute or more."""
    with StartView(Console()) as view:
        with view.step("checking m") as progress:
            for done in (0.0, 0.5, 1.0):
                progress("converting weights", done)
        view.cluster_progress(Progress("decode-0", False, detail=COMPILING))
        view.cluster_progress(Progress("decode-0", True))
    lines = [re.sub(r" \(.*", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "… checking m", "… checking m: converting weights", "✓ checking m",
        "… starting decode-0", f"… starting decode-0: {COMPILING}", "✓ starting decode-0",
    ]  # fmt: skip


def test_a_start_that_fails_names_the_folder_of_logs(
    clusters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.failure = Unavailable("decode-0 did not start")
    with pytest.raises(Unavailable, match="decode-0"):
        serve(config_of(), None, None, once=False)
    (logs,) = (tmp_path / "tandem" / "logs").iterdir()
    assert str(logs) in capsys.readouterr().out


def test_the_last_runs_keep_their_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "tandem" / "logs"
    for day in range(10, 30):
        (root / f"2020-01-{day}T000000-1").mkdir(parents=True)
    new = log_folder.new_log_folder()
    assert new.stat().st_mode & 0o777 == 0o700
    kept = sorted(entry.name for entry in root.iterdir())
    assert len(kept) == log_folder.KEPT_RUNS
    assert (kept[0], kept[-1]) == ("2020-01-21T000000-1", new.name)


def test_a_model_of_absurd_sizes_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.launcher.Cluster.start", lambda *_: pytest.fail("a cluster is started"))
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    ports = ["--grpc-port", "0", "--http-port", "0"]
    result = CliRunner().invoke(app, ["up", "--model", str(folder), "--device", "cpu", *ports])
    assert result.exit_code
    assert "num_hidden_layers 1000000000 is not supported; it must be at most 1024." in " ".join(result.output.split())
