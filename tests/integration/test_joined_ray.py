"""`tandem up` on an existing Ray cluster: it joins, serves, and returns its resources at any end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.ray_start import UP as RAY_UP
from tests.ray_start import free_port, head_address, ray_environment, ray_start
from tests.soak import soak

UP = [sys.executable, "-m", "tandem.cli.main", "up", "--grpc-port", "0", "--http-port", "0", "--kv-cache-gib", "0.1"]
ACTORS = ("ray::Controller", "ray::RouterActor", "ray::WorkerActor")
WITHOUT_WORKERS = [ACTORS[0], ACTORS[1], ACTORS[1]]
"""The controller, the router and the router's standby."""
GONE_WITHIN_S = 120.0
STAY_AWAY_S = 1.0


class Head:
    """A Ray of one node with the resources of a worker of each role, on loopback."""

    def __init__(self, process: subprocess.Popen[str], env: dict[str, str], address: str) -> None:
        self.process = process
        self.env = env
        self.address = address

    def actors(self) -> list[str]:
        """Tandem's processes on it."""
        names = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                names += [name for name in ACTORS if "".join(process.cmdline()[:1]).startswith(name)]
            except psutil.NoSuchProcess:
                continue
        return sorted(names)

    def assert_soon(self, actors: list[str]) -> None:
        """Waits for these actors: processes that were asked to end take their time."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (left := self.actors()) != actors:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)

    def assert_empty_soon(self) -> None:
        self.assert_soon([])
        assert self.process.poll() is None, "Ray went along"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a name short enough for Ray's sockets."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    env = {
        **os.environ,
        "TMPDIR": str(folder),
        "TANDEM_STATE_DIR": str(folder / "state"),
        **ray_environment(secrets.token_hex(32)),
        # Keeps Ray on loopback, although that is no address for a cluster.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PYTHONUNBUFFERED": "1",
    }
    command = ray_start(folder / "ray", "127.0.0.1", '{"prefill": 1, "decode": 1}')
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        read_until(process, RAY_UP)
        yield Head(process, env, head_address(folder / "ray"))
    finally:
        process.terminate()
        process.communicate(timeout=180)


@pytest.fixture
def up(head: Head, model_folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `tandem up`; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen([*UP, *arguments], env={**head.env, **env}, text=True, **streams))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"{words!r} never came: {seen}")


@pytest.mark.timeout(600)
def test_workers_that_outlive_their_up_are_ended_by_down(
    head: Head, up: Callable[..., subprocess.Popen[str]], folder: Path
) -> None:
    outliving = "--workers-outlive", "600", "--cluster-name", "left"
    serving = up(
        "--address",
        head.address,
        *outliving,
        "--prompt",
        "Say hello.",
        "--max-tokens",
        "8",
        TANDEM_CLUSTER_TOKEN="t" * 16,
    )
    assert "first token" in read_until(serving, "Ctrl-C stops it")
    down = [sys.executable, "-m", "tandem.cli.main", "down", "--address", head.address, "--cluster-name", "left"]

    def run_down() -> tuple[int, str]:
        done = subprocess.run(down, env=head.env, text=True, capture_output=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = run_down()
    assert code == 1
    assert "`tandem up` serves with these workers, its controller is at 127.0.0.1:" in said
    serving.send_signal(signal.SIGTERM)
    out, _ = serving.communicate(timeout=120)
    assert f"`tandem down --address {head.address} --cluster-name left`" in " ".join(out.split())
    assert head.actors() == [ACTORS[-1]] * 2
    assert run_down() == (0, "ended decode-0, prefill-0; released the resources of decode-0, prefill-0\n")
    head.assert_empty_soon()
    code, said = run_down()
    assert (code, said.partition(";")[0]) == (1, "error: no workers were left there")
    assert {path.name for path in folder.iterdir()} <= {"ray", "state"}, "a Ray of its own was started"


@soak
@pytest.mark.timeout(600)
def test_a_node_that_leaves_is_drained_from_outside(head: Head, up: Callable[..., subprocess.Popen[str]]) -> None:
    """A pod's preStop hook does this: it has the controller's port and token beforehand, and its own address."""
    port, token = str(free_port()), secrets.token_hex(16)
    process = up("--address", head.address, "--controller-port", port, TANDEM_CLUSTER_TOKEN=token)
    read_until(process, "Ctrl-C stops it")
    drain = [
        sys.executable,
        "-m",
        "tandem.cli.main",
        "drain",
        "--node",
        "127.0.0.1",
        "--controller",
        f"127.0.0.1:{port}",
    ]
    known = {**head.env, "TANDEM_CLUSTER_TOKEN": token, "TANDEM_STATE_DIR": head.env["TANDEM_STATE_DIR"] + "-none"}
    done = subprocess.run(drain, env=known, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prefill-0 has drained" in done.stdout
    assert "decode-0 has drained" in done.stdout
    head.assert_soon(WITHOUT_WORKERS)
    time.sleep(STAY_AWAY_S)
    assert head.actors() == WITHOUT_WORKERS, "the node is still there, and so they stay away"
    process.send_signal(signal.SIGTERM)
    head.assert_empty_soon()


@pytest.mark.timeout(300)
def test_an_up_that_waits_for_resources_can_be_stopped(head: Head, up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--address", head.address, "--prefill", "2", "--places-timeout", "600")
    read_until(process, "has 1 slots for prefill workers, 2 are needed")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=180)
    assert "nothing is left running" in out
    assert head.actors() == []


@soak
@pytest.mark.timeout(300)
def test_an_up_without_enough_resources_says_which(head: Head, up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--address", head.address, "--prefill", "2")
    out, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert f"error: the Ray cluster at {head.address} has 1 slots for prefill workers, 2 are needed" in out
    assert head.actors() == []


@soak
@pytest.mark.timeout(600)
def test_a_killed_up_releases_its_resources(head: Head, up: Callable[..., subprocess.Popen[str]]) -> None:
    """Ray 2.60 has once kept the resources of a killed `up`, so that the next one waited for them in vain."""
    for _ in range(2):
        killed = up("--address", "auto", RAY_ADDRESS=head.address)
        read_until(killed, "Ctrl-C stops it")
        head.assert_soon([*WITHOUT_WORKERS, ACTORS[-1], ACTORS[-1]])
        killed.send_signal(signal.SIGKILL)
        head.assert_empty_soon()
