"""Liveness of processes that run, are stopped, have ended, or belong to other users, as the kernel reports it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer.nixl_backend import processes
from kv_transfer.nixl_backend.processes import process_alive, this_process

NAMESPACE = os.readlink("/proc/self/ns/pid")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


def name_of(pid: int) -> str:
    return f"{NAMESPACE} {pid} {processes._stat(pid)[processes._STARTED_AT]}"


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_this_process_lives() -> None:
    assert this_process() == name_of(os.getpid())
    assert process_alive(this_process()) is True


def test_a_process_that_stands_still_lives_and_one_that_was_killed_does_not(child: "subprocess.Popen[bytes]") -> None:
    name = name_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: processes._stat(child.pid)[processes._STATE] == "T")
    assert process_alive(name) is True
    child.kill()
    until(lambda: processes._stat(child.pid)[processes._STATE] == "Z")
    assert process_alive(name) is False
    child.wait()
    assert process_alive(name) is False


def test_another_process_of_the_same_number_is_not_that_one() -> None:
    namespace, pid, started_at = this_process().split()
    assert process_alive(f"{namespace} {pid} {int(started_at) - 1}") is False


@pytest.mark.parametrize("name", ["", "nonsense", "pid:[1] 1 1", f"{NAMESPACE} 1"])
def test_of_what_cannot_be_seen_nothing_is_known(name: str) -> None:
    assert process_alive(name) is None


def test_where_there_is_no_such_table_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = this_process()
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert process_alive(known) is None
    this_process.cache_clear()
    assert this_process() == ""
    this_process.cache_clear()


def test_a_process_whose_other_threads_have_not_ended_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(NAMESPACE)
    (tmp_path / "42/task/42").mkdir(parents=True)
    (tmp_path / "42/stat").write_text("42 (a) name (b)) Z " + "0 " * 18 + "777 0\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert process_alive(f"{NAMESPACE} 42 777") is False
    (tmp_path / "42/task/43").mkdir()
    assert process_alive(f"{NAMESPACE} 42 777") is True
