"""The way of an answer's tokens to the client."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulation.network import Network
from simulation.request import Outcome


class Way:
    """Each token comes a little later, by chance, as one has measured it; none overtakes another."""

    def __init__(self, network: Network, seed: int = 0) -> None:
        self._network = network
        self._dice = np.random.default_rng(seed)

    def moments(self, outcome: Outcome) -> NDArray[np.float64]:
        """When its tokens are at the client, in seconds."""
        return self.late(outcome.token_s(self._network.event_s))

    def late(self, sent: Sequence[float]) -> NDArray[np.float64]:
        """When tokens that would be there at these moments, one behind the other, are."""
        return np.maximum.accumulate(np.asarray(sent) + self._dice.exponential(self._network.event_jitter_s, len(sent)))
