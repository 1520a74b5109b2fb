"""A cluster in a separate process that joins a Ray of several nodes, each node with processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil

from tandem.cli.connection.controller_client import ControllerClient
from tandem.cluster.launcher import Endpoints
from tandem.net import rpc
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.ray_start import UP

ROOT = Path(__file__).parents[2]
START_S, STOP_S, IDLE_WITHIN_S = 150.0, 30.0, 120.0
RAY_TRIES = 3


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for Ray's socket names."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Process:
    """A script that takes commands as lines on stdin, replies with lines, and exits when stdin closes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *command: str, **env: str) -> Process:
        pipe = asyncio.subprocess.PIPE
        environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **env}
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT))

    async def line(self, within_s: float = START_S) -> str:
        assert self._process.stdout
        line = await asyncio.wait_for(self._process.stdout.readline(), within_s)
        assert line, "it ended"
        return line.decode()

    async def call(self, **message: Any) -> str:
        """Sends one line and returns the reply."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return await self.line()

    async def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._gone()

    async def terminate(self) -> None:
        """Terminates a process that does not read stdin."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._gone()

    async def _gone(self) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            raise

    def kill(self) -> None:
        """Kills the process and all its descendants with SIGKILL, as if its host had lost power."""
        whole = psutil.Process(self._process.pid)
        for process in [whole, *whole.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class JoinedCluster:
    """The cluster's registered workers and their pages, as the controller and the workers report them."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.router_address = endpoints.grpc
        self.controller_address = endpoints.controller
        self._token = endpoints.token
        self.controller = ControllerClient(endpoints.controller, endpoints.token)
        self.workers: dict[str, cluster_pb2.WorkerInfo] = {}

    async def look(self) -> None:
        """Updates the registered workers from the controller."""
        async with rpc.open_channel(self.controller_address, self._token) as channel:
            watch = cluster_pb2_grpc.ClusterStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=60)
            membership = await watch.read()
            assert isinstance(membership, cluster_pb2.Membership)
            watch.cancel()
        self.workers = {worker.peer.worker_id: worker for worker in membership.workers}

    async def inspect(self, worker_id: str) -> worker_pb2.InspectResponse:
        async with rpc.open_channel(self.workers[worker_id].address, self._token) as channel:
            reply = await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=60)
        assert isinstance(reply, worker_pb2.InspectResponse)
        return reply

    async def idle_and_sound(self) -> None:
        """Waits until all pages of all workers are free, no request or lease is open, and all pools are consistent."""
        deadline_s = time.monotonic() + IDLE_WITHIN_S
        for worker_id in self.workers:
            while True:
                one = await self.inspect(worker_id)
                assert not one.integrity_error
                if one.pages_free == one.pages_total and not (one.requests or one.leases or one.pages_reserved):
                    break
                assert time.monotonic() < deadline_s, one
                await asyncio.sleep(0.1)


async def ray_node(command: list[str], **env: str) -> Process:
    """Starts the node of `command` and waits until it is up.

    Ray allows a node 30 s, which a busy machine may exceed at first, so a failed start is retried.
    """
    for last in (*[False] * (RAY_TRIES - 1), True):
        node = await Process.start(*command, **env)
        try:
            while UP not in await node.line():
                pass
            return node
        except BaseException as error:
            await node.terminate()
            if last or not isinstance(error, AssertionError):
                raise
    raise AssertionError


@contextlib.asynccontextmanager
async def joined_cluster(environment: dict[str, str], **settings: Any) -> AsyncIterator[Endpoints]:
    """A cluster with these settings of `ClusterSettings`, once it serves."""
    cluster = await Process.start(sys.executable, str(ROOT / "tests/integration/cluster_process.py"), **environment)
    try:
        yield Endpoints(**json.loads(await cluster.call(**settings)))
    finally:
        await cluster.stop()
