"""Checks of the TCP ports over which UCX transfers KV pages: which are open, and which hosts can reach them.

A client that reaches such a port can write into its worker's memory (docs/security.md).
"""

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tandem.cli.connection.controller_client import ControllerClient
from tandem.cli.diagnosis.checks import Check, Level
from tandem.net.address import is_loopback
from tandem.protocol.errors import InvalidArgument, TandemError

if TYPE_CHECKING:
    from tandem.cli.connection.state import RunningCluster
    from tandem.protocol.messages import WorkerInfo

NAME = "KV ports"
_EVERYWHERE = ("0.0.0.0", "::")


def check_ucx_environment(environment: Mapping[str, str] = os.environ) -> Check:
    """Check that workers started from here would open no TCP port, given the UCX variables in `environment`.

    If the check fails, `tandem up` refuses to start, too.
    """
    from kv_transfer.nixl_backend.ucx_shared_memory import check_transports

    try:
        check_transports(environment, trusted_network=False)
    except InvalidArgument as error:
        return Check("UCX", Level.FAIL, error.message, "unset UCX_TLS")
    return Check("UCX", Level.OK, "moves KV pages within this host by shared memory, and opens no TCP port")


def check_running_clusters(running: "Iterable[RunningCluster]") -> list[Check]:
    """Return the checks of the workers of this user's clusters; see `check_workers`."""
    checks = []
    for cluster in running:
        if not cluster.controller:
            continue
        try:
            workers = asyncio.run(ControllerClient(cluster.controller, cluster.token).workers())
        except TandemError as error:
            checks.append(Check(NAME, Level.WARN, f"of process {cluster.pid} are not known", error.message))
            continue
        checks += check_workers(workers)
    return checks


def check_workers(workers: "Iterable[WorkerInfo]") -> list[Check]:
    """Return one warning for each open port of the workers, or a single passing check if no port is open."""
    workers = tuple(workers)
    opened = [
        Check(
            f"{NAME} of {worker.peer.worker_id}",
            Level.WARN,
            f"UCX listens at {port}: {_reached_by(port)} can write into this worker's memory",
            "restrict it to workers (a firewall, the chart's NetworkPolicy), or on one host start without"
            " --trusted-network",
        )
        for worker in workers
        for port in worker.kv_ports
    ]
    return opened or [Check(NAME, Level.OK, f"none of the {len(workers)} workers has an open one")]


def _reached_by(port: str) -> str:
    host = port.rpartition(":")[0]
    if is_loopback(host):
        return "every user of this host"
    return "every client that reaches its host" if host in _EVERYWHERE else f"every client that reaches {host}"
