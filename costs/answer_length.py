"""Predicts the length of an answer from those that have ended, which admission counts on instead of `max_tokens`.

Answers form classes by the power of two of their limit. An answer that already has n tokens is compared with those that
became longer. Most answers stay within their forecast; one that exceeds it gets a new forecast, and the worker that
counted on the old one frees pages (docs/decisions/0020).
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

QUANTILE = 0.8
"""The share of answers that do not exceed their forecast."""
WINDOW = 256
"""The newest answers of a class that count."""
SEEN_MIN = WINDOW // 16
"""The number of answers of a class from which on it is used."""
UNSEEN_TOKENS = 512
"""The forecast of a class before that, unless the limit is lower: the limit may be the whole context, and a worker's
pool holds few of these.
"""


@dataclass(slots=True)
class _Class:
    """The newest lengths, in order of arrival and sorted."""

    newest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        if len(self.newest) == WINDOW:
            self.ordered.remove(self.newest.popleft())
        self.newest.append(tokens)
        insort(self.ordered, tokens)


class AnswerLengths:
    """Learns from the answers that end. Not thread-safe; each call takes microseconds."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def learn(self, limit: int, tokens: int) -> None:
        """Add an answer of `tokens` with this limit, whatever ended it."""
        self._classes.setdefault(limit.bit_length(), _Class()).add(tokens)

    def mean(self, limit: int, *, to_the_limit: bool = False) -> float:
        """Return the mean length of the newest answers with such a limit; before any, `min(limit, UNSEEN_TOKENS)`."""
        if to_the_limit:
            return float(limit)
        seen = self._classes.get(limit.bit_length())
        return float(min(limit, UNSEEN_TOKENS if seen is None else sum(seen.ordered) / len(seen.ordered)))

    def expect(self, limit: int, so_far: int = 0, *, to_the_limit: bool = False) -> int:
        """Return the forecast for an answer that has `so_far` tokens: more than these, at most `limit`.

        `quantile(lengths > so_far)`, or twice `so_far` if no answer became longer. `to_the_limit` means that nothing
        but the limit ends the answer.
        """
        if to_the_limit:
            return limit
        seen = self._classes.get(limit.bit_length())
        if seen is None or len(seen.ordered) < SEEN_MIN:
            return min(limit, max(UNSEEN_TOKENS, 2 * so_far))
        first = bisect_right(seen.ordered, so_far)
        longer = len(seen.ordered) - first
        return min(limit, seen.ordered[first + int(QUANTILE * longer)] if longer else 2 * so_far)
