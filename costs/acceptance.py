"""Learns how probable it is that drafts are accepted, by the class of the draft and the position in it."""

PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""The probability that is assumed at first, and the number of observations that it counts for. At a position that no
draft has reached it is that of the position before: else longer drafts would never be tried.
"""
WINDOW = 32.0
"""The number of observations after which older ones hardly count."""


class Acceptance:
    """The probability that a draft is accepted if those before it were, an exponential mean by class and position.

    A class is the length of the match that the draft rests on (`engine/speculation/proposer.py`).
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """`prior`: the probability that is assumed at first."""
        self._prior = prior
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}
        """By class and position: the probability, and the weight of what it rests on."""
        self._survivals: dict[int, list[float]] = {}
        """The longest return value of `survival` for each class since something was learned, as requests ask alike."""

    def rate(self, match: int, position: int) -> float:
        """Return the probability for the draft at `position`, from 0, of a class."""
        return self._known(match, position)[0]

    def best(self) -> float:
        """Return the largest probability for the first draft of any class; the prior while none is known."""
        return max((rate for (_, position), (rate, _) in self._rates.items() if not position), default=self._prior)

    def survival(self, match: int, drafts: int) -> list[float]:
        """Return the probability that each of so many drafts is accepted together with all before it."""
        found = self._survivals.setdefault(match, [])
        for position in range(len(found), drafts):
            found.append((found[-1] if found else 1.0) * self.rate(match, position))
        return found[:drafts]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn from a verified draft: those behind the first one that was rejected tell nothing."""
        self._survivals.pop(match, None)
        for position in range(min(accepted + 1, drafted)):
            rate, weight = self._known(match, position)
            weight = min(weight + 1.0, WINDOW)
            self._rates[match, position] = rate + ((position < accepted) - rate) / weight, weight

    def _known(self, match: int, position: int) -> tuple[float, float]:
        """Return the probability and the weight of what it rests on."""
        if (match, position) in self._rates:
            return self._rates[match, position]
        return (self.rate(match, position - 1) if position else self._prior), PRIOR_WEIGHT
