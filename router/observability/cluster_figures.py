"""The figures of the whole cluster, which the router's page shows; the controller scrapes them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from tandem.metrics.cluster_view import ClusterView, cluster_view, view_scrape
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.net.rpc import error_of
from tandem.protocol.generated.tandem.v1 import cluster_pb2

SHARED_S = 2.0
"""Seconds for which one scrape serves all readers: each scrape costs every process some milliseconds."""
INTERVAL_S = 10.0
"""Maximum length of the interval over which rates are computed, in seconds."""
_FIRST_S = 1.0
"""Seconds between the first two scrapes."""
_SCRAPE_S = 5.0
"""Timeout of one scrape, in seconds."""


class ClusterFigures:
    """Scrapes the cluster when a reader asks for its figures, and keeps the scrapes of the last `INTERVAL_S`.

    The router has one; all calls are on the event loop.
    """

    def __init__(self, controller: Any) -> None:
        """`controller` is the stub of the controller's gRPC service."""
        self._controller = controller
        self._scrapes: list[Scrape] = []
        self._lock = asyncio.Lock()

    async def view(self) -> ClusterView:
        """Return the cluster's state and its activity in the last seconds.

        Raises Unavailable or DeadlineExceeded if the controller does not respond.
        """
        async with self._lock:
            now_s = time.monotonic()
            self._scrapes = [scrape for scrape in self._scrapes if now_s - scrape.at_s <= INTERVAL_S]
            if not self._scrapes:
                await self._scrape()
                await asyncio.sleep(_FIRST_S)
            if len(self._scrapes) == 1 or now_s - self._scrapes[-1].at_s >= SHARED_S:
                await self._scrape()
            interval = ScrapeInterval(self._scrapes[0], self._scrapes[-1])
            return await asyncio.to_thread(cluster_view, interval)

    async def _scrape(self) -> None:
        try:
            reply = await self._controller.GetMetrics(cluster_pb2.GetMetricsRequest(), timeout=_SCRAPE_S)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, "the controller") from error
        self._scrapes.append(await asyncio.to_thread(view_scrape, reply.text, time.monotonic()))
