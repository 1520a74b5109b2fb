"""Predicts the length of an answer from ended answers, so that admission reserves pages for it, not for `max_tokens`.

Answers are classed by the power of two of their limit. An answer that already has n tokens is compared with ended
answers that became longer. Most answers stay within their forecast; one that exceeds it gets a new forecast, and its
worker frees pages if too few are left (docs/decisions/page_reservation.md).
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque

QUANTILE = 0.8
"""The share of answers that do not exceed their forecast."""
WINDOW = 256
"""The number of newest answers of a class from which it is forecast."""
SEEN_MIN = WINDOW // 16
"""The number of ended answers that a class needs before it is used."""
UNSEEN_TOKENS = 512
"""The forecast of a class with fewer ended answers, unless the limit is lower.

The limit alone would not do: it may be the whole context, and a worker's pool has room for few such answers.
"""


class AnswerLengths:
    """Learns from answers as they end. Not thread-safe; each call takes microseconds."""

    def __init__(self) -> None:
        self._newest: defaultdict[int, deque[int]] = defaultdict(deque)
        """The newest lengths of each class, in the order in which the answers ended."""
        self._sorted: defaultdict[int, list[int]] = defaultdict(list)

    def learn(self, limit: int, tokens: int) -> None:
        """Add an ended answer of `tokens` tokens with this limit, regardless of its finish reason."""
        newest, ordered = self._newest[limit.bit_length()], self._sorted[limit.bit_length()]
        if len(newest) == WINDOW:
            ordered.remove(newest.popleft())
        newest.append(tokens)
        insort(ordered, tokens)

    def mean(self, limit: int, *, to_the_limit: bool = False) -> float:
        """Return the mean length of the newest answers of this limit's class.

        Before any has ended, it is `min(limit, UNSEEN_TOKENS)`; with `to_the_limit` it is the limit.
        """
        if to_the_limit:
            return float(limit)
        seen = self._sorted[limit.bit_length()]
        return float(min(limit, sum(seen) / len(seen) if seen else UNSEEN_TOKENS))

    def expect(self, limit: int, so_far: int = 0, *, to_the_limit: bool = False) -> int:
        """Return the forecast for an answer that has `so_far` tokens: more than these, at most `limit`.

        It is `quantile(lengths > so_far)`, or twice `so_far` if no answer became longer. `to_the_limit` means that
        nothing but the limit ends the answer.
        """
        if to_the_limit:
            return limit
        seen = self._sorted[limit.bit_length()]
        if len(seen) < SEEN_MIN:
            return min(limit, max(UNSEEN_TOKENS, 2 * so_far))
        longer = seen[bisect_right(seen, so_far) :]
        return min(limit, longer[int(QUANTILE * len(longer))] if longer else 2 * so_far)
