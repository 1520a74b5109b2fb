"""A Ray cluster that others started: this process joins it for a while, and leaves it as it was."""

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cluster.supervision.roles import GPU
from wire.address import host_and_port
from wire.errors import FailedPrecondition, InvalidArgument, Unavailable

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""How long the first connection may take, in seconds; Ray itself would try for minutes."""

LOOK_S = 1.0
"""How often to look whether a Ray cluster that is waited for is there by now, in seconds."""

# Deaths are reported by the controller, in a line; Ray's own paragraph would land in the middle of an answer.
_ENVIRONMENT = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}

Result = TypeVar("Result")


class JoinedRay:
    """Joined from `start` until `stop` or `kill`. What runs there is a job of this process and ends with it."""

    gpus = 0
    """Here there are none to plan with: Ray gives each worker one of its node's."""

    def __init__(
        self,
        address: str,
        wait_s: float = 0.0,
        stopping: threading.Event | None = None,
        namespace: str | None = None,
        *,
        trusted_network: bool = False,
    ) -> None:
        """`address` is host:port of the head's GCS, or `auto`: RAY_ADDRESS, else where `ray start` last joined.

        What is not there yet may come within `wait_s` seconds, unless `stopping` is set before. In a `namespace` others
        find what runs there, and some of it may have been left by them; None = in one of its own.
        Workers on several hosts need a `trusted_network`.
        """
        self._trusted_network = trusted_network
        self._namespace = namespace
        self._address = address
        self._wait_s = wait_s
        self._stopping = stopping or threading.Event()

    def start(self, resources: dict[str, float], processes: int) -> None:
        """Join, and check that all nodes together offer `resources`; Ray starts `processes` as they are asked for.

        Unavailable where there is no such cluster or it keeps this process out, FailedPrecondition where it has too
        few places; InvalidArgument where workers would send KV pages over a network that nobody trusts.
        """
        os.environ.update(_ENVIRONMENT)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        give_up = time.monotonic() + self._wait_s
        address = self._waiting(give_up, self._knock)
        try:
            ray.init(address=address, namespace=self._namespace, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise Unavailable(
                f"cannot join the Ray cluster at {self._address}: {error}; start a node of it on this host with "
                "`ray start`, and give its RAY_AUTH_TOKEN if it has one"
            ) from error
        try:
            self._waiting(give_up, lambda: self._check_places(resources))
            self._check_network(resources)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leave; Ray ends what is left of this process's actors. Idempotent."""
        ray = sys.modules.get("ray")
        if ray is not None:
            ray.shutdown()

    def kill(self) -> None:
        """Give up on a Ray that hangs: what is left of the job ends when this process does. From any thread."""
        ray = sys.modules.get("ray")
        if ray is not None:
            atexit.unregister(ray.shutdown)  # it would hang again as the interpreter exits

    def _waiting(self, give_up: float, attempt: Callable[[], Result]) -> Result:
        """What `attempt` returns; what it raises if that does not change in time. What is waited for is logged."""
        said = ""
        while True:
            try:
                return attempt()
            except (Unavailable, FailedPrecondition) as error:
                if time.monotonic() >= give_up or self._stopping.is_set():
                    raise
                if error.message != said:
                    said = error.message
                    log.warning("waiting: %s", said)
            self._stopping.wait(LOOK_S)

    def _knock(self) -> str:
        """The address as Ray knows it, where something listens."""
        from ray._private.services import canonicalize_bootstrap_address

        try:
            address = str(canonicalize_bootstrap_address(self._address))
            socket.create_connection(host_and_port(address), CONNECT_S).close()
        except OSError as error:
            raise Unavailable(
                f"no Ray cluster answers at {self._address} ({error}); start one with `ray start --head`"
            ) from error
        return address

    def _check_places(self, needed: dict[str, float]) -> None:
        import ray

        if self._namespace is not None and ray.util.list_named_actors():
            return  # a node that is missing keeps nobody from taking over what the others have
        there = ray.cluster_resources()
        for role, count in needed.items():
            if there.get(role, 0.0) < count:
                raise FailedPrecondition(
                    f"the Ray cluster at {self._address} has {there.get(role, 0.0):g} {_places_for(role)}, "
                    f"{count:g} are asked for; start a node with `ray start {_offering(role, count)}`"
                )

    def _check_network(self, needed: dict[str, float]) -> None:
        import ray

        roles = needed.keys() - {GPU}
        nodes = [each for each in ray.nodes() if each["Alive"] and any(each["Resources"].get(role) for role in roles)]
        hosts = sorted({str(each["NodeManagerAddress"]) for each in nodes})
        if len(hosts) > 1 and not self._trusted_network:
            raise InvalidArgument(
                "--address",
                f"workers may run on {len(hosts)} hosts ({', '.join(hosts)}), where UCX listens, and whoever reaches it"
                " can write into workers' memory; shut the network between them to others and give --trusted-network",
            )


def _places_for(resource: str) -> str:
    return "GPUs" if resource == GPU else f"places for {resource} workers"


def _offering(resource: str, count: float) -> str:
    return f"--num-gpus={count:g}" if resource == GPU else f"--resources '{{\"{resource}\": {count:g}}}'"
