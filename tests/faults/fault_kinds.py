"""Every fault that `python -m tests.faults` can choose: what it strikes, how, and when the cluster is as before.

Faults of the network and of the disk need a network namespace and a file system that belong to the run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from tandem.protocol.errors import TandemError
from tests.certificates import Authority
from tests.faults.injected_faults import InjectedFaults

SUSPENDED_S, FULL_S, SLOW_S, CUT_S, STALL_S = 2.0, 3.0, 3.0, 1.0, 3.0
MEMORY_S, MEMORY_MORE = 3.0, 1 << 20
"""How long a process may have that many bytes more than it has, and no more."""
CLOCK_S, CLOCK_STEP_S = 3.0, 3600
EXPIRES_S = 3.0
SLOW = "tbf rate 8mbit burst 16kb latency 20ms"
"""The link of `slow-network`: 1 MB/s, with a queue of 20 ms, after which packets are lost."""
OBEYED_WITHIN_S = 30.0
SERVES_WITHIN_S = 600.0
LOOK_S = 0.2


@dataclass(slots=True)
class Scene:
    """What faults strike: a cluster, its tier on a disk, its certificate, and the network of the run."""

    cluster: Any
    rng: random.Random
    injected: InjectedFaults | None = None
    disk: Path | None = None
    """The mount point of the file system that has only the disk tier; None = there is none of its own."""
    certificates: Path | None = None
    authority: Authority | None = None
    has_network: bool = False
    """True if the network namespace belongs to the run."""

    def pid(self, part: str) -> int:
        """Return the process id of the router, the controller, or a random worker of a role; 0 if it does not run."""
        if part == "controller":
            return int(self.cluster.controller_pid())
        if part == "router":
            return int(self.cluster.router().pid)
        if part == "rank":
            followers = [one.pid for worker in self.cluster.workers() if worker.pid for one in ranks_of(worker.pid)]
            return self.rng.choice(followers) if followers else 0
        if part == "gcs":
            return next(one.pid for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server")
        workers = [worker.pid for worker in self.cluster.workers() if worker.name.startswith(part) and worker.pid]
        return self.rng.choice(workers) if workers else 0

    def serves(self, after: int = 0) -> bool:
        """Return True if the router and all workers serve, none as process `after`; False without a controller."""
        try:
            workers = self.cluster.workers()
            parts = (self.cluster.router(), *workers)
            # A controller that has just started does not know all workers yet.
            complete = len(workers) == self.cluster.config.worker_count
            return complete and all(part.phase == "serving" and part.pid != after for part in parts)
        except (TandemError, OSError):
            return False

    async def until_it_serves(self, after: int = 0) -> None:
        """Wait until all parts serve, and no part is the process `after`, which has been killed."""
        deadline_s = time.monotonic() + SERVES_WITHIN_S
        while not await asyncio.to_thread(self.serves, after):
            assert time.monotonic() < deadline_s, "a part does not serve again"
            await asyncio.sleep(LOOK_S)


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the other ranks of the worker with this process."""
    return [child for child in psutil.Process(pid).children() if "tandem.worker.follower_process" in child.cmdline()]


Strike = Callable[[Scene], Awaitable[bool]]
"""Strikes, and returns when the fault is over; returns False if there was nothing to strike."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as the table of results describes it."""

    name: str
    part: str
    """What it strikes: at most one fault at a time strikes a part."""
    act: str
    strike: Strike
    may_cause: tuple[str, ...] = ()
    """The errors with which requests that it interrupts may end; they are not among those that can be saved."""
    needs: tuple[str, ...] = ()
    """The fields of the scene that must be set."""

    def missing(self, scene: Scene) -> str:
        """Return the first need that a scene does not meet, or ""."""
        return next((need for need in self.needs if not getattr(scene, need)), "")


FAULTS: dict[str, Fault] = {}
CONNECTION = ("ConnectError", "ReadError", "WriteError", "RemoteProtocolError", "gRPC UNAVAILABLE")
"""The errors of a client whose connection ends or cannot be opened."""
STEP = ("HTTP 500", "error in a stream", "gRPC INTERNAL")
"""The errors of the requests of a step that fails, one of which may have caused it."""


def _fault(name: str, part: str, act: str, strike: Strike, *needs: str, may_cause: tuple[str, ...] = ()) -> None:
    FAULTS[name] = Fault(name, part, act, strike, may_cause, needs)


def _of_process(act: Callable[[Scene, int], Awaitable[None]], part: str) -> Strike:
    async def strike(scene: Scene) -> bool:
        try:
            pid = await asyncio.to_thread(scene.pid, part)
            if not pid:
                return False
            await act(scene, pid)
        except (ProcessLookupError, psutil.NoSuchProcess, TandemError) as error:
            print(f"{part} is not struck: {error!r}", flush=True)
            return False
        await scene.until_it_serves(pid if act is _kill else 0)
        return True

    return strike


