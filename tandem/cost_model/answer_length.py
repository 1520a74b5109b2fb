"""Predicts answer lengths from ended answers; admission reserves pages for the prediction, not for `max_tokens`.

Answers belong to one class if their limits (`max_tokens`) have the same number of binary digits. The forecast for an
answer that already has n tokens uses only ended answers of its class with more than n tokens. Most answers stay within
their forecast; an answer that exceeds it gets a new forecast, and its worker frees pages if too few are left
(docs/decisions/page_reservation.md).
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque

QUANTILE = 0.8
"""The quantile of the lengths of ended answers that is used as the forecast."""
WINDOW = 256
"""Number of newest ended answers of a class from which forecasts are computed."""
SEEN_MIN = WINDOW // 16
"""Minimum number of ended answers of a class for a forecast from them."""
UNSEEN_TOKENS = 512
"""The forecast in tokens for a class with fewer than `SEEN_MIN` ended answers, unless the answer's limit is lower.

The limit itself is no usable forecast: it may be the whole context, and a worker's pool has pages for only a few
answers of that length.
"""


class AnswerLengths:
    """Learns the lengths of answers when they end. Not thread-safe; each call takes microseconds."""

    def __init__(self) -> None:
        self._newest: defaultdict[int, deque[int]] = defaultdict(deque)
        """The newest lengths of each class, oldest first."""
        self._sorted: defaultdict[int, list[int]] = defaultdict(list)

    def learn(self, limit: int, tokens: int) -> None:
        """Add an ended answer of `tokens` tokens with this limit, regardless of its finish reason."""
        newest, ordered = self._newest[limit.bit_length()], self._sorted[limit.bit_length()]
        if len(newest) == WINDOW:
            ordered.remove(newest.popleft())
        newest.append(tokens)
        insort(ordered, tokens)

    def mean(self, limit: int, *, to_the_limit: bool = False) -> float:
        """Return the mean length of the newest ended answers of the class of `limit`.

        Without ended answers it is `min(limit, UNSEEN_TOKENS)`. With `to_the_limit` (only the limit ends the answer) it
        is the limit.
        """
        if to_the_limit:
            return float(limit)
        seen = self._sorted[limit.bit_length()]
        return float(min(limit, sum(seen) / len(seen) if seen else UNSEEN_TOKENS))

    def expect(self, limit: int, so_far: int = 0, *, to_the_limit: bool = False) -> int:
        """Return the predicted length of an answer that has `so_far` tokens: above `so_far`, at most `limit`.

        It is the `QUANTILE` of the lengths above `so_far`, or twice `so_far` if there are none. With `to_the_limit`
        (only the limit ends the answer) it is the limit.
        """
        if to_the_limit:
            return limit
        seen = self._sorted[limit.bit_length()]
        if len(seen) < SEEN_MIN:
            return min(limit, max(UNSEEN_TOKENS, 2 * so_far))
        longer = seen[bisect_right(seen, so_far) :]
        return min(limit, longer[int(QUANTILE * len(longer))] if longer else 2 * so_far)
