"""`tandem logs`: complete lines of the newest run, once each, and of runs that begin while it follows."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.connection import state
from tandem.cli.main import app
from tandem.cli.observe.log_folder import log_root, new_log_folder
from tandem.cli.observe.logs import LogTail
from tandem.logging.log_file import earlier


def write(root: Path, run_name: str, file: str, text: str) -> None:
    (root / run_name).mkdir(parents=True, exist_ok=True)
    with (root / run_name / file).open("a", encoding="utf-8") as out:
        out.write(text)


def test_lines_are_read_once_and_when_they_are_whole(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-02T0000-7", "router.log", "one\u2028of one\ntw")
    write(tmp_path, "2026-01-02T0000-7", "decode-0.log", "a\n")
    tail = LogTail(tmp_path)
    assert list(tail.lines()) == ["a", "one\u2028of one"]
    assert list(tail.lines()) == []
    write(tmp_path, "2026-01-02T0000-7", "router.log", "o\nthree\n")
    assert list(tail.lines()) == ["two", "three"]


def turn(file: Path) -> None:
    """Rotates a file as `tandem.logging.log_file` does; `test_a_full_log_goes_on_in_another_file` uses the real one."""
    for number in (3, 2, 1):
        if earlier(file, number).exists():
            earlier(file, number).replace(earlier(file, number + 1))
    file.replace(earlier(file, 1))


def test_it_goes_on_across_turned_files(tmp_path: Path) -> None:
    run = "2026-01-02T0000-7"
    log = tmp_path / run / "router.log"
    write(tmp_path, run, "router.log", "one\ntwo\n")
    turn(log)
    tail = LogTail(tmp_path)
    write(tmp_path, run, "router.log", "three\n")
    assert list(tail.lines()) == ["one", "two", "three"]
    write(tmp_path, run, "router.log", "four\nfi")
    turn(log)
    write(tmp_path, run, "router.log", "ve\n")
    turn(log)
    write(tmp_path, run, "router.log", "six\n")
    assert list(tail.lines()) == ["four", "five", "six"]
    turn(log)
    write(tmp_path, run, "router.log", "")
    assert list(tail.lines()) == []


def test_a_line_of_a_file_that_is_rotated_during_a_read_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "2026-01-02T0000-7"
    log = tmp_path / run / "router.log"
    write(tmp_path, run, "router.log", "one\n")
    turn(log)
    write(tmp_path, run, "router.log", "two\n")
    opened = Path.open
    turned: list[Path] = []

    def open_and_turn(path: Path, *how: Any, **settings: Any) -> Any:
        content = opened(path, *how, **settings)
        if path == log and not turned:
            turned.append(path)
            turn(log)
            (tmp_path / run / "fresh").write_text("three\n")
            (tmp_path / run / "fresh").replace(log)
        return content

    tail = LogTail(tmp_path)
    monkeypatch.setattr(Path, "open", open_and_turn)
    assert list(tail.lines()) == ["one", "two"]
    assert list(tail.lines()) == ["three"]


def test_earlier_runs_are_left_out_and_later_ones_are_not(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-01T0000-7", "router.log", "old\n")
    write(tmp_path, "2026-01-02T0000-7", "router.log", "new\n")
    tail = LogTail(tmp_path)
    assert list(tail.lines()) == ["new"]
    write(tmp_path, "2026-01-03T0000-8", "router.log", "newer\n")
    assert list(tail.lines()) == ["newer"]


def test_it_waits_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "logs")
    assert list(tail.lines()) == []
    write(tmp_path / "logs", "2026-01-01T0000-7", "router.log", "first\n")
    assert list(tail.lines()) == ["first"]


def test_the_command_prints_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nothing = CliRunner().invoke(app, ["logs"])
    assert nothing.exit_code == 1
    assert f"no process of a cluster has logged under {log_root()}" in nothing.stderr
    write(log_root(), new_log_folder().name, "router.log", "hello\n")
    result = CliRunner().invoke(app, ["logs"])
    assert (result.exit_code, result.stdout) == (0, "hello\n")


@pytest.fixture
def two_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of two running clusters, which are this process by their state files, and of a run that has ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    for number, name in enumerate(("2026-01-01T0000-1", "2026-01-02T0000-2", "2026-01-03T0000-3")):
        write(log_root(), name, "router.log", f"run {name}\n")
        if number:
            ends = f"127.0.0.1:{number}", f"http://127.0.0.1:8{number}"
            state.announce(*ends, "m", logs=str(log_root() / name)).rename(tmp_path / "state" / f"up-{number}.json")


@pytest.mark.usefixtures("two_clusters")
@pytest.mark.parametrize(
    ("options", "run"),
    [
        (["--address", "127.0.0.1:1"], "2026-01-02T0000-2"),
        (["--address", "127.0.0.1:82"], "2026-01-03T0000-3"),
        (["--run", "2026-01-01T0000-1"], "2026-01-01T0000-1"),
        ([], "2026-01-03T0000-3"),
    ],
)
def test_the_cluster_that_is_asked_about_is_followed(options: list[str], run: str) -> None:
    result = CliRunner().invoke(app, ["logs", *options])
    assert (result.exit_code, result.stdout) == (0, f"run {run}\n")
    assert ("newest of 2 clusters" in result.stderr) is (not options)
    assert ("2026-01-02T0000-2 at 127.0.0.1:1" in result.stderr) is (not options)


@pytest.mark.usefixtures("two_clusters")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--address", "127.0.0.1:9"], 1, "has its router at 127.0.0.1:9 on this host; running: 127.0.0.1:"),
        (["--run", "yesterday"], 1, "no run is called yesterday; runs with logs: 2026-01-01T0000-1, "),
        (["--run", "a", "--address", "b"], 2, "--run: names another run than --address"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_with_those_that_are(options: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["logs", *options])
    assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
