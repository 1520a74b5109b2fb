"""The checks of `tandem doctor` for ports by which others could write into a worker's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli.connection.state import RunningCluster
from tandem.cli.diagnosis import kv_port_checks
from tandem.cli.diagnosis.checks import Level
from tandem.cli.diagnosis.kv_port_checks import check_running_clusters, check_ucx_environment, check_workers
from tandem.cli.start.preflight import check_network
from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.messages import ModelFacts, PeerRef, Role, WorkerInfo
from tandem.settings.cluster import ClusterSettings

FACTS = ModelFacts("m", 10, 10, (), "float32")
WORKER = WorkerInfo(PeerRef("decode-0", 1), Role.DECODE, "a:1", FACTS, 8, 4, 8, 16, "cpu", "UCX")
CLUSTER = RunningCluster(7, 0.0, "h:1", "h:2", "m", "h:3", "t")


def test_a_ucx_environment_that_opens_a_port_fails_the_check() -> None:
    assert check_ucx_environment({}).level is Level.OK
    asked = check_ucx_environment({"UCX_TLS": "tcp"})
    assert asked.level is Level.FAIL
    assert "tcp" in asked.found


def test_tandem_up_refuses_it_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with pytest.raises(InvalidArgument, match=r"UCX_TLS.*--trusted-network"):
        check_network(ClusterSettings.of(Path("m")))
    check_network(ClusterSettings.of(Path("m"), trusted_network=True))
    check_network(ClusterSettings.of(Path("m"), ray_address="h:1"))  # workers there have another environment


@pytest.mark.parametrize(
    ("port", "whom"),
    [
        ("127.0.0.1:4000", "every user of this host"),
        ("10.0.0.5:4000", "every client that reaches 10.0.0.5"),
        ("0.0.0.0:4000", "every client that reaches its host"),
    ],
)
def test_an_open_port_is_a_warning_that_names_the_hosts_in_reach(port: str, whom: str) -> None:
    (opened,) = check_workers([WORKER, replace(WORKER, kv_ports=(port,))])
    assert opened.level is Level.WARN
    assert f"UCX listens at {port}: {whom} can write into this worker's memory" in opened.found
    assert check_workers([WORKER, WORKER])[0].level is Level.OK


def test_running_clusters_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[tuple[WorkerInfo, ...]] = [(replace(WORKER, kv_ports=("127.0.0.1:4000",)),)]

    class Controller:
        def __init__(self, address: str, token: str) -> None:
            assert (address, token) == ("h:3", "t")

        async def workers(self) -> tuple[WorkerInfo, ...]:
            if not answer:
                raise Unavailable("it is gone")
            return answer.pop()

    monkeypatch.setattr(kv_port_checks, "ControllerClient", Controller)
    assert "127.0.0.1:4000" in check_running_clusters([CLUSTER])[0].found
    (unknown,) = check_running_clusters([CLUSTER])
    assert (unknown.level, unknown.advice) == (Level.WARN, "it is gone")
    assert check_running_clusters([]) == []
