"""The processes of a router measurement: the stand-in worker, and a router that reports its resource usage."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.router.token_source import TOKEN, TokenSource
from router.api.listeners import SERVICE
from router.config import RouterConfig
from router.server import RouterServer
from tandem.net.heap import freeze_gc
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time in seconds since the router became ready, and its present memory."""

    cpu_s: float
    rss_bytes: int


def run_source(pipe: Connection, step_s: float) -> None:
    """Run the stand-in worker, and send the controller's address through `pipe`."""

    async def run() -> None:
        address = await TokenSource(step_s).start()
        freeze_gc()
        pipe.send(address)
        await asyncio.Event().wait()

    asyncio.run(run())


def run_router(pipe: Connection, controller: str, model: Path, settings: Mapping[str, Any]) -> None:
    """Run a router with these fields of `RouterConfig`, and send its gRPC and HTTP address once it is ready.

    The process replies to each "usage" with a `Usage`; "end" stops it.
    """

    async def run() -> None:
        config = RouterConfig(
            **{
                "router_id": f"router-{os.getpid()}",
                "served": ModelSettings(model, ("tokens",)),
                "controller_address": controller,
                "secrets": Secrets(TOKEN),
                "mode": Mode.ADAPTIVE,
                "grpc_port": 0,
                "http_port": 0,
                **settings,
            }
        )
        server = RouterServer(config)
        listeners = await server.start()
        async with grpc.aio.insecure_channel(listeners.grpc_address) as channel:
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            async for health in health_pb2_grpc.HealthStub(channel).Watch(asked):
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        freeze_gc()  # as a router's process does
        before = _usage()
        pipe.send((listeners.grpc_address, listeners.http_address.removeprefix("http://")))
        while await asyncio.to_thread(pipe.recv) != "end":
            now = _usage()
            pipe.send(Usage(now.cpu_s - before.cpu_s, now.rss_bytes))
        await server.stop(0.0)

    asyncio.run(run())


def _usage() -> Usage:
    return Usage(time.process_time(), psutil.Process().memory_info().rss)
