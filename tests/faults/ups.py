"""Several `tandem up` on one Ray of one node, with workers that may outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from tests.ray_start import head_address, ray_environment, ray_start

from .joined import ROOT, ray_node, short_folder

WITHIN_S = 150.0
LOOK_S = 0.05
NAME = "outliving"
PLACES = '{"prefill": 1, "decode": 1}'
OPTIONS = (
    *("--grpc-port", "0", "--http-port", "0", "--dtype", "float32", "--threads", "1", "--page-tokens", "16"),
    *("--kv-cache-dtype", "int8", "--kv-cache-gib", "0.1", "--max-step-tokens", "32", "--cluster-name", NAME),
)
LEFT = f"""
import json, ray
from ray.util.placement_group import placement_group_table
ray.init(address="auto", namespace="tandem-{NAME}", log_to_driver=False, logging_level="ERROR")
groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
print(json.dumps([*ray.util.list_named_actors(), *groups]))
"""


class Up:
    """One `tandem up`, once it serves."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.router = ""
        self.said = ""

    async def until(self, words: str, within_s: float = WITHIN_S) -> None:
        """Reads its output until it contains `words`."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            while words not in self.said:
                line = await self._process.stdout.readline()
                assert line, f"{words!r} never came: {self.said}"
                self.said += line.decode()

    async def serves(self) -> None:
        await self.until("Ctrl-C stops it")
        match = re.search(r"gRPC +(\S+)", self.said)
        assert match is not None
        self.router = match[1]

    async def end(self, number: signal.Signals) -> None:
        """Sends it a signal and waits until it has exited."""
        self._process.send_signal(number)
        out, _ = await asyncio.wait_for(self._process.communicate(), WITHIN_S)
        self.said += out.decode()

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


class Ups:
    """Starts `tandem up` processes and finds the workers' processes."""

    def __init__(self, ray: int, model: Path, environment: dict[str, str]) -> None:
        self._ray = psutil.Process(ray)
        self._model = model
        self._environment = environment
        self._stack = contextlib.AsyncExitStack()

    async def start(self, *options: str) -> Up:
        """Starts another `tandem up`, which does not serve yet."""
        command = (sys.executable, "-m", "tandem.cli.main", "up", "--address", self._environment["RAY_ADDRESS"])
        pipe, same = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(
            *(*command, "--model", str(self._model), *OPTIONS, *options),
            stdout=pipe,
            stderr=same,
            env=self._environment,
            cwd=ROOT,
        )
        up = Up(process)
        self._stack.push_async_callback(up.close)
        return up

    def workers(self) -> set[int]:
        """Returns the process ids of all workers."""
        pids = set()
        for process in self._ray.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()[:1]).startswith("ray::WorkerActor"):
                    pids.add(process.pid)
        return pids

    async def left(self) -> list[str]:
        """Returns the names of the actors and placement groups that Ray still has."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LEFT), stdout=asyncio.subprocess.PIPE, env=self._environment, cwd=ROOT
        )
        out, _ = await process.communicate()
        names: list[str] = json.loads(out)
        return names

    async def close(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def ups(model: Path, places: str = PLACES) -> AsyncIterator[Ups]:
    """A Ray of one node on loopback with these resources for workers of `model`."""
    with short_folder() as folder:
        environment = {
            **os.environ,
            **ray_environment(secrets.token_hex(32)),
            # Keeps Ray on loopback, which it otherwise does not accept as a cluster address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
            "TANDEM_STATE_DIR": str(folder / "state"),
            "TANDEM_CLUSTER_TOKEN": secrets.token_hex(16),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        }
        node = await ray_node(ray_start(folder / "ray", "127.0.0.1", places), **environment)
        environment["RAY_ADDRESS"] = head_address(folder / "ray")
        made = Ups(node._process.pid, model, environment)
        try:
            yield made
        finally:
            await made.close()
            await node.terminate()
