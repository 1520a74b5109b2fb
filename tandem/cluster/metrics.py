"""The cluster-wide metrics at one address, and the list of scrape targets for Prometheus' HTTP service discovery.

Each process keeps its own metrics and is scraped on every request; the controller neither caches nor sums anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tandem.cluster.supervision.health import Health, Phase
from tandem.metrics import families as f
from tandem.metrics.exposition import TEXT, Exposition, merge
from tandem.metrics.metrics_server import DISCOVERY_PATH, METRICS_PATH, MetricsServer, fetch, metrics_page
from tandem.metrics.registry import Facts, Registry
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import Unavailable

_ME = "controller"
_JSON = "application/json"
_TARGET_S = 2.0
"""Maximum time for one process to respond, in seconds; the other processes' metrics wait for it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One process that can be scraped at `address`, host:port."""

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
        """Create the listener; a client must present one of `keys`.

        The controller reads the metrics pages of the processes with a key derived from `token`. `health` returns each
        supervised process with the role that it was started for, `roles` the workers' current roles.
        """
        self._key = metrics_key_of(token)
        self._health = health
        self._roles = roles
        self._targets: dict[str, Target] = {}
        self._answered: dict[str, bool] = {}
        self.registry = Registry({"model": model, "worker": _ME})
        self._facts_now: Facts = {}
        """The values of the next metrics page, copied because a thread renders the page while workers may change."""
        self.registry.read(lambda: self._facts_now)
        self._own = metrics_page(Exposition(self.registry))
        self._listener = MetricsServer({METRICS_PATH: self._metrics, DISCOVERY_PATH: self._discovery}, keys)

    async def open(self, host: str, port: int) -> str:
        """Listen and return host:port. Raises FailedPrecondition if the port is taken."""
        return await self._listener.open(host, port)

    async def close(self) -> None:
        """Close the listener. Idempotent."""
        await self._listener.close()

    def opened(self, name: str, role: str, address: str) -> None:
        """Register the metrics address of a process."""
        self._targets[name] = Target(role, address)

    def gone(self, name: str) -> None:
        """Remove a process that has ended."""
        self._targets.pop(name, None)
        self._answered.pop(name, None)

    async def text(self) -> str:
        """Return the current series of all processes, as Prometheus text."""
        texts = await asyncio.gather(*(self._ask(name, target) for name, target in tuple(self._targets.items())))
        self._facts_now = self._facts()
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
        """Return the targets for `http_sd_configs`, as JSON.

        The labels are for relabeling only: each process labels its own series.
        """
        roles = self._roles()
        targets = [
            {
                "targets": [target.address],
                "labels": {"__meta_tandem_worker": name, "__meta_tandem_role": roles.get(name, target.role)},
            }
            for name, target in self._targets.items()
        ]
        return json.dumps(targets).encode(), _JSON

    def _facts(self) -> Facts:
        roles, kept = self._roles(), tuple(self._health())
        return {
            f.PROCESS_UP: {
                (roles.get(health.name, role), health.name): float(health.phase is Phase.SERVING)
                for role, health in kept
            },
            f.PROCESS_RESTARTS: {(health.name,): float(health.restarts) for _, health in kept},
            f.TARGET_UP: {
                (health.name,): float(self._answered[health.name])
                for _, health in kept
                if health.name in self._answered
            },
        }
