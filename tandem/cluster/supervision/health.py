"""The health of each process of the cluster, and the backoff before the next restart."""

from dataclasses import dataclass
from enum import StrEnum

from tandem.cluster.supervision.takeover import ControllerState


class Phase(StrEnum):
    """The phase in the life of a supervised process."""

    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting to restart"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """The state of one supervised process.

    `pid` is 0 while the process id is unknown, `stage` is the current activity of the start, `fraction` the part of
    that activity that is complete, and `error` the last failure.
    """

    name: str
    phase: Phase
    incarnation: int
    pid: int
    restarts: int
    error: str
    stage: str = ""
    fraction: float = 0.0

    @property
    def lack(self) -> str:
        """The reason why the process does not serve; "" if it serves or still finishes requests."""
        if self.phase in {Phase.SERVING, Phase.DRAINING}:
            return ""
        if self.phase is Phase.DRAINED:
            return f"drained; `tandem drain {self.name} --restart` brings it back"
        doing = (self.stage or str(self.phase)) if self.phase is Phase.STARTING else str(self.phase)
        return f"{doing}; last error: {self.error}" if self.restarts and self.error else doing


@dataclass(frozen=True, slots=True)
class ClusterHealth:
    """The health of the router and of all workers, with the addresses of the listeners.

    The workers are in the order of the plan. The router's addresses are empty until a router has opened its listeners.
    """

    router: Health
    grpc_address: str
    http_address: str
    workers: tuple[Health, ...]
    metrics_address: str = ""
    """Address of the cluster-wide metrics, host:port."""
    filled: bool = True
    """True once the set of workers is known; until then the controller still looks for live workers to take over."""
    taken_over: frozenset[str] = frozenset()
    """The names of the processes that another controller started and that this controller has taken over."""
    operations_address: str = ""
    """Address of the router's metrics and traces if `http_address` uses TLS, else empty."""
    kept_at: str = ""
    """host:port of the other controller that supervises the workers; empty = this controller supervises them."""
    state: ControllerState | None = None
    """The target state of the workers, for the controller that replaces this one if it dies.

    None if this controller does not supervise the workers, or does not supervise them yet.
    """

    @property
    def all(self) -> tuple[Health, ...]:
        """The router and all workers."""
        return (self.router, *self.workers)

    @property
    def needed(self) -> tuple[Health, ...]:
        """The processes that must serve before the start counts as complete.

        These are all processes or, if workers were taken over, the router and those of the taken-over workers that
        still live.
        """
        if not self.taken_over:
            return self.all
        return (self.router, *(one for one in self.workers if self.lived_before(one)))

    def lived_before(self, one: Health) -> bool:
        """Return True for a process that another controller started and that has not been restarted since."""
        return one.name in self.taken_over and not one.restarts


class Backoff:
    """The wait before each restart: none after a long run, then doubling from `first_s` up to `longest_s` seconds.

    A run of `stable_s` seconds or more resets the count, so a process that dies once a day is always restarted at once.
    """

    def __init__(self, first_s: float = 0.5, longest_s: float = 15.0, stable_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._stable_s = stable_s
        self._failures = 0

    def after_death(self, lived_s: float) -> float:
        """Return the seconds to wait before the restart of a process that ran for `lived_s` seconds."""
        if lived_s >= self._stable_s:
            self._failures = 0
        self._failures += 1
        if self._failures == 1:
            return 0.0
        return float(min(self._first_s * 2 ** (self._failures - 2), self._longest_s))
