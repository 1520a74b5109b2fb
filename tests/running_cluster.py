"""A running cluster that tests inspect, and the shelf that keeps one running for the next test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from tandem.cli.connection.controller_client import ControllerClient
from tandem.cluster.launcher import Cluster, Endpoints
from tandem.cluster.supervision.health import Health, Phase
from tandem.net.security.mutual_tls import PART_NAME, credentials_of
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import PlannerMode, PlannerSettings

IDLE_WITHIN_S = 120.0
"""Seconds until all pages must be free, longer than any lease and quarantine last."""


class RunningCluster:
    """A running cluster under test, with access to its internals."""

    def __init__(self, config: ClusterSettings, logs: Path) -> None:
        self.config = config
        self._logs = config.log_folder or logs
        self._cluster = Cluster.start(replace(config, log_folder=self._logs))
        self.grpc_address = self._cluster.endpoints.grpc
        self.http_address = self._cluster.endpoints.http
        self.metrics_address = self._cluster.endpoints.metrics

    def stop(self) -> None:
        self._cluster.stop()

    def log(self, name: str) -> str:
        """Return the log of the process called `name`."""
        return (self._logs / f"{name}.log").read_text()

    @property
    def listeners(self) -> Endpoints:
        """The cluster's addresses, for benchmarks and commands that would otherwise start a cluster."""
        return self._cluster.endpoints

    @property
    def controller(self) -> ControllerClient:
        """A client of the controller, to change modes and drain workers."""
        return ControllerClient(self._cluster.endpoints.controller, self._cluster.endpoints.token)

    def controller_pid(self) -> int:
        assert self._cluster._controller is not None
        return self._cluster._controller.pid()

    def workers(self) -> tuple[Health, ...]:
        """Return the health of every worker, as reported by the controller."""
        return self._cluster.health().workers

    def router(self) -> Health:
        return self._cluster.health().router

    def worker(self, role: str, within_s: float = 60.0) -> Health:
        """Wait until a worker of this role serves, and return the first one."""
        deadline_s = time.monotonic() + within_s
        while True:
            one = next(w for w in self.workers() if w.name.startswith(role))
            if one.phase is Phase.SERVING:
                return one
            assert time.monotonic() < deadline_s, one
            time.sleep(0.1)

    def named(self, name: str) -> Health:
        """Return the health of the worker called `name`, as reported by the controller."""
        return {one.name: one for one in self.workers()}[name]

    def members(self) -> list[cluster_pb2.WorkerInfo]:
        with self.channel(self._cluster.endpoints.controller) as channel:
            stream = cluster_pb2_grpc.ClusterStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=60)
            members = list(next(stream).workers)
            stream.cancel()
        return members

    def inspect(self) -> list[worker_pb2.InspectResponse]:
        """Return the pages and open requests of every registered worker."""
        return [self._inspect(member.address) for member in self.members()]

    def inspect_worker(self, name: str) -> worker_pb2.InspectResponse:
        """Return the report of one registered worker without calling the others, which may be suspended.

        Raises KeyError if the worker is not registered.
        """
        return self._inspect({member.peer.worker_id: member.address for member in self.members()}[name])

    def _inspect(self, address: str) -> worker_pb2.InspectResponse:
        with self.channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Inspect(worker_pb2.InspectRequest(), timeout=60)

    def assert_idle_and_sound(self) -> None:
        """Assert that every worker becomes idle.

        It then has no open request, all its pages are free or cached, and its page pool is consistent.
        """
        deadline_s = time.monotonic() + IDLE_WITHIN_S
        while True:
            states = self.inspect()
            assert [one.integrity_error for one in states] == [""] * self.config.worker_count
            if all(_idle(one) for one in states):
                return
            assert time.monotonic() < deadline_s, f"still not idle: {states}"
            time.sleep(0.1)

    def channel(self, address: str) -> grpc.Channel:
        """Open a channel to the controller or to a worker, with the cluster's credentials."""
        client = credentials_of(self._cluster.endpoints.token).client
        return grpc.secure_channel(address, client, [("grpc.ssl_target_name_override", PART_NAME)])


def _idle(one: worker_pb2.InspectResponse) -> bool:
    taken = one.pages_owned + one.pages_shared + one.pages_advertised + one.pages_quarantined + one.pages_reserved
    return one.pages_free + one.pages_cached == one.pages_total and not (taken or one.requests or one.leases)


class Shelf:
    """Keeps the one running cluster of this test process, and replaces it when a test requests other settings."""

    def __init__(self, model: Path, new_folder: Callable[[], Path], kv_cache_dtype: str = "auto") -> None:
        self._model = model
        self._kv_cache_dtype = kv_cache_dtype
        self._new_folder = new_folder
        self._running: RunningCluster | None = None

    def get(self, **settings: Any) -> RunningCluster:
        config = ClusterSettings.of(
            **{
                "model": self._model,
                "served_model_names": ("SmolLM2-135M-Instruct",),
                "grpc_port": 0,
                "http_port": 0,
                "kv_checksum_rate": 1.0,
                "threads": 1,
                "kv_cache_dtype": self._kv_cache_dtype,
                "planner": PlannerSettings(PlannerMode.DRY_RUN, window_s=5.0),
                **settings,
            }
        )
        if self._running is not None and self._running.config != config:
            self.clear()
        if self._running is None:
            self._running = RunningCluster(config, self._new_folder())
        return self._running

    def clear(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None
