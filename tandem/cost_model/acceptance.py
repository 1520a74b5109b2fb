"""Learns how probable it is that drafts are accepted, by the class of the draft and the position in it."""

PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""The probability that is assumed at first, and the number of observations that it counts for. A position that no
draft has reached has the probability of the position before; otherwise longer drafts would never be tried.
"""
WINDOW = 32.0
"""The number of observations after which older ones hardly count."""


class Acceptance:
    """The probability that a draft is accepted if those before it were, an exponential mean by class and position.

    A class is the length of the match that the draft rests on (`tandem/engine/speculation/proposer.py`).
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """`prior`: the probability that is assumed at first."""
        self._prior = prior
        self._known: dict[tuple[int, int], tuple[float, float, int]] = {}
        """See `_at`, by class and position."""
        self._survivals: dict[int, list[float]] = {}
        """The longest return value of `survival` for each class since its last observation."""

    def rate(self, match: int, position: int) -> float:
        """Return the probability for the draft at `position`, from 0, of a class."""
        return self._at(match, position)[0]

    def best(self) -> float:
        """Return the largest probability for the first draft of any class; the prior while none is known."""
        return max((rate for (_, position), (rate, *_) in self._known.items() if not position), default=self._prior)

    def survival(self, match: int, drafts: int) -> list[float]:
        """Return the probability that each of the first `drafts` drafts is accepted together with all before it."""
        found = self._survivals.setdefault(match, [])
        for position in range(len(found), drafts):
            found.append((found[-1] if found else 1.0) * self.rate(match, position))
        return found[:drafts]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn from a verified draft, up to the first token that was rejected.

        If all of it was accepted, the probability at the next position moves towards that of the last one: otherwise a
        position where the first drafts were rejected by chance would never be tried again.
        """
        self._survivals.pop(match, None)
        for position in range(min(accepted + 1, drafted)):
            self._learn(match, position, position < accepted)
        if drafted == accepted and (match, drafted) in self._known:
            rate, weight, _ = self._known[match, drafted]
            rate += (self.rate(match, drafted - 1) - rate) / WINDOW if drafted else 0.0
            self._known[match, drafted] = rate, max(PRIOR_WEIGHT, weight - weight / WINDOW), 0

    def _learn(self, match: int, position: int, accepted: bool) -> None:
        rate, weight, alike = self._at(match, position)
        alike = max(alike, 0) + 1 if accepted else min(alike, 0) - 1
        if (rate if accepted else 1 - rate) ** abs(alike) * WINDOW**2 < 1.0:
            # A run this long is improbable at this rate: the rate has changed, so only the run counts.
            rate, weight = self._prior, PRIOR_WEIGHT + min(abs(alike), WINDOW) - 1
            rate += (accepted - rate) * (1 - PRIOR_WEIGHT / weight)
        weight = min(weight + 1.0, WINDOW)
        self._known[match, position] = rate + (accepted - rate) / weight, weight, alike

    def _at(self, match: int, position: int) -> tuple[float, float, int]:
        """Return the probability, the weight of its observations, and the length of the newest run of equal outcomes.

        The length is negative if the run was rejected.
        """
        if (match, position) in self._known:
            return self._known[match, position]
        return (self.rate(match, position - 1) if position else self._prior), PRIOR_WEIGHT, 0
