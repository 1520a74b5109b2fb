"""A Ray cluster that is missing or too small is reported in a sentence before anything starts."""

import socket
import threading
import time

import pytest

from tandem.cli.plain_errors import exit_code
from tandem.cluster.ray_processes.joined_ray import JoinedRay
from tandem.protocol.errors import FailedPrecondition, InvalidArgument, Unavailable


def test_a_silent_address_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"no Ray cluster answers at {address} .*ray start --head"):
            JoinedRay(address).start({}, processes=1)


def test_what_ray_remembers_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Unavailable, match=r"no Ray cluster answers at auto .*refused"):
            JoinedRay("auto").start({}, processes=1)


@pytest.mark.parametrize(("decode", "enough"), [(2.0, True), (1.0, False), (None, False)])
def test_places_are_counted(*, decode: float | None, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"prefill": 1.0} | ({} if decode is None else {"decode": decode})
    monkeypatch.setattr("ray.cluster_resources", lambda: offered)
    node = JoinedRay("head:6379")
    if enough:
        node._check_resources({"prefill": 1.0, "decode": 2.0})
        return
    with pytest.raises(FailedPrecondition, match=r"head:6379 has [01] slots for decode workers, 2 are needed"):
        node._check_resources({"prefill": 1.0, "decode": 2.0})


def test_missing_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"prefill": 1.0})
    with pytest.raises(FailedPrecondition, match=r"has 0 GPUs, 2 are needed; .* --num-gpus=2"):
        JoinedRay("head:6379")._check_resources({"prefill": 1.0, "GPU": 2.0})


def test_nodes_that_come_late_are_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tandem.cluster.ray_processes.joined_ray.LOOK_S", 0.001)
    offers = iter([{}, {}, {"prefill": 1.0}, {"prefill": 2.0}])
    monkeypatch.setattr("ray.cluster_resources", lambda: next(offers))
    node = JoinedRay("head:6379")
    node._waiting(time.monotonic() + 60, lambda: node._check_resources({"prefill": 2.0}))
    assert next(offers, None) is None
    messages = [record.getMessage().partition(" slots")[0] for record in caplog.records]
    assert messages == [f"waiting: the Ray cluster at head:6379 has {count}" for count in (0, 1)]


def test_who_stops_does_not_wait_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", dict)
    stopping = threading.Event()
    stopping.set()
    node = JoinedRay("head:6379", 1e9, stopping)
    with pytest.raises(FailedPrecondition, match="has 0 slots"):
        node._waiting(time.monotonic() + 1e9, lambda: node._check_resources({"prefill": 2.0}))


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 2.0, **resources}}


NEEDED = {"prefill": 1.0, "decode": 1.0, "GPU": 2.0}
ONE_HOST = [node("10.0.0.1", prefill=1.0), node("10.0.0.1", decode=1.0)]


def test_workers_on_several_hosts_need_a_trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [*ONE_HOST, node("10.0.0.2", decode=1.0)])
    with pytest.raises(InvalidArgument, match=r"2 hosts \(10\.0\.0\.1, 10\.0\.0\.2\).*--trusted-network") as refusal:
        JoinedRay("head:6379")._check_network(NEEDED)
    assert exit_code(refusal.value) == 2
    JoinedRay("head:6379", trusted_network=True)._check_network(NEEDED)


def test_workers_on_one_host_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [node("10.0.0.2"), node("10.0.0.3", GPU=8.0), node("10.0.0.4", alive=False, decode=1.0)]
    monkeypatch.setattr("ray.nodes", lambda: [*ONE_HOST, *others])
    JoinedRay("head:6379")._check_network(NEEDED)
