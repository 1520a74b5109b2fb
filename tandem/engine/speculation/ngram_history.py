"""The tokens of one request, and where its n-grams occurred."""

from collections.abc import Sequence

from tandem.engine.speculation.proposer import MATCH_MAX, NGRAM_MAX, Draft, DraftSource, ProposerName

NOTED_MAX = 8192
"""The tokens that are noted when a request begins, the newest: more would delay the step of all requests."""
_NONE = -1
"""No token; a history begins with as many as the longest n-gram has, so that each token has an n-gram before it."""

Ngram = int | tuple[int, ...]
"""One token is itself, more are a tuple."""


class NgramHistory:
    """The tokens of one request and, for each n-gram, the position behind its newest occurrence but the last one."""

    __slots__ = ("_noted", "positions", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [_NONE] * NGRAM_MAX
        self.tokens += tokens[-NOTED_MAX:]
        self._noted = NGRAM_MAX
        self.positions: dict[Ngram, int] = {}

    def last(self) -> tuple[Ngram, Ngram, Ngram]:
        """Return the n-grams of the last tokens, the longest first, and note the others that are new."""
        if self._noted < len(self.tokens):
            self._note()
        x, y, z = self.tokens[-NGRAM_MAX:]
        return (x, y, z), (y, z), z

    def draft(self, position: int, most: int) -> Draft:
        """Return the guess that the tokens from `position` on follow once more, `position` being behind an n-gram.

        Where they end, they go on periodically with the draft itself.
        """
        tokens = self.tokens
        drafted = tokens[position : position + most]
        period = len(tokens) - position
        while len(drafted) < most:
            drafted.append(drafted[len(drafted) - period])
        return Draft(drafted, DraftSource(ProposerName.NGRAM, self._match(position)))

    def _match(self, position: int) -> int:
        """Return how many tokens before `position` equal the last ones, at most MATCH_MAX."""
        tokens, length = self.tokens, 1
        while length < MATCH_MAX and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _note(self) -> None:
        """Note the n-grams that are followed by tokens which are new."""
        tokens, start, end = self.tokens, self._noted, len(self.tokens)
        positions = self.positions
        x, y, z = tokens[start - NGRAM_MAX : start]
        for position in range(start, end):
            positions[x, y, z] = positions[y, z] = positions[z] = position
            x, y, z = y, z, tokens[position]
        self._noted = end
