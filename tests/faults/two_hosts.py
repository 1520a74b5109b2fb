"""Two hosts on one machine, one Ray cluster over both: in this network namespace Ray's head with controller, router and
decode worker, in another a second Ray node with the prefill worker, KV over TCP between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from cluster.launcher import Endpoints
from tests.ray_start import UP, head_address, ray_environment, ray_start
from wire import rpc
from wire.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc

from .wire import ADDRESSES

ROOT = Path(__file__).parents[2]
HERE, THERE = "tandem-here", "tandem-there"
WIRES = "tcp,self"
"""What UCX may use: left alone, it would find that both hosts share their memory."""
START_S, STOP_S, IDLE_WITHIN_S = 150.0, 30.0, 120.0
SETTINGS = {
    "model_name": "small",
    "dtype": "float32",
    "threads": 1,
    "kv_cache_bytes": 1 << 26,
    "max_step_tokens": 64,
    "prefix_cache": False,
    "kv_checksum_rate": 1.0,
    "grpc_port": 0,
    "http_port": 0,
    "start_timeout_s": START_S - 30,
}


def refusal() -> str:
    """Why there can be no second network namespace here; "" = there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    if not Path("/dev/net/tun").exists():
        return "this kernel or container has no /dev/net/tun"
    name = f"tandem-{os.getpid() % 10_000}"
    for make, unmake in (
        (f"ip netns add {name}", f"ip netns del {name}"),
        (f"ip tuntap add dev {name} mode tap", f"ip tuntap del dev {name} mode tap"),
    ):
        made = subprocess.run(make.split(), capture_output=True, text=True, check=False)
        if made.returncode:
            return f"`{make}` is refused: {made.stderr.strip()}"
        subprocess.run(unmake.split(), check=True)
    return ""


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A network namespace with nothing in it."""
    name = f"tandem-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Process:
    """A script that is told what to do by lines on stdin, answers with lines, and ends with stdin."""

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

    async def tell(self, **message: Any) -> str:
        """Send one line; its answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return await self.line()

    async def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._gone()

    async def terminate(self) -> None:
        """For one that does not look at stdin."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._gone()

    async def _gone(self) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            raise


class TwoHosts:
    """Serves while inside `two_hosts`."""

    def __init__(self, wire: Process, endpoints: Endpoints) -> None:
        self.wire = wire
        self.router_address = endpoints.grpc
        self.controller_address = endpoints.controller
        self._token = endpoints.token
        self.workers: dict[str, cluster_pb2.WorkerInfo] = {}

    async def look(self) -> None:
        """Learn who is registered now."""
        async with rpc.open_channel(self.controller_address, self._token) as channel:
            watch = cluster_pb2_grpc.ClusterStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=10)
            membership = await watch.read()
            assert isinstance(membership, cluster_pb2.Membership)
            watch.cancel()
        self.workers = {worker.worker_id: worker for worker in membership.workers}

    async def inspect(self, worker_id: str) -> worker_pb2.InspectResponse:
        async with rpc.open_channel(self.workers[worker_id].address, self._token) as channel:
            reply = await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=10)
        assert isinstance(reply, worker_pb2.InspectResponse)
        return reply

    async def idle_and_sound(self) -> None:
        """Every page of both workers free, nothing open, both pools consistent, in the end."""
        give_up = time.monotonic() + IDLE_WITHIN_S
        for worker_id in ("prefill-0", "decode-0"):
            while True:
                one = await self.inspect(worker_id)
                assert not one.integrity_error
                if one.pages_free == one.pages_total and not (one.requests or one.leases or one.pages_promised):
                    break
                assert time.monotonic() < give_up, one
                await asyncio.sleep(0.1)


async def ray_node(command: list[str], **env: str) -> Process:
    """The node that `command` starts, once it is up."""
    node = await Process.start(*command, **env)
    try:
        while UP not in await node.line():
            pass
    except BaseException:
        await node.terminate()
        raise
    return node


@contextlib.asynccontextmanager
async def two_hosts(model: Path) -> AsyncIterator[TwoHosts]:
    """Everything up, over a perfect wire at first."""
    async with contextlib.AsyncExitStack() as stack:
        there, folder = stack.enter_context(namespace()), stack.enter_context(short_folder())
        wire = await Process.start(sys.executable, str(ROOT / "tests/faults/wire.py"), there, HERE, THERE)
        stack.push_async_callback(wire.stop)
        assert await wire.line() == "up\n"
        everywhere = {"UCX_TLS": WIRES, **ray_environment(secrets.token_hex(32))}
        near, far = ({**everywhere, "UCX_NET_DEVICES": end} for end in (HERE, THERE))
        head = await ray_node(ray_start(folder / "here", ADDRESSES[0], '{"decode": 1}'), **near)
        stack.push_async_callback(head.terminate)
        address = head_address(folder / "here")
        node = ray_start(folder / "there", ADDRESSES[1], '{"prefill": 1}', head=address)
        beyond = await ray_node(["ip", "netns", "exec", there, *node], **far)
        stack.push_async_callback(beyond.terminate)
        cluster = await Process.start(sys.executable, str(ROOT / "tests/integration/cluster_process.py"), **near)
        stack.push_async_callback(cluster.stop)
        places = {"model": str(model), "log_folder": str(folder / "logs"), "ray_address": address}
        hosts = TwoHosts(wire, Endpoints(**json.loads(await cluster.tell(**SETTINGS, **places))))
        await hosts.look()
        yield hosts
