"""The running cluster that is attacked, the keys of its three tenants, and calls of the hostile one."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.cli.models.default_model import find_default_model
from tandem.cluster.supervision.health import Phase
from tandem.engine.weights.gguf import prepare_model
from tandem.settings.cluster import ClusterSettings
from tests.running_cluster import RunningCluster

TIMEOUT_S = 60.0


@dataclass
class Scene:
    """A cluster with a model of its own, and what attacks need to know of it."""

    folder: Path
    hostile: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    bystander: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    operator: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.model = prepare_model(find_default_model())
        keys = self.folder / "keys"
        keys.write_text(f"{self.hostile}\n{self.bystander}\n{self.operator} role=operator\n")
        keys.chmod(0o600)
        self.cluster = RunningCluster(
            ClusterSettings.of(
                model=self.model,
                grpc_port=0,
                http_port=0,
                threads=1,
                decode=2,
                runtime_loras=True,
                api_key_file=keys,
            ),
            self.folder / "logs",
        )

    @property
    def http(self) -> str:
        """The address of the HTTP listener."""
        return self.cluster.http_address

    @property
    def grpc(self) -> str:
        """The address of the gRPC listener."""
        return self.cluster.grpc_address

    def post(self, body: Mapping[str, Any], path: str = "/completions", key: str = "") -> int:
        """Send a body as the hostile tenant; returns the status, 0 without one in time."""
        headers = {"Authorization": f"Bearer {key or self.hostile}", "Content-Type": "application/json"}
        with suppress(httpx.HTTPError):
            url = f"http://{self.http}/v1{path}"
            return httpx.post(url, content=json.dumps(body), headers=headers, timeout=TIMEOUT_S).status_code
        return 0

    def pids(self) -> dict[str, int]:
        """Return the process id of the controller, the router and each worker, by name."""
        parts = (self.cluster.router(), *self.cluster.workers())
        return {"controller": self.cluster.controller_pid(), **{part.name: part.pid for part in parts}}

    def serves(self, name: str) -> bool:
        """Return True if a process of this name serves."""
        parts = (self.cluster.router(), *self.cluster.workers())
        return name == "controller" or any(part.name == name and part.phase is Phase.SERVING for part in parts)

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each of these processes with its children."""
        return {name: resident(pid) for name, pid in self.pids().items()}

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process of the cluster."""
        os.kill(self.pids()[name], number)


def resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; those that have ended count as none."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        total = 0
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += member.memory_info().rss
        return total
    return 0


def at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Run calls in threads of their own; returns their results."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: call(), calls))


def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait until a condition holds; returns False if it does not in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
