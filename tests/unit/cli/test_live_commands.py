"""`tandem mode`, `tandem scale` and `tandem drain`: their calls to the controller, and their output."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.connection import state
from tandem.cli.main import app
from tandem.protocol.errors import FailedPrecondition, Unavailable
from tandem.protocol.messages import Absence, Assignment, ModelFacts, PeerRef, Role, WorkerInfo

FACTS = ModelFacts("m", 10, 10, (), "float32")
WORKER = WorkerInfo(
    PeerRef("w-0", 1), Role.BOTH, "a:1", FACTS, 8, 4, 8, 16, "cpu", "fake", assignment=Assignment(Role.BOTH)
)


class Controller:
    """A replacement of `tandem.cli.connection.controller_client.ControllerClient` that records calls."""

    asked: list[tuple[Any, ...]]
    away: tuple[Absence, ...] = ()
    silent = 0
    """The number of calls for the workers that get no reply."""

    def __init__(self, address: str, token: str) -> None:
        self.asked.append((address, token))

    async def set_mode(self, mode: str, **options: Any) -> tuple[tuple[WorkerInfo, ...], float]:
        self.asked.append((mode, {name: value for name, value in options.items() if value}))
        return (WORKER,), 0.25

    async def resize(self, **options: Any) -> tuple[tuple[WorkerInfo, ...], float]:
        self.asked.append(("resize", options))
        return (WORKER,), 0.25

    async def workers(self) -> tuple[WorkerInfo, ...]:
        if Controller.silent:
            Controller.silent -= 1
            raise Unavailable("cannot reach the controller")
        return tuple(
            replace(WORKER, peer=PeerRef(name, 1), address=f"{node}:7") for name, node in (("x", "a"), ("y", "b"))
        )

    async def absent(self) -> tuple[Absence, ...]:
        return self.away

    async def drain_worker(self, worker_id: str, **options: Any) -> float:
        self.asked.append((worker_id, options))
        if worker_id == "last":
            raise FailedPrecondition("last is the only worker that serves")
        return 1.5


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setattr("tandem.cli.connection.controller_client.ControllerClient", Controller)
    Controller.asked = []
    return Controller.asked


def test_the_running_cluster_is_asked(asked: list[tuple[Any, ...]]) -> None:
    file = state.announce("r:1", "h:1", "m", "c:1", "secret")
    command = ["mode", "colocated", "--step-policy", "chunked", "--step-budget", "512", "--itl-target-ms", "25"]
    result = CliRunner().invoke(app, command)
    file.unlink()
    assert result.exit_code == 0, result.stderr
    options = {"step_policy": "chunked", "step_budget": 512, "itl_target_s": 0.025, "grace_s": 30.0}
    assert asked == [("c:1", "secret"), ("colocated", options)]
    assert result.stdout == "w-0: both, decode-priority\nthe cluster is colocated now, after 0.2 s\n"


def test_another_cluster_is_named(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CLUSTER_TOKEN", "other")
    command = ["mode", "disaggregated", "--prefill", "1", "--decode", "2", "--grace", "0", "--itl-target-ms", "0"]
    result = CliRunner().invoke(app, [*command, "--controller", "far:7"])
    assert result.exit_code == 0, result.stderr
    assert asked == [("far:7", "other"), ("disaggregated", {"prefill": 1, "decode": 2, "itl_target_s": -1.0})]


def test_a_cluster_grows(asked: list[tuple[Any, ...]]) -> None:
    where = ["--controller", "c:1", "--token", "t"]
    result = CliRunner().invoke(app, ["scale", "--prefill", "3", "--grace", "2", "--wait", "5", *where])
    assert (result.exit_code, result.stdout) == (0, "w-0: both\n1 workers serve, after 0.2 s\n")
    assert asked[-1] == ("resize", {"prefill": 3, "decode": 0, "workers": 0, "grace_s": 2.0, "wait_s": 5.0})


def test_a_worker_is_drained(asked: list[tuple[Any, ...]]) -> None:
    where = ["--controller", "c:1", "--token", "t"]
    result = CliRunner().invoke(app, ["drain", "decode-0", "--restart", "--grace", "2", *where])
    assert (result.exit_code, result.stdout) == (0, "decode-0 serves again, after 1.5 s\n")
    assert asked[-1] == ("decode-0", {"grace_s": 2.0, "restart": True, "force": False})
    result = CliRunner().invoke(app, ["drain", "last", *where])
    assert (result.exit_code, result.stderr) == (1, "error: last is the only worker that serves\n")


def test_all_workers_of_a_node_that_leaves_are_drained(asked: list[tuple[Any, ...]]) -> None:
    where = ["--controller", "c:1", "--token", "t"]
    result = CliRunner().invoke(app, ["drain", "--node", "b", "--grace", "2", *where])
    assert (result.exit_code, result.stdout) == (0, "y has drained, after 1.5 s\n")
    assert asked[1:] == [("y", {"grace_s": 2.0, "force": True, "node_leaves": True})]
    result = CliRunner().invoke(app, ["drain", "--node", "c", *where])
    assert (result.exit_code, result.stdout) == (0, "no worker serves at c; nothing to drain\n")


@pytest.mark.parametrize(("retry_for_s", "drained"), [(60.0, True), (-1.0, False)])
def test_a_controller_may_change_while_a_node_leaves(
    retry_for_s: float, drained: bool, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.operations.drain.AGAIN_S", 0.0)
    monkeypatch.setattr("tandem.cli.operations.drain.RETRY_FOR_S", retry_for_s)
    monkeypatch.setattr(Controller, "silent", 2)
    result = CliRunner().invoke(app, ["drain", "--node", "b", "--controller", "c:1", "--token", "t"])
    assert ("y has drained" in result.stdout) is drained
    assert (result.exit_code == 0) is drained


@pytest.mark.parametrize(
    ("node", "away", "code", "says"),
    [
        ("b", Absence("z", "starting", coming=True), 0, "a worker serves at b"),
        ("c", None, 0, "no worker serves at c, and none is starting"),
        ("c", Absence("z", "drained", coming=False), 0, "none is starting"),
        ("c", Absence("z", "loading weights", coming=True), 1, "z is starting: loading weights"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_a_node_is_ready_if_a_worker_serves_there_or_none_is_expected(
    node: str, away: Absence | None, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controller, "away", () if away is None else (away,))
    result = CliRunner().invoke(app, ["ready", "--node", node, "--controller", "c:1", "--token", "t"])
    assert result.exit_code == code
    assert says in result.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["mode", "disaggregated", "--prefill", "0"], "--prefill: 0 is less than 1"),
        (["mode", "colocated", "--step-budget", "0"], "--step-budget: 0 is less than 1"),
        (["mode", "colocated", "--itl-target-ms", "-1"], "--itl-target-ms: -1 is below 0"),
        (["mode", "colocated", "--grace", "-1"], "--grace: -1 is below 0"),
        (["scale", "--decode", "0"], "--decode: 0 is less than 1"),
        (["scale"], "--workers: say how many: --prefill, --decode or --workers"),
        (["scale", "--workers", "2", "--wait", "-1"], "--wait: -1 is below 0"),
        (["drain", "w", "--grace", "nan"], "--grace: nan is below 0"),
        (["drain"], "WORKER: give the name of a worker, or --node ADDRESS for all of a node"),
        (["drain", "w", "--node", "a"], "WORKER: give the name of a worker, or --node ADDRESS for all of a node"),
        (
            ["drain", "--node", "a", "--restart"],
            "--restart: is for a WORKER; those of a --node restart by themselves",
        ),
    ],
)
def test_a_wrong_number_is_named(command: list[str], message: str, asked: list[tuple[Any, ...]]) -> None:
    result = CliRunner().invoke(app, [*command, "--controller", "c:1"])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
    assert not [call for call in asked if len(call) > 1 and isinstance(call[1], dict)]


@pytest.mark.parametrize("command", [["mode", "adaptive"], ["scale", "--workers", "2"], ["drain", "w"]])
def test_without_a_cluster_the_way_to_start_one_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(state.FOLDER_VARIABLE, str(tmp_path / "state"))
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (4, "error: no cluster is running; start one with `tandem up`\n")
    result = CliRunner().invoke(app, [*command, "--controller", "127.0.0.1:1"])
    assert result.exit_code == 4
    assert result.stderr == "error: cannot reach the controller at 127.0.0.1:1; is `tandem up` running there?\n"
