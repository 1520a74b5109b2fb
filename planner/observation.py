"""What the planner looks at: one window of the whole cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.demand import Promise
from planner.strain import WorkerFacts
from wire.tracing.spans import Phase


@dataclass(frozen=True, slots=True)
class Kept:
    """Requests that ended in the window: how many kept their promise, and which phase was to blame for others."""

    met: float = 0.0
    missed: Mapping[Phase, float] = field(default_factory=dict)
    """Those that were turned away count where they would have missed it."""

    @property
    def total(self) -> float:
        return self.met + sum(self.missed.values())

    def share_missed(self, *phases: Phase) -> float:
        """Part of all requests that one of these phases made late; 0 if none ended."""
        return sum(self.missed.get(phase, 0.0) for phase in phases) / self.total if self.total else 0.0

    @property
    def attained(self) -> float:
        """Part that kept it; 1 if none ended."""
        return self.met / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Offered:
    """What came to the listener in the window. Lengths are means."""

    per_s: float
    prompt_tokens: float
    cached: float
    """Part of prompt tokens that caches held, of late."""
    answer_tokens: float
    """As long as those that ended of late, among those that might have been as long."""
    refused_per_s: float = 0.0
    """Of these requests, turned away at once."""
    crowded_per_s: float = 0.0
    """Of those, because tokens would have come too far apart."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One window. Workers are those that serve; in a cluster that shares steps all of them are in `shared`."""

    seconds: float
    offered: Offered
    promise: Promise
    """Of the requests that have one."""
    prompts: WorkerFacts | None
    """Of a worker that prefills, as fitted; None = none has measured its steps yet."""
    answers: WorkerFacts | None
    """Of one that decodes; the same where all share their steps."""
    prefill: int = 0
    decode: int = 0
    shared: int = 0
    coming: int = 0
    """Workers that will serve, and do not yet: they start, or wait for a node."""
    waiting_requests: float = 0.0
    """In the routers' queues, at the window's end."""
    waiting_tokens: float = 0.0
    """Prompt tokens that are at workers and not computed yet, then."""
    running_requests: float = 0.0
    """That decode, then."""
    kept: Kept = field(default_factory=Kept)

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.shared
