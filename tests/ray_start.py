"""A small Ray node for tests, as an administrator would start it: with a token, without Tandem's settings."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

OBJECT_STORE_BYTES = 80 << 20
UP = "block forever"
"""A part of the line that Ray prints when the node is up."""


def ray_start(folder: Path, node_address: str, places: str, head: str = "") -> list[str]:
    """Return the command of a node that offers `places` (JSON), and that joins `head` or is the head itself.

    The command runs until it is terminated. `folder` needs a short name, because Ray creates its sockets there.
    """
    joining = [f"--address={head}"] if head else ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]
    if not head:
        joining.append(f"--ray-client-server-port={free_port()}")  # cannot be disabled; the default is a fixed port
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *joining),
        f"--temp-dir={folder}",
        f"--node-ip-address={node_address}",
        f"--resources={places}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--num-cpus=0",
        "--include-log-monitor=false",
    ]


def ray_environment(token: str) -> dict[str, str]:
    """Return the environment of a node and of all workers on it."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }


def head_address(folder: Path) -> str:
    """Return the address of the head whose folder is `folder`, as soon as it is up."""
    return (folder / "ray_current_cluster").read_text().strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
