"""CPU kernels are compiled once, before the workers need them; each test has a cache folder of its own."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tandem.engine.kernels.cpu import compile_ahead
from tandem.engine.kernels.cpu.compile_ahead import compiling_ahead, compiling_alone, kernels_folder

WORKER = """
import torch
from tandem.engine.kernels.cpu import jobs
from tandem.engine.kernels.cpu.kernels import CpuKernels
CpuKernels(torch.float32, threads=2).close()
print(*(sum(counts.values()) for counts in (jobs.perform.stats.cache_hits, jobs.perform.stats.cache_misses)))
"""


def interrupted_start() -> list[psutil.Process]:
    """Interrupts the compilation and returns its processes."""
    processes: list[psutil.Process] = []
    with contextlib.suppress(KeyboardInterrupt), compiling_ahead("float32"):
        processes = [child for child in psutil.Process().children() if compile_ahead._PROGRAM in child.cmdline()]
        raise KeyboardInterrupt
    return processes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_worker_waits_for_the_compiling_process_and_loads_its_code() -> None:
    """The worker starts helper threads, which must not compile either."""
    with compiling_ahead("float32"):
        while not (kernels_folder() / "lock").exists():
            time.sleep(0.05)
        worker = subprocess.run([sys.executable, "-c", WORKER], check=True, capture_output=True, text=True)
    assert worker.stdout == "1 0\n", "kernels from the cache, and kernels that it compiled"


def test_nothing_is_started_if_the_kernels_are_compiled_or_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with compiling_ahead("float16"):
        pass
    (kernels_folder() / "jobs.perform-1.py311.1.nbc").touch()
    with compiling_ahead("float32"):
        pass


def test_a_start_that_fails_leaves_no_process() -> None:
    (child,) = interrupted_start()
    assert not child.is_running()


def test_a_machine_that_starts_no_process_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing/python")
    with compiling_ahead("float32"):
        ran = True
    assert ran


def test_one_process_compiles_at_a_time(tmp_path: Path) -> None:
    with compiling_alone(tmp_path), (tmp_path / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_locks_each_process_compiles_for_itself(tmp_path: Path) -> None:
    with compiling_alone(tmp_path / "missing"):
        ran = True
    assert ran
