"""The network delay of an answer's tokens to the client."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import Outcome


class DeliveryDelay:
    """Adds a random delay to each token, as measured; no token overtakes another."""

    def __init__(self, network: Network, seed: int = 0) -> None:
        self._network = network
        self._dice = np.random.default_rng(seed)

    def moments(self, outcome: Outcome) -> NDArray[np.float64]:
        """Returns the times of the outcome's tokens at the client, in seconds."""
        return self.late(outcome.token_s(self._network.event_s))

    def late(self, sent: Sequence[float]) -> NDArray[np.float64]:
        """Returns the arrival times of tokens that would arrive at the times `sent` without jitter, ascending."""
        return np.maximum.accumulate(np.asarray(sent) + self._dice.exponential(self._network.event_jitter_s, len(sent)))
