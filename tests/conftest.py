"""Real clusters for tests: one at a time, on free ports, reused while the same settings are asked for.

Where tests run in two processes (`make test`), those that share clusters stay in one of them.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports Triton.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, settings

from cli.controller_client import ControllerClient
from cluster.config import ClusterConfig
from cluster.health import Health, Phase
from cluster.launcher import Cluster, Endpoints, _ask
from cluster.planner_config import PlannerConfig, PlannerMode
from cluster.ray_node import ENVIRONMENT
from wire.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Before any test imports Ray, which keeps what it reads first: its token, and whether it stays on loopback.
os.environ.update(ENVIRONMENT)
# Else a question to Ray that no test means to ask would start one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Threads on cores that others use too wait for each other: with two test processes ten times as long as one would work.
torch.set_num_threads(1)

# How long an example takes, or is drawn for, is the machine's.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

HERE = Path(__file__).parent
LONG_ROOMS = ("e2e", "kernels", "gpu", "model", "faults", "integration")
"""In this order and before all others, so that both processes end together: one begins with clusters, the other one
with what computes, and the smallest files come last.
"""
SHARING_ROOMS = {"e2e", "faults"}
"""Their files use clusters of one another."""
GPU_ROOMS = {"gpu", "kernels"}
TOLD = "told"
IDLE_WITHIN_S = 120.0
"""Longer than any lease and quarantine: what is not free by then never will be."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What shares clusters, or the GPU, stays in one process, in order; the others go there file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            room = Path(file).parts[1]
            if room in SHARING_ROOMS:
                return room
            return "gpu" if room in GPU_ROOMS and torch.cuda.is_available() else file

    return ByRoom(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long rooms first."""
    rooms = {room: number for number, room in enumerate(LONG_ROOMS)}
    items.sort(key=lambda item: rooms.get(item.path.relative_to(HERE).parts[0], len(rooms)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests had to `tell`."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    for report in (one for one in reports if getattr(one, "when", "") == "call"):
        for _, line in (each for each in report.user_properties if each[0] == TOLD):
            terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a line at the end of the run, whichever process the test is in."""
    return lambda line: record_property(TOLD, line)


class RunningCluster:
    """A cluster under test, with a view of its insides."""

    def __init__(self, config: ClusterConfig, logs: Path) -> None:
        self.config = config
        self._logs = config.log_folder or logs
        self._cluster = Cluster.start(replace(config, log_folder=self._logs))
        self.grpc_address = self._cluster.endpoints.grpc
        self.http_address = self._cluster.endpoints.http
        self.metrics_address = self._cluster.endpoints.metrics

    def stop(self) -> None:
        self._cluster.stop()

    def log(self, name: str) -> str:
        """What the process called `name` has logged so far."""
        return (self._logs / f"{name}.log").read_text()

    @property
    def doors(self) -> Endpoints:
        """For commands that start a cluster, and shall have this one."""
        return self._cluster.endpoints

    @property
    def controller(self) -> ControllerClient:
        """Who changes modes and drains workers."""
        return ControllerClient(self._cluster.endpoints.controller, self._cluster.endpoints.token)

    def controller_pid(self) -> int:
        """The controller's process."""
        pid: int = _ask(self._cluster._controller.pid.remote())
        return pid

    def workers(self) -> tuple[Health, ...]:
        """Every worker as the controller sees it."""
        return self._cluster.health().workers

    def router(self) -> Health:
        return self._cluster.health().router

    def worker(self, role: str, within_s: float = 60.0) -> Health:
        """The first worker of a role, once it serves."""
        give_up = time.monotonic() + within_s
        while True:
            one = next(w for w in self.workers() if w.name.startswith(role))
            if one.phase is Phase.SERVING:
                return one
            assert time.monotonic() < give_up, one
            time.sleep(0.1)

    def named(self, name: str) -> Health:
        """One worker as the controller sees it."""
        return {one.name: one for one in self.workers()}[name]

    def members(self) -> list[cluster_pb2.WorkerInfo]:
        """Who is registered now."""
        with grpc.insecure_channel(self._cluster.endpoints.controller) as channel:
            stream = cluster_pb2_grpc.ClusterStub(channel).Watch(
                cluster_pb2.WatchRequest(), metadata=self._credentials(), timeout=60
            )
            members = list(next(stream).workers)
            stream.cancel()
        return members

    def inspect(self) -> list[worker_pb2.InspectResponse]:
        """Every registered worker's pages and open work."""
        return [self._inspect(member.address) for member in self.members()]

    def inspect_worker(self, name: str) -> worker_pb2.InspectResponse:
        """One registered worker's; the others are not asked, and may be frozen. KeyError if it is not registered."""
        return self._inspect({member.worker_id: member.address for member in self.members()}[name])

    def _inspect(self, address: str) -> worker_pb2.InspectResponse:
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Inspect(worker_pb2.InspectRequest(), metadata=self._credentials(), timeout=60)

    def assert_idle_and_sound(self) -> None:
        """On every worker, in the end: all pages free, or cached and read by nobody, nothing open, the pool sound."""
        give_up = time.monotonic() + IDLE_WITHIN_S
        while True:
            found = self.inspect()
            assert [one.integrity_error for one in found] == [""] * self.config.worker_count
            if all(_idle(one) for one in found):
                return
            assert time.monotonic() < give_up, f"still not idle: {found}"
            time.sleep(0.1)

    def _credentials(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._cluster.endpoints.token}"),)


def _idle(one: worker_pb2.InspectResponse) -> bool:
    taken = one.pages_owned + one.pages_shared + one.pages_advertised + one.pages_quarantined + one.pages_promised
    return one.pages_free + one.pages_cached == one.pages_total and not (taken or one.requests or one.leases)


class _Shelf:
    """Holds the one running cluster of this session."""

    def __init__(self, model: Path, new_folder: Callable[[], Path]) -> None:
        self._model = model
        self._new_folder = new_folder
        self._running: RunningCluster | None = None

    def get(self, *, fresh: bool, **settings: Any) -> RunningCluster:
        config = ClusterConfig(
            **{
                "model": self._model,
                "model_name": "SmolLM2-135M-Instruct",
                "grpc_port": 0,
                "http_port": 0,
                "kv_checksum_rate": 1.0,
                "threads": 1,
                "planner": PlannerConfig(PlannerMode.DRY_RUN, window_s=5.0),
                **settings,
            }
        )
        if self._running is not None and (fresh or self._running.config != config):
            self.clear()
        if self._running is None:
            self._running = RunningCluster(config, self._new_folder())
        return self._running

    def clear(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout, prepared once into the user's cache."""
    from cli.default_model import find_default_model
    from engine.weights.gguf import prepare_model

    return prepare_model(find_default_model())


@pytest.fixture(scope="session")
def _shelf(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shelf]:
    shelf = _Shelf(model_folder, lambda: tmp_path_factory.mktemp("logs"))
    yield shelf
    shelf.clear()


@pytest.fixture(scope="session")
def running_cluster(_shelf: _Shelf) -> Callable[..., RunningCluster]:
    """A cluster with these settings of `ClusterConfig`; whichever test comes next may use it too."""
    return lambda **settings: _shelf.get(fresh=False, **settings)


@pytest.fixture
def fresh_cluster(_shelf: _Shelf) -> Iterator[Callable[..., RunningCluster]]:
    """A cluster of the test's own, for tests that break it."""
    yield lambda **settings: _shelf.get(fresh=True, **settings)
    _shelf.clear()
