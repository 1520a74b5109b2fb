"""The process of the controller, which `tandem up` starts, watches and restarts.

A restarted controller keeps its predecessor's controller number and ports, so workers, routers and operators find it
again. It takes over the router and the workers, which keep serving during the restart.
"""

import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import Any

from tandem.cluster.controller import Controller
from tandem.cluster.liveness import PROBES
from tandem.cluster.ray_processes.controllers import actor_name
from tandem.cluster.ray_processes.ray_process import actor_class, on_this_node
from tandem.cluster.supervision.health import Backoff, ClusterHealth
from tandem.cluster.supervision.process_supervisor import first_line
from tandem.cluster.worker_supervisor import ControllerConfig
from tandem.net.address import host_and_port
from tandem.protocol.errors import Unavailable

ANSWER_TIMEOUT_S = 10.0
"""Timeout of one call to the controller or to the router's health service, in seconds."""
START_TIMEOUT_S = 60.0
"""Timeout in seconds for the start of a controller's process, and the same for its listener to open afterwards."""


class ControllerProcess:
    """Starts, watches and restarts the controller's process.

    Owned and called by the Ray thread of `tandem up` (`Cluster`).
    """

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._hang_deadline_s = config.cluster.hang_deadline_s
        self._backoff = Backoff()
        self._actor: Any = None
        self._life: Any = None
        self._pid = 0
        self._born = 0.0
        self._last: ClusterHealth | None = None
        self.address = ""
        """The controller's listener, host:port."""

    def start(self) -> None:
        """Start the process and return once the controller listens.

        Raises Unavailable if the controller dies or does not respond within `START_TIMEOUT_S` seconds.
        """
        number = self._config.number
        options = {"name": actor_name(number), "num_cpus": 0, "scheduling_strategy": on_this_node()}
        self._born = time.monotonic()
        self._actor = actor_class(Controller).options(**options).remote(self._config)
        self._life = self._actor.run.remote()
        self._pid = ask(self._actor.pid.remote(), START_TIMEOUT_S)
        self.address = ask(self._actor.start.remote(), START_TIMEOUT_S)

    def serves(self) -> None:
        """Notify the controller that the start of the whole cluster is complete."""
        ask(self._actor.serves.remote())

    def pid(self) -> int:
        """Return the controller's process id."""
        return int(ask(self._actor.pid.remote()))

    def health(self) -> ClusterHealth:
        """Return the health of all processes, as the controller knows it.

        Raises Unavailable if the controller is dead or fails. A controller that does not respond within the hang
        deadline is killed. The deadline is measured as a number of short waits, not by a clock, so that only one wait
        expires if this process itself is stopped for a while.
        """
        import ray

        if ray.wait([self._life], timeout=0)[0]:
            raise Unavailable("the controller died")
        reply, waits = self._actor.health.remote(), 0
        while not ray.wait([reply], timeout=(self._hang_deadline_s or ANSWER_TIMEOUT_S) / PROBES)[0]:
            waits += 1
            if self._hang_deadline_s and waits == PROBES:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)  # `ray.kill` would first ask it to stop, and wait
                raise Unavailable(f"the controller gave no sign of life for {self._hang_deadline_s:g} s and was killed")
        health: ClusterHealth = ask(reply)
        self._last = health if health.filled or self._last is None else replace(self._last, router=health.router)
        return health

    def restart_wait_s(self) -> float:
        """Return the seconds to wait before the next `restart`; they grow with each controller that dies early."""
        return self._backoff.after_death(time.monotonic() - self._born)

    def restart(self) -> None:
        """Start a new controller with the ports and the last known state of the controller that died; see `start`."""
        import ray

        ray.kill(self._actor, no_restart=True)  # it may still live but fail; this frees its name
        last, config = self._last, self._config
        if last is not None:
            port, metrics_port = (host_and_port(address)[1] for address in (self.address, last.metrics_address))
            cluster = replace(config.cluster, controller_port=port, metrics_port=metrics_port)
            slots = config.slots if last.state is None else last.state.slots
            config = replace(config, cluster=cluster, slots=slots, before=last)
        self._config = config
        self.start()
        self.serves()

    def stop(self, timeout_s: float, *, leave_workers: bool) -> bool:
        """Stop the controller and the processes that it supervises; return True if the workers keep running.

        Raises Unavailable if the controller does not respond within `timeout_s` seconds.
        """
        return bool(ask(self._actor.stop.remote(leave_workers=leave_workers), timeout_s))


def ask(reply: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Return the controller's reply. Raises Unavailable if the controller is dead or does not respond in time."""
    import ray

    try:
        return ray.get(reply, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the controller does not answer: {first_line(error)}") from None