async def _kill(_scene: Scene, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def _suspend(_scene: Scene, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(SUSPENDED_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def _limit_memory(_scene: Scene, pid: int) -> None:
    process = psutil.Process(pid)
    unlimited = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + MEMORY_MORE, unlimited[1]))
    await asyncio.sleep(MEMORY_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(psutil.RLIMIT_AS, unlimited)


async def _reset_connection(scene: Scene, pid: int) -> None:
    """Resets a random connection of a process with another one on this host, but none of a client."""
    served = {int(address.rpartition(":")[2]) for address in (scene.cluster.http_address, scene.cluster.grpc_address)}
    inner = [
        one
        for one in psutil.Process(pid).net_connections("tcp4")
        if one.raddr and one.status == psutil.CONN_ESTABLISHED and not served & {one.laddr.port, one.raddr.port}
    ]
    if inner:
        one = scene.rng.choice(inner)
        both_ends = f"sport = :{one.laddr.port} and dport = :{one.raddr.port}"
        await asyncio.to_thread(_run, "ss", "-K", "-t", "-H", both_ends)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


for _part in ("prefill", "decode", "router", "controller", "rank"):
    _fault(
        f"kill-{_part}",
        _part,
        "SIGKILL",
        _of_process(_kill, _part),
        may_cause=(*CONNECTION, "HTTP 503") if _part == "router" else (),
    )
for _part in ("prefill", "decode", "router", "controller", "rank", "gcs"):
    _fault(f"suspend-{_part}", _part, f"SIGSTOP for {SUSPENDED_S:g} s", _of_process(_suspend, _part))
for _part in ("prefill", "decode"):
    _fault(
        f"limit-memory-of-{_part}",
        _part,
        f"no more memory for {MEMORY_S:g} s",
        _of_process(_limit_memory, _part),
        may_cause=STEP,
    )
for _part in ("prefill", "decode", "router", "controller"):
    _fault(f"reset-{_part}", f"{_part}'s connection", "reset", _of_process(_reset_connection, _part), "has_network")


def _on_network(act: str, begin: str, end: str, seconds: float) -> Strike:
    async def strike(scene: Scene) -> bool:
        await asyncio.to_thread(_run, *begin.split())
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(_run, *end.split())
        await scene.until_it_serves()
        return True

    return strike


_fault(
    "cut-network",
    "network",
    f"all links down for {CUT_S:g} s",
    _on_network("cut", "ip link set lo down", "ip link set lo up", CUT_S),
    "has_network",
    may_cause=CONNECTION,
)
_fault(
    "slow-network",
    "network",
    f"1 MB/s and lost packets for {SLOW_S:g} s",
    _on_network("slow", f"tc qdisc replace dev lo root {SLOW}", "tc qdisc del dev lo root", SLOW_S),
    "has_network",
)


async def _fill_disk(scene: Scene) -> bool:
    assert scene.disk is not None
    filler = scene.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        await asyncio.sleep(FULL_S)
    finally:
        filler.unlink()
    return True


def _pages(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*-*") if path.is_file() and not path.name.endswith(".part")]


async def _flip_in_tier(scene: Scene) -> bool:
    """Flips one bit of a page of KV on the disk."""
    assert scene.disk is not None
    for path in scene.rng.sample(pages := _pages(scene.disk), len(pages)):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            at = scene.rng.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << scene.rng.randrange(8)]))
            return True
    return False


async def _cut_in_tier(scene: Scene) -> bool:
    """Truncates a page of KV on the disk."""
    assert scene.disk is not None
    for path in scene.rng.sample(pages := _pages(scene.disk), len(pages)):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, scene.rng.randrange(path.stat().st_size))
            return True
    return False


_fault("fill-disk", "disk tier", f"no space for {FULL_S:g} s", _fill_disk, "disk")
_fault("flip-in-tier", "page on the disk", "a flipped bit", _flip_in_tier, "disk")
_fault("cut-in-tier", "page on the disk", "truncated", _cut_in_tier, "disk")


def _injected(kind: str, fault: str) -> Strike:
    async def strike(scene: Scene) -> bool:
        assert scene.injected is not None
        scene.injected.order(kind, fault)
        deadline_s = time.monotonic() + OBEYED_WITHIN_S
        while kind in scene.injected.open_orders():
            if time.monotonic() > deadline_s:
                return not scene.injected.cancel(kind)
            await asyncio.sleep(LOOK_S)
        await scene.until_it_serves()
        return True

    return strike


for _part in ("prefill", "decode"):
    _fault(f"fail-{_part}-step", _part, "its step fails", _injected(_part, "raise"), "injected", may_cause=STEP)
_fault("flip-in-transfer", "transfer", "a flipped bit", _injected("flip", "once"), "injected")
_fault("stall-transfer", "transfer", f"stalled for {STALL_S:g} s", _injected("stall", str(STALL_S)), "injected")


async def _step_clock(scene: Scene) -> bool:
    assert scene.injected is not None
    scene.injected.order("clock", str(scene.rng.choice([-1, 1]) * CLOCK_STEP_S))
    await asyncio.sleep(CLOCK_S)
    scene.injected.cancel("clock")
    return True


_fault("step-clock", "wall clocks", f"{CLOCK_STEP_S} s wrong for {CLOCK_S:g} s", _step_clock, "injected")


@contextlib.contextmanager
def _renewed(scene: Scene) -> Iterator[None]:
    """Gives the cluster a certificate that lasts, at the end."""
    assert scene.authority is not None
    assert scene.certificates is not None
    try:
        yield
    finally:
        scene.authority.issue("server").save(scene.certificates, "server")


async def _replace_certificate(scene: Scene) -> bool:
    with _renewed(scene):
        return True


async def _expire_certificate(scene: Scene) -> bool:
    assert scene.authority is not None
    assert scene.certificates is not None
    with _renewed(scene):
        scene.authority.issue("server", timedelta(seconds=EXPIRES_S)).save(scene.certificates, "server")
        await asyncio.sleep(2 * EXPIRES_S)
    # New connections get the new one once its file has been looked at.
    await asyncio.sleep(EXPIRES_S)
    return True


_fault("replace-certificate", "certificate", "replaced", _replace_certificate, "authority")
_fault("expire-certificate", "certificate", "expires", _expire_certificate, "authority", may_cause=CONNECTION)
