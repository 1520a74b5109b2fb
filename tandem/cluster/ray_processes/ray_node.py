"""A private Ray node: all sockets on loopback, a new token, and a temp folder that is removed at the end.

Ray's processes get SIGKILL when the thread that started them ends, so the caller of `start` must keep its thread alive
until `stop`. If the owner is killed, a watchdog process ends the processes that survive the owner.
"""

import atexit
import contextlib
import logging
import os
import secrets
import sys
import warnings
from collections.abc import Iterator
from functools import partial

import psutil

from tandem.cluster.ray_processes.temp_folder import TempFolder, remove_abandoned
from tandem.cluster.ray_processes.watchdog import Watchdog
from tandem.logging.log_file import KEPT
from tandem.logging.logs import MAX_MIB
from tandem.protocol.errors import Unavailable

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store, about the smallest that Ray accepts: request data never goes through Ray."""

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # One token per process: Ray reads it once and keeps it.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Ray replaces a loopback address by the host's outer one, and then listens on every interface, unless the host is
    # configured not to join clusters. The switch is named after other systems but works on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Worker processes start while Ray itself is still starting: the first token comes half a second sooner.
    "RAY_enable_worker_prestart": "1",
    # The controller reports each death in one line; Ray's longer message would interrupt other output of `tandem up`.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    # Ray starts its workers at niceness 15, where any other program on the host would take CPU time from every token.
    "RAY_worker_niceness": "0",
    # Workers choose their GPU themselves, and a transfer between two workers must see both GPUs.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment that must be set before Ray is imported, because Ray reads much of it only then."""

_NAMESPACE = "tandem"
"""The namespace of all actors, in which a restarted controller finds them by name."""

_TOO_SLOW = "timed out during startup"
"""Text of the exception of a Ray start that timed out; Ray has no exception type for it."""

_PREFERENCES = {
    # Transfers stay on this host; otherwise UCX opens a port on every interface too.
    "UCX_NET_DEVICES": "lo",
    # A log line for each failed handshake would fill a disk.
    "GRPC_VERBOSITY": "ERROR",
}
"""Environment variables that are set unless the user has set them."""


class RayNode:
    """One Ray head node without further nodes, owned by this object from `start` until `stop` or `kill`."""

    def __init__(self, log_max_bytes: int = MAX_MIB << 20) -> None:
        """Create the node.

        Ray's log files have at most `log_max_bytes` each, unless the environment sets another limit.
        """
        self._log_max_bytes = log_max_bytes
        self._folder: TempFolder | None = None
        self._watchdog: Watchdog | None = None
        self._family: list[psutil.Process] = []

    def start(self, resources: dict[str, float], processes: int) -> None:
        """Start Ray for about `processes` actors on a node that offers `resources`. Takes about three seconds.

        If a part of Ray dies at the start, Ray waits for that part for half a minute and fails; the whole start is then
        retried once. Raises Unavailable if the retry fails as well.
        """
        try:
            self._start(resources, processes)
        except Exception as error:
            if _TOO_SLOW not in str(error):
                raise
            log.warning("Ray did not start; starting it once more: %s", error)
            try:
                self._start(resources, processes)
            except Exception as again:
                if _TOO_SLOW not in str(again):
                    raise
                text = "Ray did not come up within half a minute, twice; free processors or memory and start again"
                raise Unavailable(text) from again

    def _start(self, resources: dict[str, float], processes: int) -> None:
        os.environ.update(ENVIRONMENT)
        for name, value in _PREFERENCES.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(self._log_max_bytes))
        os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", str(KEPT))
        import ray

        remove_abandoned()
        self._folder = folder = TempFolder()
        self._watchdog = Watchdog(folder.path)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings(), _without_helpers():
                warnings.simplefilter("ignore")
                ray.init(
                    address="local",
                    namespace=_NAMESPACE,
                    num_cpus=processes,
                    resources=resources,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder.ray),
                )
        except BaseException:
            self.stop()
            raise

    @property
    def gpus(self) -> int:
        """The number of GPUs that Ray found on this host."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def stop(self) -> None:
        """End every process of this node and remove its folder. Idempotent."""
        self._family = self._processes()
        ray = sys.modules.get("ray")
        if ray is not None:
            ray.shutdown()
        _end(self._family, grace_s=5)
        self._remove_folder()

    def kill(self) -> None:
        """End the node's processes without Ray's help, for the case that Ray hangs.

        May be called from any thread, also while `start` or `stop` runs.
        """
        ray = sys.modules.get("ray")
        if ray is not None:
            atexit.unregister(ray.shutdown)  # it would hang again as the interpreter exits
        _end([*self._family, *self._processes()], grace_s=0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _processes(self) -> list[psutil.Process]:
        """Return Ray's processes, found by this node's folder in their command lines, and all their descendants."""
        processes: list[psutil.Process] = []
        for child in psutil.Process().children():
            try:
                if self._folder is not None and any(str(self._folder.path) in part for part in child.cmdline()):
                    processes += [child, *child.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return processes


@contextlib.contextmanager
def _without_helpers() -> Iterator[None]:
    """Make Ray start a head without its autoscaler, dashboard and log monitor; `ray.init` has no option for this.

    A private node never grows, shows no dashboard and sends no logs to its driver, but these three processes take some
    2 s of CPU time. A version of Ray without the replaced methods starts the processes as usual.
    """
    from ray._private.node import Node

    with contextlib.ExitStack() as restored:
        for name in filter(partial(hasattr, Node), ("start_monitor", "start_api_server", "start_log_monitor")):
            restored.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, _start_nothing)
        yield


def _start_nothing(*_: object, **__: object) -> None:
    """Replace a method of Ray that starts a helper process."""


def _end(family: list[psutil.Process], grace_s: float) -> None:
    """Wait up to `grace_s` seconds for processes that end by themselves, and kill the rest."""
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
