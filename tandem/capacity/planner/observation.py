"""The planner's input: what was measured of the whole cluster in one window."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.capacity.planner.demand import LatencyTargets
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.protocol.lifecycle.spans import Phase


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """The numbers of requests with latency targets that ended in the window, by whether they met all of them."""

    met: float = 0.0
    missed: Mapping[Phase, float] = field(default_factory=dict)
    """Requests that missed a target, by the phase that caused it.

    A rejected request counts for the phase that would have missed its target.
    """

    @property
    def total(self) -> float:
        """Number of requests with latency targets that ended in the window."""
        return self.met + sum(self.missed.values())

    def share_missed(self, *phases: Phase) -> float:
        """Return the fraction of requests with targets that missed one because of any of `phases`; 0 if none ended."""
        return sum(self.missed.get(phase, 0.0) for phase in phases) / self.total if self.total else 0.0

    @property
    def attained(self) -> float:
        """Fraction of the requests with latency targets that met their targets; 1 if none ended."""
        return self.met / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Offered:
    """The requests that clients sent to the router in the window, accepted or not; lengths are means, in tokens."""

    per_s: float
    prompt_tokens: float
    cached: float
    """Fraction of prompt tokens that were found in prefix caches in the window."""
    answer_tokens: float
    """Mean predicted output length, from recently ended requests with a similar `max_tokens`."""
    refused_per_s: float = 0.0
    """Rejected requests per second."""
    crowded_per_s: float = 0.0
    """Requests per second that were rejected because their ITL target could not be met."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The measurements of one window. Only serving workers count; workers that do both are counted in `shared`."""

    seconds: float
    offered: Offered
    targets: LatencyTargets
    """The strictest targets among the service classes with enough requests."""
    prompts: WorkerFacts | None
    """Mean costs and capacity of a prefill worker; None = no worker has measured its steps yet."""
    answers: WorkerFacts | None
    """Mean costs and capacity of a decode worker; equal to `prompts` if workers do both."""
    prefill: int = 0
    decode: int = 0
    shared: int = 0
    coming: int = 0
    """Number of workers that are starting or waiting for a node, and will then serve."""
    waiting_requests: float = 0.0
    """Requests in the routers' queues at the end of the window."""
    waiting_tokens: float = 0.0
    """Number of prompt tokens in the workers' queues at the end of the window."""
    running_requests: float = 0.0
    """Number of decoding requests at the end of the window."""
    kept: TargetCounts = field(default_factory=TargetCounts)

    @property
    def workers(self) -> int:
        """The number of serving workers."""
        return self.prefill + self.decode + self.shared
