"""`tandem up` and `tandem down` on real parts: it serves, and leaves nothing running at any end."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.soak import soak

UP = [sys.executable, "-m", "tandem.cli.main", "up", "--grpc-port", "0", "--http-port", "0", "--kv-cache-gib", "0.1"]


def answers_once_healthy(url: str, within_s: float) -> list[int]:
    """Returns the statuses of many requests, sent together as soon as `/health` is 200.

    Polls from before the port opens.
    """
    deadline_s = time.monotonic() + within_s
    body = {"prompt": "Once upon a time", "max_tokens": 2}
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(16) as threads:
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if http.get("/health").status_code == 200:
                    break
            assert time.monotonic() < deadline_s, "it never was"
            time.sleep(0.02)
        asked = [threads.submit(http.post, "/v1/completions", json=body) for _ in range(92)]
        return [response.result().status_code for response in asked]


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def used_shared_memory() -> set[str]:
    """Returns the shared memory that some living process has mapped."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return used


def forgotten_shared_memory(before: set[str]) -> set[str]:
    """Returns shared memory made since `before` by Ray or UCX and mapped by no process.

    Other clusters on this host have mapped theirs.
    """
    made = {name for name in shared_memory() - before if "ucx" in name or "ray" in name or "plasma" in name}
    return made - used_shared_memory()


@pytest.fixture
def temp_root() -> Iterator[Path]:
    """A temp folder with a name short enough for Ray's sockets."""
    root = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def environment(tmp_path: Path, temp_root: Path) -> dict[str, str]:
    """The environment of a `tandem up` with separate temp and state folders."""
    own = {"TMPDIR": str(temp_root), "TANDEM_STATE_DIR": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own}


@pytest.fixture
def start_up(environment: dict[str, str], model_folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `tandem up` in a separate process group; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*UP, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Returns the output up to the line that holds `words`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"{words!r} never came: {seen}")


def assert_gone(processes: list[psutil.Process], before: set[str], root: Path) -> None:
    """Checks that no process of the family is left, no shared memory it made, and no file in its temp folder."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert list(root.iterdir()) == []
    deadline_s = time.monotonic() + 60
    while left := forgotten_shared_memory(before):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)  # another cluster may be about to map what it has just made


@pytest.mark.timeout(240)
def test_once_answers_and_leaves_nothing(start_up: Callable[..., subprocess.Popen[str]], temp_root: Path) -> None:
    before = shared_memory()
    process = start_up("--prompt", "Say hello.", "--max-tokens", "8", "--once")
    out = read_until(process, "starting decode-0 (")
    relatives = family(process.pid)
    out += process.communicate(timeout=90)[0]
    assert process.returncode == 0, out
    for word in ("queue", "prefill", "transfer", "UCX", "first token", "inter-token", "tokens/s", "is served at"):
        assert word in out
    (logs,) = re.findall(r"^  logs +(.*)$", out, re.M)
    assert " router.server: router " in (Path(logs) / "router.log").read_text()
    assert_gone(relatives, before, temp_root)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("at", "number", "group", "code"),
    [
        pytest.param("… starting Ray", signal.SIGINT, True, 130, marks=soak),
        pytest.param("✓ starting Ray", signal.SIGTERM, False, 130, marks=soak),
        ("… starting decode-0", signal.SIGINT, True, 130),
        pytest.param("Ctrl-C stops it", signal.SIGINT, True, 0, marks=soak),
    ],
)
def test_a_signal_at_any_moment_leaves_nothing(
    *,
    at: str,
    number: signal.Signals,
    group: bool,
    code: int,
    start_up: Callable[..., subprocess.Popen[str]],
    temp_root: Path,
) -> None:
    before = shared_memory()
    process = start_up()
    read_until(process, at)
    relatives = family(process.pid)
    (os.killpg if group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert "Traceback" not in out
    assert_gone(relatives, before, temp_root)


@pytest.mark.timeout(240)
def test_a_killed_up_leaves_nothing(
    start_up: Callable[..., subprocess.Popen[str]], temp_root: Path, report_line: Callable[[str], None]
) -> None:
    """Ray's two agents do not end by themselves for minutes."""
    before = shared_memory()
    process = start_up()
    read_until(process, "Ctrl-C stops it")
    relatives = family(process.pid)
    process.kill()
    began = time.monotonic()
    process.wait()
    _, alive = psutil.wait_procs(relatives, timeout=60)
    report_line(f"all processes were gone {time.monotonic() - began:.1f} s after SIGKILL")
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    shutil.rmtree(temp_root / f"torchinductor_{getpass.getuser()}", ignore_errors=True)  # a cache of PyTorch
    assert_gone(relatives, before, temp_root)


@pytest.mark.timeout(240)
def test_down_stops_what_up_started(
    start_up: Callable[..., subprocess.Popen[str]], environment: dict[str, str], temp_root: Path
) -> None:
    """Running requests may end first, within the grace period that was set."""
    before = shared_memory()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start_up("--stop-grace", "60", "--http-port", str(port))
    assert set(answers_once_healthy(f"http://127.0.0.1:{port}", within_s=120.0)) == {200}
    read_until(process, "Ctrl-C stops it")
    relatives = family(process.pid)
    tandem = [sys.executable, "-m", "tandem.cli.main"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*tandem, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    status = run("status")
    assert status.returncode == 0, status.stderr
    assert {"prefill-0", "decode-0"} <= set(status.stdout.split())
    answer = run("generate", "Say hello.", "--max-tokens", "8", "--timeline")
    assert answer.returncode == 0, answer.stderr
    assert "first token" in answer.stdout
    long = [*tandem, "generate", "Once upon a time", "--max-tokens", "200"]
    with subprocess.Popen(long, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout
        running.stdout.read(1)
        down = run("down")
        _, error = running.communicate(timeout=60)
    assert running.returncode == 0, error
    assert down.returncode == 0, down.stderr
    assert process.wait(timeout=60) == 0
    assert_gone(relatives, before, temp_root)
    assert "no cluster is running" in run("down").stdout
    nothing = run("status")
    assert nothing.returncode == 4
    assert nothing.stderr.strip() == "error: no cluster is running; start one with `tandem up`"
