"""The whole cluster's metrics at one address, and who is there to be scraped, for Prometheus' HTTP service discovery.

Each process counts for itself and is asked whenever somebody asks here: nothing is kept, and nothing added up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cluster.supervision.health import Health, Phase
from telemetry import families as f
from telemetry.board import Board, Facts
from telemetry.exposition import TEXT, Exposition, merge
from telemetry.metrics_server import DISCOVERY_PATH, METRICS_PATH, MetricsServer, fetch, metrics_page
from wire.errors import Unavailable
from wire.security.credentials import metrics_key_of

_ME = "controller"
_JSON = "application/json"
_TARGET_S = 2.0
"""How long one process may take to answer; the others' metrics wait for it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A process that can be scraped, at host:port."""

    role: str
    address: str


class ClusterMetrics:
    """The controller's metrics listener. Belongs to the event loop."""

    def __init__(
        self,
        model: str,
        token: str,
        keys: frozenset[str],
        health: Callable[[], Iterable[tuple[str, Health]]],
        roles: Callable[[], Mapping[str, str]],
    ) -> None:
        """The processes' pages are opened by the key that comes from `token`, this one's by `keys`. `health` tells of
        each kept process, with the role that it was started for; `roles` those that workers have now.
        """
        self._key = metrics_key_of(token)
        self._health = health
        self._roles = roles
        self._targets: dict[str, Target] = {}
        self._answered: dict[str, bool] = {}
        self.board = Board({"model": model, "worker": _ME})
        self._said: Facts = {}
        """What the next page says. It is rendered beside the event loop, on which workers come and go meanwhile."""
        self.board.read(lambda: self._said)
        self._own = metrics_page(Exposition(self.board))
        self._listener = MetricsServer({METRICS_PATH: self._metrics, DISCOVERY_PATH: self._discovery}, keys)

    async def open(self, host: str, port: int) -> str:
        """Listen; host:port. FailedPrecondition if the port is taken."""
        return await self._listener.open(host, port)

    async def close(self) -> None:
        """Idempotent."""
        await self._listener.close()

    def opened(self, name: str, role: str, address: str) -> None:
        """A process serves metrics there."""
        self._targets[name] = Target(role, address)

    def gone(self, name: str) -> None:
        """It ended."""
        self._targets.pop(name, None)
        self._answered.pop(name, None)

    async def text(self) -> str:
        """All processes' series, now."""
        texts = await asyncio.gather(*(self._ask(name, target) for name, target in tuple(self._targets.items())))
        self._said = self._facts()
        own, _ = await self._own(TEXT)
        return merge([own.decode(), *texts])

    async def _metrics(self, _accept: str) -> tuple[bytes, str]:
        return (await self.text()).encode(), TEXT

    async def _ask(self, name: str, target: Target) -> str:
        try:
            text = await fetch(target.address, METRICS_PATH, self._key, _TARGET_S)
        except Unavailable:
            text = ""
        if name in self._targets:
            self._answered[name] = bool(text)
        return text

    async def _discovery(self, _accept: str) -> tuple[bytes, str]:
        """As `http_sd_configs` wants it. The labels are for relabeling alone: each process names itself in its own."""
        roles = self._roles()
        found = [
            {
                "targets": [target.address],
                "labels": {"__meta_tandem_worker": name, "__meta_tandem_role": roles.get(name, target.role)},
            }
            for name, target in self._targets.items()
        ]
        return json.dumps(found).encode(), _JSON

    def _facts(self) -> Facts:
        roles, kept = self._roles(), tuple(self._health())
        return {
            f.PROCESS_UP: {
                (roles.get(each.name, role), each.name): float(each.phase is Phase.SERVING) for role, each in kept
            },
            f.PROCESS_RESTARTS: {(each.name,): float(each.restarts) for _, each in kept},
            f.TARGET_UP: {
                (each.name,): float(self._answered[each.name]) for _, each in kept if each.name in self._answered
            },
        }
