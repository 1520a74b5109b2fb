"""A cluster in one process, scraped as Prometheus scrapes a real one.

Workers run over fake engines, and the controller's process keepers over processes that live as long as a test sets. All
metrics are at the controller's address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from tandem.cluster.metrics import ClusterMetrics
from tandem.cluster.supervision.health import Backoff, Phase
from tandem.cluster.supervision.process_supervisor import Process, ProcessSupervisor
from tandem.engine.graph_use import GraphUse
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import METRICS_PATH, MetricsServer, fetch, metrics_page
from tandem.protocol.errors import Unavailable
from tandem.worker.reporting.metrics import engine_facts, worker_facts
from tests.worker_pair import End, WorkerPair, until

ROUTER = "router"


class Living(Process):
    """A process that serves at once, until it dies."""

    def __init__(self, serves: Callable[[], None]) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serves = serves

    async def pid(self) -> int:
        return 1

    async def start(self) -> None:
        self._serves()

    async def ended(self) -> str:
        return await asyncio.shield(self.death)

    async def works(self) -> None:
        return

    async def kill(self) -> None:
        raise AssertionError("it never hangs")

    async def end(self, grace_s: float) -> None:
        pass


class SmallCluster:
    """A small cluster; use it as an async context."""

    def __init__(self, *, device: str = "cpu", **changes: Any) -> None:
        """Sets it up; `device` is an engine's device name, `changes` are options of `WorkerPair`."""
        self.pair = WorkerPair(**changes)
        self.texts: list[str] = []
        """The scraped texts, one per minute."""
        self._device = device
        self._listeners: dict[str, tuple[End, str]] = {}
        self._open: list[MetricsServer] = []
        self._lives: dict[str, Living] = {}

    async def __aenter__(self) -> SmallCluster:
        await self.pair.__aenter__()
        for end in self.pair.ends:
            self._listeners[end.me.worker_id] = end, await self._open_listener(end)
        names = (ROUTER, *self._listeners)
        self._supervisors = {
            name: ProcessSupervisor(name, partial(self._spawn, name), partial(self._gone, name), _AT_ONCE)
            for name in names
        }
        await self.open_controller()
        self._runs = [asyncio.ensure_future(supervisor.run()) for supervisor in self._supervisors.values()]
        await self._serving()
        return self

    async def __aexit__(self, *error: object) -> None:
        for supervisor in self._supervisors.values():
            supervisor.stop()
        await asyncio.gather(*self._runs)
        await asyncio.gather(self.close_controller(), *(listener.close() for listener in self._open))
        await self.pair.__aexit__(*error)

    async def minutes(self, number: int) -> None:
        """Repeats the present scrape for `number` minutes."""
        try:
            text = await fetch(self._address, METRICS_PATH, timeout_s=60.0)
        except Unavailable:
            text = ""
        self.texts += [text] * number

    async def kill(self, name: str) -> None:
        """Kills a process; returns when it serves again."""
        life = self._lives[name]
        life.death.set_result("it was killed")
        await until(lambda: self._lives[name] is not life)
        await self._serving()

    async def open_controller(self) -> None:
        """Opens the controller's metrics, which know all serving processes."""
        self._metrics = ClusterMetrics("fake", "", frozenset(), self._health, dict)
        self._address = await self._metrics.open("127.0.0.1", 0)
        for name in self._listeners:
            self._opened(name)

    async def close_controller(self) -> None:
        """Closes the controller's metrics listener."""
        await self._metrics.close()

    async def _serving(self) -> None:
        await until(lambda: all(supervisor.phase is Phase.SERVING for supervisor in self._supervisors.values()))

    async def _open_listener(self, end: End) -> str:
        """Opens a worker's metrics listener like a worker's process."""
        worker = end.worker
        engine: Any = SimpleNamespace(
            device_name=self._device,
            facts=worker.facts,
            graph_use=GraphUse(),
            expert_tokens=SimpleNamespace(read=lambda: {("first", "0"): 7}),
        )
        worker.metrics.registry.read(partial(worker_facts, worker.report, worker.transport))
        worker.metrics.registry.read(partial(engine_facts, engine, lambda: worker.assignment.role.value))
        listener = MetricsServer({METRICS_PATH: metrics_page(Exposition(worker.metrics.registry))}, frozenset())
        self._open.append(listener)
        return await listener.open("127.0.0.1")

    async def _spawn(self, name: str, _incarnation: int) -> Process:
        self._lives[name] = Living(partial(self._opened, name))
        return self._lives[name]

    def _opened(self, name: str) -> None:
        if name in self._listeners:
            end, address = self._listeners[name]
            self._metrics.opened(name, end.config.role.value, address)

    def _gone(self, name: str, _incarnation: int) -> None:
        self._metrics.gone(name)

    def _health(self) -> list[tuple[str, Any]]:
        roles = {name: end.config.role.value for name, (end, _) in self._listeners.items()}
        return [(roles.get(name, ROUTER), supervisor.health()) for name, supervisor in self._supervisors.items()]


_AT_ONCE = Backoff(first_s=0, longest_s=0)
