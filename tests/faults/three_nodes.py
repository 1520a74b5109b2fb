"""A Ray of three nodes on one machine, each with an address and processes of its own.

A head with controller, router and the prefill worker, a node with the first decode worker, and a node that joins
later, with resources for two decode workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tandem.cluster.launcher import Endpoints
from tests.ray_start import head_address, ray_environment, ray_start

from .joined import START_S, JoinedCluster, Process, joined_cluster, ray_node, short_folder

HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
"""Loopback addresses, but not the one that Ray treats as no address."""
PLACES = {HEAD: '{"prefill": 1}', SECOND: '{"decode": 1}', THIRD: '{"decode": 2}'}
LOOK_S = 0.02
LOGS = "logs"
SETTINGS = {
    "served_model_names": ("small",),
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "threads": 1,
    "page_tokens": 16,
    "kv_cache_bytes": 45 << 18,
    "max_step_tokens": 32,
    "prefix_cache": False,
    "kv_checksum_rate": 1.0,
    "grpc_port": 0,
    "http_port": 0,
    "start_timeout_s": START_S - 30,
    "trusted_network": True,
}


class ThreeNodes(JoinedCluster):
    """The cluster on these nodes, which serves within `three_nodes`."""

    def __init__(self, endpoints: Endpoints, start: Callable[[str], Awaitable[Process]], logs: Path) -> None:
        super().__init__(endpoints)
        self.logs = logs
        self._start = start
        self.nodes: dict[str, Process] = {}

    async def add(self, node: str) -> None:
        self.nodes[node] = await self._start(node)

    def kill(self, node: str) -> None:
        self.nodes.pop(node).kill()

    @property
    def places(self) -> dict[str, str]:
        """Returns the node of each registered worker, as of the last `look`."""
        return {name: worker.address.rpartition(":")[0] for name, worker in self.workers.items()}

    async def until(self, condition: Callable[[], bool], within_s: float = START_S) -> float:
        """Waits until `condition` holds for the registered workers; returns the seconds that it took."""
        began = time.monotonic()
        while True:
            await self.look()
            if condition():
                return time.monotonic() - began
            assert time.monotonic() - began < within_s, self.places
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def three_nodes(model: Path) -> AsyncIterator[ThreeNodes]:
    """Starts the first two nodes, each with a worker."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(short_folder())
        environment = {
            **ray_environment(secrets.token_hex(32)),
            "UCX_NET_DEVICES": "lo",
            # Ray declares a node dead after five refused connections: with this after 5 s instead of 15.
            "RAY_health_check_period_ms": "1000",
            "PATH": os.environ["PATH"],
        }
        running: dict[str, Process] = {}

        async def start(node: str) -> Process:
            head = head_address(folder / HEAD) if running else ""
            running[node] = await ray_node(ray_start(folder / node, node, PLACES[node], head), **environment)
            return running[node]

        async def end() -> None:
            await asyncio.gather(*(node.terminate() for node in running.values()))

        stack.push_async_callback(end)
        first = {HEAD: await start(HEAD)}
        first[SECOND] = await start(SECOND)
        places = {"model": str(model), "log_folder": str(folder / LOGS), "ray_address": head_address(folder / HEAD)}
        endpoints = await stack.enter_async_context(joined_cluster(environment, **SETTINGS, **places))
        nodes = ThreeNodes(endpoints, start, folder / LOGS)
        nodes.nodes.update(first)
        await nodes.look()
        yield nodes
