"""A Ray cluster started by others: this process joins it for a while and leaves it unchanged."""

import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tandem.cluster.supervision.roles import GPU
from tandem.net.address import host_and_port
from tandem.protocol.errors import FailedPrecondition, InvalidArgument, Unavailable

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Timeout of the first connection, in seconds; Ray itself would try for minutes."""

LOOK_S = 1.0
"""Interval between attempts to reach a Ray cluster that does not respond yet, in seconds."""

# The controller reports each death in one line; Ray's longer message would interrupt other output of `tandem up`.
_ENVIRONMENT = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}

Result = TypeVar("Result")


class JoinedRay:
    """A connection to a Ray cluster from `start` until `stop` or `kill`. Its actors end with this process."""

    gpus = 0
    """Zero: Ray assigns each worker one of its node's GPUs, so this process assigns none."""

    def __init__(
        self,
        address: str,
        wait_s: float = 0.0,
        stopping: threading.Event | None = None,
        namespace: str | None = None,
        *,
        trusted_network: bool = False,
    ) -> None:
        """Prepare to join the Ray cluster at `address`: host:port of the head's GCS, or `auto`.

        `auto` is RAY_ADDRESS or, if unset, the cluster that `ray start` last joined. `start` waits up to `wait_s`
        seconds for a missing cluster or node, unless `stopping` is set before. Actors are created in `namespace`, so
        that other processes find them; it may contain actors of earlier processes. None = a new namespace for this
        process alone. `trusted_network` must be True if workers may run on several hosts.
        """
        self._trusted_network = trusted_network
        self._shared = namespace is not None
        self._namespace = namespace or f"tandem-{secrets.token_hex(8)}"
        self._address = address
        self._wait_s = wait_s
        self._stopping = stopping or threading.Event()

    def start(self, resources: dict[str, float], processes: int) -> None:
        """Join the cluster and check that its nodes together offer `resources`.

        `processes` is not used, because Ray starts processes on demand. Raises Unavailable if there is no such cluster
        or it refuses this process, FailedPrecondition if it lacks resources, and InvalidArgument if workers would send
        KV pages over an untrusted network.
        """
        os.environ.update(_ENVIRONMENT)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        deadline_s = time.monotonic() + self._wait_s
        address = self._waiting(deadline_s, self._reachable_address)
        try:
            ray.init(address=address, namespace=self._namespace, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise Unavailable(
                f"cannot join the Ray cluster at {self._address}: {error}; start a node of it on this host with "
                "`ray start`, and give its RAY_AUTH_TOKEN if it has one"
            ) from error
        try:
            self._waiting(deadline_s, lambda: self._check_resources(resources))
            self._check_network(resources)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leave the cluster; Ray ends the remaining actors of this process. Idempotent."""
        ray = sys.modules.get("ray")
        if ray is not None:
            ray.shutdown()

    def kill(self) -> None:
        """Unregister `ray.shutdown` as an exit handler of the interpreter, because it would wait for a Ray that hangs.

        The remaining actors end with this process. May be called from any thread.
        """
        ray = sys.modules.get("ray")
        if ray is not None:
            atexit.unregister(ray.shutdown)  # it would hang again as the interpreter exits

    def _waiting(self, deadline_s: float, attempt: Callable[[], Result]) -> Result:
        """Retry `attempt` until it succeeds or the deadline has passed; return its result, and log each new failure."""
        said = ""
        while True:
            try:
                return attempt()
            except (Unavailable, FailedPrecondition) as error:
                if time.monotonic() >= deadline_s or self._stopping.is_set():
                    raise
                if error.message != said:
                    said = error.message
                    log.warning("waiting: %s", said)
            self._stopping.wait(LOOK_S)

    def _reachable_address(self) -> str:
        """Return the cluster's address in Ray's form, after a connection to it succeeded."""
        from ray._private.services import canonicalize_bootstrap_address

        try:
            address = str(canonicalize_bootstrap_address(self._address))
            socket.create_connection(host_and_port(address), CONNECT_S).close()
        except OSError as error:
            raise Unavailable(
                f"no Ray cluster answers at {self._address} ({error}); start one with `ray start --head`"
            ) from error
        return address

    def _check_resources(self, needed: dict[str, float]) -> None:
        import ray

        if self._shared and ray.util.list_named_actors():
            return  # without some node, the workers on other nodes can still be taken over
        there = ray.cluster_resources()
        for role, count in needed.items():
            if there.get(role, 0.0) < count:
                raise FailedPrecondition(
                    f"the Ray cluster at {self._address} has {there.get(role, 0.0):g} {_slots_for(role)}, "
                    f"{count:g} are needed; start a node with `ray start {_offering(role, count)}`"
                )

    def _check_network(self, needed: dict[str, float]) -> None:
        import ray

        roles = needed.keys() - {GPU}
        nodes = [node for node in ray.nodes() if node["Alive"] and any(node["Resources"].get(role) for role in roles)]
        hosts = sorted({str(node["NodeManagerAddress"]) for node in nodes})
        if len(hosts) > 1 and not self._trusted_network:
            raise InvalidArgument(
                "--address",
                f"workers may run on {len(hosts)} hosts ({', '.join(hosts)}), where UCX listens, and every client that"
                " reaches it can write into workers' memory; restrict the network between them and give"
                " --trusted-network",
            )


def _slots_for(resource: str) -> str:
    return "GPUs" if resource == GPU else f"slots for {resource} workers"


def _offering(resource: str, count: float) -> str:
    return f"--num-gpus={count:g}" if resource == GPU else f"--resources '{{\"{resource}\": {count:g}}}'"
