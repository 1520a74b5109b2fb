"""Two hosts on one machine and one Ray cluster over both.

The current network namespace has Ray's head with controller, router and decode worker; another one has a second Ray
node with the prefill worker. KV goes over TCP between them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tandem.cluster.launcher import Endpoints
from tests.ray_start import head_address, ray_environment, ray_start

from .joined import ROOT, START_S, JoinedCluster, Process, joined_cluster, ray_node, short_folder
from .wire import ADDRESSES

HERE, THERE = "tandem-here", "tandem-there"
WIRES = "tcp,self"
"""The transports that UCX may use; by default it would detect that both hosts share their memory."""
SETTINGS = {
    "served_model_names": ("small",),
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "threads": 1,
    "kv_cache_bytes": 1 << 26,
    "max_step_tokens": 64,
    "prefix_cache": False,
    "kv_checksum_rate": 1.0,
    "grpc_port": 0,
    "http_port": 0,
    "start_timeout_s": START_S - 30,
    "trusted_network": True,
}


def refusal() -> str:
    """Returns the reason why a second network namespace cannot be created, "" if it can."""
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
    """An empty network namespace."""
    name = f"tandem-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class TwoHosts(JoinedCluster):
    """The cluster on both hosts, which serves within `two_hosts`."""

    def __init__(self, wire: Process, endpoints: Endpoints) -> None:
        super().__init__(endpoints)
        self.wire = wire


@contextlib.asynccontextmanager
async def two_hosts(model: Path) -> AsyncIterator[TwoHosts]:
    """Starts the cluster, with a perfect link at first."""
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
        places = {"model": str(model), "log_folder": str(folder / "logs"), "ray_address": address}
        hosts = TwoHosts(wire, await stack.enter_async_context(joined_cluster(near, **SETTINGS, **places)))
        await hosts.look()
        yield hosts
