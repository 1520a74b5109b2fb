"""How long an answer is going to be, by those that have ended: what admission counts on instead of the longest.

Answers are compared with those whose limit was about as large: the same power of two. Of an answer that is so long
already only those count that were longer. Most of the time a forecast is not exceeded; when it is, the answer has a
new one, and whoever counted on the old one makes room (`docs/decisions`).
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

QUANTILE = 0.8
"""Part of the answers that do not exceed their forecast."""
SEEN_MIN = 16
"""Answers of a class before it is believed."""
UNSEEN_TOKENS = 512
"""Until then each is taken for as long as it may be, at most so many tokens: clients that name no limit may have the
whole context, and a worker's pool has room for few of these."""
WINDOW = 256
"""Newest answers of a class that count."""
BEYOND = 2
"""An answer that is longer than nearly all before it is taken for this many times as long as it is now."""
REST_MIN = 2
"""Longer answers that must have been seen, for them to tell how an answer goes on."""


@dataclass(slots=True)
class _Class:
    """The newest lengths, in the order they came and by size."""

    newest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, tokens: int) -> None:
        if len(self.newest) == WINDOW:
            oldest = self.newest.popleft()
            self.ordered.remove(oldest)
            self.total -= oldest
        self.newest.append(tokens)
        self.total += tokens
        insort(self.ordered, tokens)


class AnswerLengths:
    """Learns from whoever sees answers end. Not safe from several threads; each call takes microseconds."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def learn(self, limit: int, tokens: int) -> None:
        """An answer with this limit has ended with so many tokens, whatever ended it."""
        self._classes.setdefault(limit.bit_length(), _Class()).add(tokens)

    def mean(self, limit: int, *, to_the_limit: bool = False) -> float:
        """Of the newest answers with such a limit; as long as none has ended the limit itself, at most
        `UNSEEN_TOKENS`.
        """
        seen = self._classes.get(limit.bit_length())
        if to_the_limit:
            return float(limit)
        return float(min(limit, UNSEEN_TOKENS if seen is None else seen.total / len(seen.ordered)))

    def expect(self, limit: int, so_far: int = 0, *, to_the_limit: bool = False) -> int:
        """Tokens of an answer that has `so_far` already: more than these unless they are all, at most `limit`.

        `to_the_limit`: nothing else ends it, as far as anybody knows.
        """
        if to_the_limit:
            return limit
        seen = self._classes.get(limit.bit_length())
        if seen is None or len(seen.ordered) < SEEN_MIN:
            return min(limit, max(UNSEEN_TOKENS, BEYOND * so_far))
        first = bisect_right(seen.ordered, so_far)
        rest = len(seen.ordered) - first
        if rest < REST_MIN:
            return min(limit, BEYOND * so_far)
        return min(limit, seen.ordered[first + int(QUANTILE * rest)])
