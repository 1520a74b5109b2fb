"""The launcher of a cluster: starts Ray and the controller, watches them while the cluster serves, and stops them."""

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from urllib.request import urlopen

from tandem.cluster.controller_process import ANSWER_TIMEOUT_S, ControllerProcess
from tandem.cluster.ray_processes.controllers import next_number
from tandem.cluster.ray_processes.joined_ray import JoinedRay
from tandem.cluster.ray_processes.ray_node import RayNode
from tandem.cluster.ray_processes.ray_process import place_here
from tandem.cluster.supervision.health import ClusterHealth, Phase
from tandem.cluster.supervision.process_supervisor import first_line
from tandem.cluster.supervision.roles import capacity, offer, plan
from tandem.cluster.worker_supervisor import ControllerConfig
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.settings.cluster import ClusterSettings

log = logging.getLogger(__name__)

SERVICE = "tandem.v1.Inference"
POLL_S = 0.05
WATCH_S = 0.3
STOP_TIMEOUT_S = 15.0
KILL_AFTER_S = 25.0
"""Seconds that a cluster may take to stop before it is killed; `tandem down` waits a little longer."""
KILLED_S = 5.0
BESIDES_WORKERS = 2
"""The number of actors besides the workers at the start: controller and router. The standby router starts later."""
RESTARTS_MAX = 5
"""Maximum number of failed restarts of the controller in a row (about 8 s); after them the cluster is stopped.

No restart can succeed if Ray itself is gone.
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of the start of one process, or of a process that ends or serves again after the start.

    During the start, `name` is "Ray" or a process ("router", "prefill-0"), `detail` the current activity, and
    `fraction` the part of that activity that is complete; `done` is True once the process serves. After the start,
    `done` is True if the process serves again; if it is False, the process has ended and `detail` is the reason. If
    `note` is set, it is a sentence to show instead of all other fields.
    """

    name: str
    done: bool
    detail: str = ""
    fraction: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The cluster's listeners, each host:port; all but the router's require `token`."""

    grpc: str
    http: str
    controller: str
    token: str
    metrics: str
    operations: str = ""
    """The listener of the router's metrics and traces if `http` uses TLS, else empty."""

    @property
    def metrics_key(self) -> str:
        """The key that opens all metrics and traces."""
        return metrics_key_of(self.token)


