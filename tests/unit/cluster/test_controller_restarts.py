"""`tandem up` restarts a controller that dies, and ends if that does not work."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.cluster import controller_process, launcher
from tandem.cluster.controller_process import ControllerProcess
from tandem.cluster.launcher import Cluster, Progress
from tandem.cluster.supervision.health import ClusterHealth, Health, Phase
from tandem.cluster.worker_supervisor import ControllerConfig
from tandem.protocol.errors import Unavailable
from tandem.settings.cluster import ClusterSettings

HEALTH = ClusterHealth(
    Health("router", Phase.SERVING, 7, 1, 0, ""), "127.0.0.1:1", "127.0.0.1:2", (), metrics_address="127.0.0.1:4"
)


class Controller:
    """A controller that dies, restarts and reports as the test says."""

    def __init__(self, *results: Exception | ClusterHealth, failures: int = 0) -> None:
        self._results = list(results)
        self._failures = failures
        self.restarts = 0
        self.cluster: Cluster

    def health(self) -> ClusterHealth:
        if not self._results:
            self.cluster._stopping.set()
            return HEALTH
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def restart_wait_s(self) -> float:
        return 0.0

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts <= self._failures:
            raise Unavailable("the port is taken")


def watch(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    monkeypatch.setattr(launcher, "WATCH_S", 0.0)
    reports: list[Progress] = []
    controller.cluster = cluster = Cluster(ClusterSettings.of(model=Path("m")), reports.append)
    cluster._watch(controller, HEALTH)  # type: ignore[arg-type]
    return reports


def test_a_controller_that_dies_is_restarted_and_both_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(HEALTH, Unavailable("the controller died"), HEALTH, failures=2)
    reports = watch(controller, monkeypatch)
    assert controller.restarts == 3
    assert reports == [Progress("controller", False, "the controller died"), Progress("controller", True)]


def test_a_controller_that_does_not_start_again_ends_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(Unavailable("the controller died"), failures=launcher.RESTARTS_MAX)
    with pytest.raises(Unavailable, match="5 starts of another one failed: the port is taken; start the cluster again"):
        watch(controller, monkeypatch)


def test_a_restarted_controller_has_the_ports_and_the_state_of_the_one_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[ControllerConfig] = []
    created = MagicMock()
    created.options.return_value.remote.side_effect = lambda config: given.append(config) or MagicMock()
    monkeypatch.setattr(controller_process, "actor_class", lambda _: created)
    monkeypatch.setattr(controller_process, "on_this_node", lambda: None)
    answers: list[Any] = [11, "127.0.0.1:3", HEALTH, 12, "127.0.0.1:3", None]
    monkeypatch.setattr(controller_process, "ask", lambda *_: answers.pop(0))
    monkeypatch.setattr("ray.wait", lambda calls, timeout: ([], calls) if timeout == 0 else (calls, []))
    monkeypatch.setattr("ray.kill", MagicMock())
    process = ControllerProcess(ControllerConfig(ClusterSettings.of(Path("m")), (), 0, "t", 1))
    process.start()
    process.health()
    process.restart()
    first, second = given
    assert (first.cluster.controller_port, first.cluster.metrics_port, first.before) == (0, 0, None)
    assert (second.cluster.controller_port, second.cluster.metrics_port, second.before) == (3, 4, HEALTH)
    assert second.number == first.number, "an older controller stays older than the others"


def test_a_controller_that_does_not_respond_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [11, "127.0.0.1:3"]
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(controller_process, "actor_class", lambda _: MagicMock())
    monkeypatch.setattr(controller_process, "on_this_node", lambda: None)
    monkeypatch.setattr(controller_process, "ask", lambda *_: answers.pop(0))
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr("ray.wait", lambda calls, timeout: ([], calls))
    process = ControllerProcess(ControllerConfig(ClusterSettings.of(Path("m")), (), 0, "t", 1))
    process.start()
    with pytest.raises(Unavailable, match="no sign of life"):
        process.health()
    assert killed == [(11, signal.SIGKILL)]
