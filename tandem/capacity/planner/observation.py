"""The planner's input: one window of the whole cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.protocol.lifecycle.spans import Phase


@dataclass(frozen=True, slots=True)
class Kept:
    """Requests with targets that ended in the window: how many met them, and how many missed, by phase."""

    met: float = 0.0
    missed: Mapping[Phase, float] = field(default_factory=dict)
    """Requests by the phase that missed. A rejected request counts for the phase in which it would have missed."""

    @property
    def total(self) -> float:
        """All requests with targets that ended in the window."""
        return self.met + sum(self.missed.values())

    def share_missed(self, *phases: Phase) -> float:
        """Return the fraction of all requests that missed in one of these phases; 0 if none ended."""
        return sum(self.missed.get(phase, 0.0) for phase in phases) / self.total if self.total else 0.0

    @property
    def attained(self) -> float:
        """Fraction of requests that met their targets; 1 if none ended."""
        return self.met / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Offered:
    """Requests offered to the router in the window. Lengths are means, in tokens."""

    per_s: float
    prompt_tokens: float
    cached: float
    """Fraction of prompt tokens that were found in prefix caches recently."""
    answer_tokens: float
    """Mean expected output length, from recently ended requests with a similar limit."""
    refused_per_s: float = 0.0
    """Rejected requests per second."""
    crowded_per_s: float = 0.0
    """Requests per second that were rejected because of their inter-token target."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One window. Only serving workers count; if workers do both, all of them are in `shared`."""

    seconds: float
    offered: Offered
    targets: LatencyTargets
    """The tightest targets among the requests that have any."""
    prompts: WorkerFacts | None
    """A prefill worker with fitted costs; None = no worker has measured its steps yet."""
    answers: WorkerFacts | None
    """A decode worker with fitted costs; equal to `prompts` if workers do both."""
    prefill: int = 0
    decode: int = 0
    shared: int = 0
    coming: int = 0
    """Workers that will serve but do not yet: they start, or wait for a node."""
    waiting_requests: float = 0.0
    """Requests in the routers' queues at the end of the window."""
    waiting_tokens: float = 0.0
    """Prompt tokens queued at workers at the end of the window."""
    running_requests: float = 0.0
    """Decoding requests at the end of the window."""
    kept: Kept = field(default_factory=Kept)

    @property
    def workers(self) -> int:
        """The number of serving workers."""
        return self.prefill + self.decode + self.shared
