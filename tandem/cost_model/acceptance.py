"""Learns the acceptance probability of draft tokens, by the source of the draft and the position in it."""

from collections.abc import Hashable

PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""The initial acceptance probability, and the number of observations that it is worth.

A position that no draft has reached yet has the probability of the position before it; otherwise longer drafts would
never be tried.
"""
WINDOW = 32.0
"""The weight of a new observation in the moving average of its position is at least 1 ÷ `WINDOW`."""


class Acceptance:
    """Learns the probability that a draft token is accepted if all earlier ones were, by source and position.

    It is an exponential moving average of the outcomes. After a run of equal outcomes that is improbable at this
    average, only the run counts. The sources are those of `tandem.engine.speculation.proposer.DraftSource`.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """Create the estimate; `prior` is the initial acceptance probability."""
        self._prior = prior
        self._known: dict[tuple[Hashable, int], tuple[float, float, int]] = {}
        """The values that `_at` returns, for each source and position that has observations."""
        self._survivals: dict[Hashable, list[float]] = {}
        """For each source, the longest list that `survival` has computed since the source's last observation."""

    def rate(self, source: Hashable, position: int) -> float:
        """Return the acceptance probability of a source's draft token at `position`, counted from 0."""
        return self._at(source, position)[0]

    def best(self) -> float:
        """Return the largest acceptance probability of any source's first draft token.

        Without observations it is the prior.
        """
        return max((rate for (_, position), (rate, *_) in self._known.items() if not position), default=self._prior)

    def survival(self, source: Hashable, drafts: int) -> list[float]:
        """Return the probability that all draft tokens up to each of the first `drafts` positions are accepted.

        Entry i is the product of the rates of the positions 0 to i.
        """
        survivals = self._survivals.setdefault(source, [])
        for position in range(len(survivals), drafts):
            survivals.append((survivals[-1] if survivals else 1.0) * self.rate(source, position))
        return survivals[:drafts]

    def observe(self, source: Hashable, drafted: int, accepted: int) -> None:
        """Learn from a verified draft: from its accepted tokens and from the first rejected one.

        If the whole draft was accepted, the probability at the position after it moves towards that of the draft's last
        position. Without this, a position whose first draft tokens were rejected by chance would never be tried again.
        """
        self._survivals.pop(source, None)
        for position in range(min(accepted + 1, drafted)):
            self._learn(source, position, position < accepted)
        if drafted == accepted and (source, drafted) in self._known:
            rate, weight, _ = self._known[source, drafted]
            rate += (self.rate(source, drafted - 1) - rate) / WINDOW if drafted else 0.0
            self._known[source, drafted] = rate, max(PRIOR_WEIGHT, weight - weight / WINDOW), 0

    def _learn(self, source: Hashable, position: int, accepted: bool) -> None:
        rate, weight, alike = self._at(source, position)
        alike = max(alike, 0) + 1 if accepted else min(alike, 0) - 1
        if (rate if accepted else 1 - rate) ** abs(alike) * WINDOW**2 < 1.0:
            # So long a run of equal outcomes is improbable at this rate: the rate has changed, so only the run counts.
            rate, weight = self._prior, PRIOR_WEIGHT + min(abs(alike), WINDOW) - 1
            rate += (accepted - rate) * (1 - PRIOR_WEIGHT / weight)
        weight = min(weight + 1.0, WINDOW)
        self._known[source, position] = rate + (accepted - rate) / weight, weight, alike

    def _at(self, source: Hashable, position: int) -> tuple[float, float, int]:
        """Return the probability, the weight of its observations, and the length of the newest run of equal outcomes.

        The length is negative if the run consists of rejections.
        """
        if (source, position) in self._known:
            return self._known[source, position]
        return (self.rate(source, position - 1) if position else self._prior), PRIOR_WEIGHT, 0
