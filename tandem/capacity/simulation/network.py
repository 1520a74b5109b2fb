"""Network delays between simulated processes: calls, events and KV pages take time, and nothing is lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.capacity.simulation.request import Outcome
from tandem.settings.router import GPU_CHUNKS_PER_S, RouterSettings


@dataclass(frozen=True, slots=True)
class Network:
    """Delays in seconds, and bandwidth in bytes per second."""

    ingress_s: float = 1e-3
    """Delay of a request from a client to the router's queue, in seconds."""
    call_s: float = 5e-4
    """Delay of a call between two processes in one direction, in seconds."""
    event_s: float = 1e-3
    """Delay in seconds from the end of a step to its output's arrival at the worker's event loop, router or client."""
    transfer_s: float = 3e-4
    """Fixed duration of a KV write in seconds, in addition to bytes ÷ bandwidth."""
    bytes_per_s: float = 3.6e11
    """Bandwidth between two workers, in bytes per second."""
    chunks_per_s: float | None = GPU_CHUNKS_PER_S
    """Maximum chunks per second that the router sends (`RouterConfig.chunks_per_s`); None = one chunk per token."""
    chunk_delay_max_s: float = RouterSettings().chunk_delay_max_s
    event_jitter_s: float = 3e-4
    """Mean of an additional, exponentially distributed delay of each token, in seconds.

    With it, simulated latencies have the quantiles that clients measured with two H200 GPUs
    (docs/decisions/capacity_planning.md).
    """


class DeliveryDelay:
    """Adds a random delay to each token of an answer; the order of the tokens is kept."""

    def __init__(self, network: Network, seed: int = 0) -> None:
        self._network = network
        self._dice = np.random.default_rng(seed)

    def moments(self, outcome: Outcome) -> NDArray[np.float64]:
        """Return the times at which the outcome's tokens reach the client, in seconds."""
        return self.late(outcome.token_s(self._network.event_s))

    def late(self, sent: Sequence[float]) -> NDArray[np.float64]:
        """Return the arrival times of tokens: the times `sent` plus random delays, made ascending to keep their order.

        `sent` has the arrival times without random delays. All times are in seconds.
        """
        return np.maximum.accumulate(np.asarray(sent) + self._dice.exponential(self._network.event_jitter_s, len(sent)))
