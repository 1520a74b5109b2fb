"""How each process of the cluster is doing, and how long to wait before the next try."""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where a kept process stands."""

    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting to restart"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """One kept process as the controller sees it.

    `pid` is 0 while none is known, `stage` says what a start is busy with and `fraction` how much of that is done,
    `error` is the last failure.
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
        """Why it does not serve, in words; "" if it does, or still finishes what it has."""
        if self.phase in {Phase.SERVING, Phase.DRAINING}:
            return ""
        if self.phase is Phase.DRAINED:
            return f"drained; `tandem drain {self.name} --restart` brings it back"
        doing = (self.stage or str(self.phase)) if self.phase is Phase.STARTING else str(self.phase)
        return f"{doing}; last error: {self.error}" if self.restarts and self.error else doing


@dataclass(frozen=True, slots=True)
class ClusterHealth:
    """The router, where its listeners are (empty until they first opened), and the workers in the order of the plan."""

    router: Health
    grpc_address: str
    http_address: str
    workers: tuple[Health, ...]
    metrics_address: str = ""
    """Where the whole cluster's metrics are, host:port."""
    filled: bool = True
    """Whether it is known who the workers are; before that it is being found out which of them live already."""
    taken_over: frozenset[str] = frozenset()
    """Those that another controller had started."""
    kept_at: str = ""
    """The controller that keeps the workers instead, host:port; empty = this one does."""

    @property
    def all(self) -> tuple[Health, ...]:
        """Router and workers."""
        return (self.router, *self.workers)

    @property
    def needed(self) -> tuple[Health, ...]:
        """Who has to serve at first: everybody, or, where workers were taken over, those of them that live still."""
        if not self.taken_over:
            return self.all
        return (self.router, *(one for one in self.workers if self.lived_before(one)))

    def lived_before(self, one: Health) -> bool:
        """Whether it is a worker as another controller has left it."""
        return one.name in self.taken_over and not one.restarts


class Backoff:
    """Waits between restarts: none after a long life, then doubling up to `longest_s`.

    A life of `stable_s` seconds or more clears the count, so what dies once a day is always back at once.
    """

    def __init__(self, first_s: float = 0.5, longest_s: float = 15.0, stable_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._stable_s = stable_s
        self._failures = 0

    def after_death(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived `lived_s` seconds."""
        if lived_s >= self._stable_s:
            self._failures = 0
        self._failures += 1
        if self._failures == 1:
            return 0.0
        return float(min(self._first_s * 2 ** (self._failures - 2), self._longest_s))
