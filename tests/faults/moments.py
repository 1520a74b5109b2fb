"""Moments at which a fault strikes, made certain by suspending a process before it is inspected, never by timing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.cluster.supervision.health import Health
from tandem.protocol.generated.tandem.v1 import worker_pb2

TRIES_S = 60.0
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class AmidTransfer:
    """A suspended prefill worker, and a decode worker with pages that the former was writing."""

    prefill: Health
    decode: Health


def freeze_amid_transfer(cluster: Any) -> AmidTransfer:
    """Suspends, with SIGSTOP, the prefill worker that computes, while pages of a decode worker are advertised to it.

    The transfer cannot end before the prefill worker continues. Exactly one prompt may be in prefill in the cluster.
    """
    deadline_s = time.monotonic() + TRIES_S
    while time.monotonic() < deadline_s:
        for name in busy(cluster, "prefill", lambda one: one.pages_owned):
            prefill = cluster.named(name)
            os.kill(prefill.pid, signal.SIGSTOP)
            open_leases = busy(cluster, "decode", lambda one: one.pages_advertised)
            if open_leases:
                return AmidTransfer(prefill, cluster.named(open_leases[0]))
            os.kill(prefill.pid, signal.SIGCONT)
        time.sleep(LOOK_S)
    raise AssertionError("no transfer was seen on its way")


def busy(cluster: Any, role: str, measure: Callable[[worker_pb2.InspectResponse], int]) -> list[str]:
    """Returns the names of the registered workers of a role for which `measure` is not 0."""
    names = [member.peer.worker_id for member in cluster.members() if member.peer.worker_id.startswith(role)]
    return [name for name in names if measure(cluster.inspect_worker(name))]


@contextlib.contextmanager
def thawed(*processes: Health) -> Any:
    """Resumes these processes at the end, whatever happens inside."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def kill(process: Health) -> None:
    """Kills a process with SIGKILL, which also ends a suspended one."""
    os.kill(process.pid, signal.SIGKILL)


def restarted(cluster: Any, dead: Health, within_s: float = 90.0) -> Health:
    """Returns the next incarnation of a worker, once it serves."""
    deadline_s = time.monotonic() + within_s
    while True:
        now = cluster.named(dead.name)
        if now.incarnation != dead.incarnation and now.phase == "serving":
            assert now.pid != dead.pid
            return now
        assert time.monotonic() < deadline_s, now
        time.sleep(0.1)
