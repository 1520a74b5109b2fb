"""Two hosts on one machine: this network namespace with registry, router and decode worker, and another with a prefill
worker, KV over TCP between them.

Real processes and the real registry, but no Ray: a Ray of Tandem stays on one host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from cluster.registry import Registry
from cluster.service import ClusterServicer
from router.config import RouterConfig
from router.server import RouterServer
from wire import rpc
from wire.generated.tandem.v1 import cluster_pb2_grpc, worker_pb2, worker_pb2_grpc

from .wire import ADDRESSES

ROOT = Path(__file__).parents[2]
TOKEN = "secret"
HERE, THERE = "tandem-here", "tandem-there"
WIRES = "tcp,self"
"""What UCX may use: left alone, it would find that both hosts share their memory."""
START_S, IDLE_WITHIN_S = 150.0, 60.0
ENGINE = {"dtype": "float32", "threads": 1, "kv_cache_bytes": 1 << 26, "max_step_tokens": 64}


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
        try:
            await asyncio.wait_for(self._process.wait(), 30)
        except TimeoutError:
            self._process.kill()
            raise


class TwoHosts:
    """Serves while inside `two_hosts`."""

    def __init__(self, wire: Process, registry: Registry, router_address: str) -> None:
        self.wire = wire
        self.registry = registry
        self.router_address = router_address

    async def inspect(self, worker_id: str) -> worker_pb2.InspectResponse:
        address = next(w.address for w in self.registry.membership().workers if w.peer.worker_id == worker_id)
        async with rpc.open_channel(address, TOKEN) as channel:
            reply = await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=10)
        assert isinstance(reply, worker_pb2.InspectResponse)
        return reply

    async def idle_and_sound(self) -> None:
        """Every page of both workers free or cached, nothing open, both pools consistent, in the end."""
        give_up = time.monotonic() + IDLE_WITHIN_S
        for worker_id in ("prefill-0", "decode-0"):
            while True:
                one = await self.inspect(worker_id)
                assert not one.integrity_error
                unused = one.pages_free + one.pages_cached
                if unused == one.pages_total and not (one.requests or one.leases or one.pages_promised):
                    break
                assert time.monotonic() < give_up, one
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def two_hosts(model: Path) -> AsyncIterator[TwoHosts]:
    """Everything up, over a perfect wire at first."""
    async with contextlib.AsyncExitStack() as stack:
        there = stack.enter_context(namespace())
        wire_script, worker_script = ROOT / "tests/faults/wire.py", ROOT / "tests/integration/worker_process.py"
        worker = (sys.executable, str(worker_script))
        wire = await Process.start(sys.executable, str(wire_script), there, HERE, THERE)
        stack.push_async_callback(wire.stop)
        assert await wire.line() == "up\n"
        registry = Registry()
        server = rpc.open_server(tokens=frozenset({TOKEN}))
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(registry), server)
        controller = f"{ADDRESSES[0]}:{server.add_insecure_port(f'{ADDRESSES[0]}:0')}"
        await server.start()
        stack.push_async_callback(server.stop, None)
        here = Process.start(*worker, UCX_TLS=WIRES, UCX_NET_DEVICES=HERE)
        beyond = Process.start("ip", "netns", "exec", there, *worker, UCX_TLS=WIRES, UCX_NET_DEVICES=THERE)
        order = {"incarnation": 1, "model": str(model), "engine": ENGINE, "token": TOKEN}
        order["controller_address"] = controller
        both = await asyncio.gather(here, beyond)
        for process in both:
            stack.push_async_callback(process.stop)
        await asyncio.gather(
            both[0].tell(worker_id="decode-0", role="decode", host=ADDRESSES[0], **order),
            both[1].tell(worker_id="prefill-0", role="prefill", host=ADDRESSES[1], **order),
        )
        config = RouterConfig("router", model, "small", controller, token=TOKEN, grpc_port=0, http_port=0)
        router = RouterServer(config)
        endpoints = await router.start()
        stack.push_async_callback(router.stop, 0.5)
        give_up = time.monotonic() + START_S
        while not router.ready:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        yield TwoHosts(wire, registry, endpoints.grpc_address)