class Cluster:
    """A running cluster, owned by the caller of `start` until `stop`.

    Ray runs in a separate thread, because Ray's processes die with the thread that starts them and because the caller's
    thread must stay free for signals.
    """

    endpoints: Endpoints

    def __init__(self, config: ClusterSettings, progress: Callable[[Progress], None]) -> None:
        self._config = config
        self._progress = progress
        self._token = config.secrets.token or secrets.token_hex(32)
        self._stopping = threading.Event()
        # Callers wait for this event instead of joining the thread: in Python 3.11 a join that a signal interrupts
        # marks the thread as ended.
        self._over = threading.Event()
        self._ray_up = threading.Event()
        self._signals_back = threading.Event()
        self._ready: Future[Endpoints] = Future()
        self._failure: TandemError | None = None
        self._node = (
            JoinedRay(
                config.ray_address,
                config.places_timeout_s,
                self._stopping,
                config.ray_namespace,
                trusted_network=config.worker.trusted_network,
            )
            if config.ray_address
            else RayNode(config.log_max_mib << 20)
        )
        self._leave_workers = False
        self.left_workers = False
        """True if workers kept running when the cluster stopped."""
        self._controller: ControllerProcess | None = None
        self._thread = threading.Thread(target=self._live, name="tandem-cluster", daemon=True)

    @classmethod
    def start(cls, config: ClusterSettings, progress: Callable[[Progress], None] = lambda _: None) -> "Cluster":
        """Start all processes and wait until they serve.

        `progress` is called from another thread. Raises a TandemError with the reason if the cluster cannot serve. On
        any exception, including KeyboardInterrupt, all processes are stopped except workers that were already running.
        """
        cluster = cls(config, progress)
        cluster._thread.start()
        try:
            cluster.endpoints = cluster._await_ready()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def _await_ready(self) -> Endpoints:
        while True:
            try:
                return self._ready.result(timeout=POLL_S)
            except TimeoutError:
                if self._ready.done():
                    raise
            finally:
                up = self._ray_up.is_set()
                _restore_sigterm()
                if up:
                    self._signals_back.set()

    def health(self) -> ClusterHealth:
        """Return the current health of the router and the workers. Raises Unavailable once the cluster has stopped."""
        if self._over.is_set():
            raise self._failure or Unavailable("the cluster is stopped; start it with `tandem up`")
        assert self._controller is not None
        return self._controller.health()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster has stopped or the timeout expires.

        Raises the error that ended the cluster, if any.
        """
        self._over.wait(timeout_s)
        if self._failure is not None:
            raise self._failure

    def stop(self, timeout_s: float = KILL_AFTER_S, *, leave_workers: bool = False) -> None:
        """Stop every process of the cluster and remove its files; return when they are gone. Idempotent.

        Workers that may outlive the cluster keep running if `leave_workers` is set or if another `tandem up` serves
        with them. A process that is still running `timeout_s` seconds after the config's grace, such as a hanging Ray,
        is killed.
        """
        self._leave_workers = leave_workers
        self._stopping.set()
        if not self._over.wait(self._config.stop_grace_s + timeout_s):
            self._node.kill()
            self._over.wait(KILLED_S)  # the thread is a daemon: if it hangs still, it ends with this process

    def _live(self) -> None:
        """Run the Ray thread: start the cluster, watch the controller, stop the cluster."""
        try:
            self._start_ray()
            self._start_controller()
        except Exception as error:
            self._fail(error)
        finally:
            try:
                if self._controller is not None:
                    self._stop_controller(self._controller)
                self._node.stop()
            finally:
                self._over.set()

    def _start_ray(self) -> None:
        self._progress(Progress("Ray", False))
        resources = offer(self._config) if self._config.ray_address else capacity()
        self._node.start(resources, processes=self._config.worker_count + BESIDES_WORKERS)
        # A caller that sees Ray running may send SIGTERM, so the main thread must first restore its handler, which Ray
        # replaced.
        self._ray_up.set()
        self._signals_back.wait(1.0)
        self._progress(Progress("Ray", True))

    def _start_controller(self) -> None:
        """Start all processes, then watch them until `stop` is called or the controller cannot be restarted."""
        if self._stopping.is_set():
            return
        slots, gpus = plan(self._config, self._node.gpus), self._node.gpus
        config = ControllerConfig(self._config, slots, gpus, self._token, next_number(), place_here())
        self._controller = controller = ControllerProcess(config)
        controller.start()
        health = self._await_serving(controller)
        if health is None:
            return
        controller.serves()
        listeners = health.grpc_address, health.http_address
        metrics = health.metrics_address, health.operations_address
        self._ready.set_result(Endpoints(*listeners, controller.address, self._token, *metrics))
        self._watch(controller, health)

    def _watch(self, controller: ControllerProcess, health: ClusterHealth) -> None:
        """Report each process that dies or serves again, until `stop`, and restart the controller if it dies."""
        before, kept_at = {one.name: one.phase for one in health.all}, health.kept_at
        while not self._stopping.wait(WATCH_S):
            try:
                health = controller.health()
            except Unavailable as death:
                self._restart(controller, death.message)
                continue
            if health.filled and health.kept_at != kept_at:
                kept_at = health.kept_at
                self._progress(Progress("workers", True, note=_who_keeps(kept_at)))
            for one in health.all:
                asked_for = one.phase in {Phase.DRAINING, Phase.DRAINED} or health.lived_before(one)
                was = before.get(one.name, Phase.STARTING)
                if one.phase is not was and not asked_for and Phase.SERVING in {one.phase, was}:
                    self._progress(Progress(one.name, one.phase is Phase.SERVING, one.error))
                before[one.name] = one.phase

    def _restart(self, controller: ControllerProcess, reason: str) -> None:
        """Restart a controller that died; return early after `stop`.

        Raises Unavailable if `RESTARTS_MAX` restarts in a row fail.
        """
        self._progress(Progress("controller", False, reason))
        for _ in range(RESTARTS_MAX):
            if self._stopping.wait(controller.restart_wait_s()):
                return
            try:
                controller.restart()
            except Exception as error:
                log.warning("the controller did not start again: %s", first_line(error))
                reason = first_line(error)
                continue
            self._progress(Progress("controller", True))
            return
        raise Unavailable(
            f"the controller died and {RESTARTS_MAX} starts of another one failed: {reason}; start the cluster again"
            " with `tandem up`"
        )

    def _await_serving(self, controller: ControllerProcess) -> ClusterHealth | None:
        """Poll until all processes serve, and return their health; None if `stop` was called first.

        Raises Unavailable if a process dies before it serves, and DeadlineExceeded after `start_timeout_s` seconds.
        """
        deadline_s = time.monotonic() + self._config.start_timeout_s
        while not self._stopping.wait(POLL_S):
            health = controller.health()
            for one in health.all:
                if one.restarts and not (health.taken_over and one in health.workers):
                    raise Unavailable(f"{one.name} did not start: {one.error}")
                self._progress(Progress(one.name, one.phase is Phase.SERVING, one.stage, one.fraction))
            late = ", ".join(one.name for one in health.needed if one.phase is not Phase.SERVING)
            if health.filled and not late and _sees_workers(health):
                return health
            if time.monotonic() > deadline_s:
                late = late or ("the router" if health.filled else "what another `tandem up` hands over")
                raise DeadlineExceeded(
                    f"{late} did not start within {self._config.start_timeout_s:g} s; if this host is slow or the model"
                    " large, give more by --start-timeout"
                )
        return None

    def _stop_controller(self, controller: ControllerProcess) -> None:
        """Stop the controller within a bounded time after the grace; the remaining processes die with Ray."""
        self.left_workers = bool(self._config.worker.outlive_s)  # assumed if the controller does not respond
        try:
            within_s = self._config.stop_grace_s + STOP_TIMEOUT_S
            self.left_workers = controller.stop(within_s, leave_workers=self._leave_workers)
        except Unavailable:
            pass
        except Exception as error:  # Ray itself was killed meanwhile, as `stop` does after its timeout
            log.warning("the controller could not be asked to stop: %s", first_line(error))

    def _fail(self, error: Exception) -> None:
        """Pass `error` to the caller that waits for the start or, after the start, to `wait`."""
        if not isinstance(error, TandemError):
            error = Unavailable(f"the cluster failed: {type(error).__name__}: {first_line(error)}")
        self._failure = error
        if not self._ready.done():
            self._ready.set_exception(error)


def _restore_sigterm() -> None:
    """Reinstall Python's SIGTERM handler, because Ray's core installs one that ends the process with a stack dump."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _sees_workers(health: ClusterHealth) -> bool:
    """Return True if the router reports that it has found the workers.

    The report comes from the router's gRPC health service or, if the router uses TLS, from /ready on its operations
    port.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if health.operations_address:
        try:
            with urlopen(f"http://{health.operations_address}/ready", timeout=ANSWER_TIMEOUT_S):
                return True
        except OSError:  # refused, or 503
            return False
    with grpc.insecure_channel(health.grpc_address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=ANSWER_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _who_keeps(controller: str) -> str:
    if controller:
        return f"another `tandem up`, with its controller at {controller}, has taken the workers over"
    return "the other `tandem up` is gone; the workers are this one's again"
