"""What `tandem up` leaves for the other commands to find: one small file for each running cluster."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from engine.user_cache import user_cache
from wire.errors import Unavailable
from wire.security.credentials import metrics_key_of

FOLDER_VARIABLE = "TANDEM_STATE_DIR"


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A `tandem up` of this user. `started` is its process's start, seconds since the Unix epoch."""

    pid: int
    started: float
    grpc: str
    http: str
    model: str
    controller: str = ""
    token: str = ""
    """Lets its holder call the controller."""
    metrics: str = ""
    """Where the whole cluster's metrics are, host:port."""
    stop_grace_s: float = 0.0
    """How long what runs may go on when it is stopped."""

    @property
    def metrics_key(self) -> str:
        """Opens all metrics and traces."""
        return metrics_key_of(self.token)

    @property
    def alive(self) -> bool:
        """Whether that very process still runs; a process id alone may have been given away again."""
        try:
            process = psutil.Process(self.pid)
            return bool(abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def folder() -> Path:
    """Where the files lie: TANDEM_STATE_DIR, else tandem/ in the user's runtime folder, else in the cache folder."""
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
    stop_grace_s: float = 0.0,
) -> Path:
    """Write this process's file, readable by this user alone; the caller removes it."""
    pid = os.getpid()
    started = psutil.Process(pid).create_time()
    state = RunningCluster(pid, started, grpc, http, model, controller, token, metrics, stop_grace_s)
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder() / f"up-{pid}.json"
    partial = path.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(state)))
    partial.rename(path)
    return path


def running() -> list[RunningCluster]:
    """Every cluster of this user that runs, newest first. Files of dead ones are removed on the way."""
    found = []
    for path in folder().glob("up-*.json"):
        try:
            state = RunningCluster(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if state.alive:
            found.append(state)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda state: state.started, reverse=True)


def newest() -> RunningCluster:
    """The cluster that commands talk to. Unavailable if none runs."""
    clusters = running()
    if not clusters:
        raise Unavailable("no cluster is running; start one with `tandem up`")
    return clusters[0]
