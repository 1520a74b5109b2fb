"""Jobs in separate processes: completed once, and never a reason for a start to fail or to hang."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.engine.kernels import compile_apart as module
from tandem.engine.kernels.compile_apart import Job, compile_apart

DEVICE = "a GPU"
Process = subprocess.Popen[bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "marks"
    made.mkdir()
    return made


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes, in the order of their start."""
    every: list[Process] = []
    begin = module._begin

    def keep(job: Job) -> Process | None:
        child = begin(job)
        if child is not None:
            every.append(child)
        return child

    monkeypatch.setattr(module, "_begin", keep)
    return every


def test_all_jobs_run_in_other_processes(folder: Path, tmp_path: Path) -> None:
    compile_apart([Job(Path.touch, (tmp_path / name,)) for name in "ab"], folder, DEVICE)()
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()


def test_they_find_the_modules_of_this_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def write(file):\n    file.write_text('written')\n")
    monkeypatch.syspath_prepend(tmp_path)
    from only_here import write  # type: ignore[import-not-found]

    compile_apart([Job(write, (tmp_path / "out",))], folder, DEVICE)()
    assert (tmp_path / "out").read_text() == "written"


def test_nothing_begins_where_a_start_has_seen_them_through(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a"
    jobs = [Job(Path.touch, (file,))]
    compile_apart(jobs, folder, DEVICE)()
    file.unlink()
    compile_apart(jobs, folder, DEVICE)()
    assert not file.exists()
    compile_apart(jobs, folder, "another GPU")()
    assert file.exists()


def test_other_versions_begin_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    compile_apart([Job(Path.touch, (file,))], folder, DEVICE)()
    file.unlink()
    monkeypatch.setattr(module, "_version", lambda package: f"next {package}")
    compile_apart([Job(Path.touch, (file,))], folder, DEVICE)()
    assert file.exists()


def test_a_job_that_fails_begins_anew(folder: Path, tmp_path: Path, begun: list[Process]) -> None:
    jobs = [Job(Path.unlink, (tmp_path / "missing",)), Job(Path.touch, (tmp_path / "a",))]
    compile_apart(jobs, folder, DEVICE)()
    assert (tmp_path / "a").exists(), "the others run all the same"
    assert not list(folder.iterdir())
    assert all(child.returncode is not None for child in begun)


def test_a_mark_that_cannot_be_written_is_no_failure(folder: Path, tmp_path: Path) -> None:
    wait = compile_apart([Job(Path.touch, (tmp_path / "a",))], folder, DEVICE)
    folder.rmdir()
    wait()
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/python", ""])
def test_a_python_that_cannot_start_is_no_failure(
    executable: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    large = "x" * (1 << 20)  # more than a pipe holds
    compile_apart([Job(Path.touch, (large,))] * 2, folder, DEVICE)()
    assert not list(folder.iterdir())


def test_a_job_that_hangs_is_ended(folder: Path, begun: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILE_TIMEOUT_S", 0.5)
    began = time.monotonic()
    compile_apart([Job(time.sleep, (600,))], folder, DEVICE)()
    assert time.monotonic() - began < 60
    assert not list(folder.iterdir())
    assert all(child.returncode is not None for child in begun)
