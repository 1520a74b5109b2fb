"""State files of `tandem up`, with which other commands find a running cluster: one small file per cluster."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tandem.engine.user_cache import user_cache
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import Unavailable

FOLDER_VARIABLE = "TANDEM_STATE_DIR"


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A running `tandem up` of this user.

    `started` is the start time of its process, in seconds since the Unix epoch.
    """

    pid: int
    started: float
    grpc: str
    http: str
    model: str
    controller: str = ""
    token: str = ""
    """The cluster's secret, which authorizes calls to the controller."""
    metrics: str = ""
    """Address of the cluster-wide metrics, host:port."""
    operations: str = ""
    """Address of the router's metrics and traces, host:port, if `http` uses TLS; otherwise empty."""
    certificate: str = ""
    """File with the certificate of `grpc` and `http`; empty = they use no TLS."""
    stop_grace_s: float = 0.0
    """Seconds for which running requests may continue when the cluster is stopped."""
    logs: str = ""
    """The folder with the logs of its processes."""

    @property
    def metrics_key(self) -> str:
        """The key that gives access to all metrics and traces."""
        return metrics_key_of(self.token)

    @property
    def alive(self) -> bool:
        """True if the process still runs. The start time is compared too, because a process id may have been reused."""
        try:
            process = psutil.Process(self.pid)
            return bool(abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def folder() -> Path:
    """Return the folder of the state files.

    The folder is TANDEM_STATE_DIR, or tandem/ in the user's runtime folder, or a folder in the user's cache.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "tandem"
    return user_cache("run")


def announce(
    grpc: str,
    http: str,
    model: str,
    controller: str = "",
    token: str = "",
    *,
    metrics: str = "",
    operations: str = "",
    certificate: str = "",
    stop_grace_s: float = 0.0,
    logs: str = "",
) -> Path:
    """Write this process's state file, readable by this user only, and return its path; the caller deletes it."""
    pid = os.getpid()
    started = psutil.Process(pid).create_time()
    state = RunningCluster(
        pid, started, grpc, http, model, controller, token, metrics, operations, certificate, stop_grace_s, logs
    )
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder() / f"up-{pid}.json"
    partial = path.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(state)))
    partial.rename(path)
    return path


def running() -> list[RunningCluster]:
    """Return all running clusters of this user, newest first, and delete the state files of dead ones."""
    clusters = []
    for path in folder().glob("up-*.json"):
        try:
            state = RunningCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if state.alive:
            clusters.append(state)
        else:
            path.unlink(missing_ok=True)
    return sorted(clusters, key=lambda state: state.started, reverse=True)


def newest() -> RunningCluster:
    """Return the newest running cluster, the default of commands. Raises Unavailable if no cluster runs."""
    clusters = running()
    if not clusters:
        raise Unavailable("no cluster is running; start one with `tandem up`")
    return clusters[0]
