"""The tokens of one request, and an index of the positions at which its n-grams occurred."""

from collections.abc import Sequence

from tandem.engine.speculation.proposer import MATCH_MAX, NGRAM_MAX, Draft, DraftSource, ProposerName

NOTED_MAX = 8192
"""The number of a request's newest tokens that are indexed when it begins; indexing more would delay all requests."""
_NONE = -1
"""The placeholder for a token: a history begins with NGRAM_MAX of them, so that each token follows an n-gram."""

Ngram = int | tuple[int, ...]
"""An n-gram: a single token is an int, several tokens are a tuple."""


class NgramHistory:
    """The tokens of one request and, for each n-gram, the position after its newest occurrence.

    An n-gram is indexed only once a token follows it.
    """

    __slots__ = ("_noted", "positions", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = [_NONE] * NGRAM_MAX
        self.tokens += tokens[-NOTED_MAX:]
        self._noted = NGRAM_MAX
        self.positions: dict[Ngram, int] = {}

    def last(self) -> tuple[Ngram, Ngram, Ngram]:
        """Index all n-grams that a token follows, and return the n-grams at the end of the tokens, longest first."""
        if self._noted < len(self.tokens):
            self._note()
        x, y, z = self.tokens[-NGRAM_MAX:]
        return (x, y, z), (y, z), z

    def draft(self, position: int, most: int) -> Draft:
        """Return a draft of `most` tokens: those from `position` on, which follow an occurrence of the last n-gram.

        If there are fewer than `most` tokens from `position` on, the draft repeats them.
        """
        tokens = self.tokens
        drafted = tokens[position : position + most]
        period = len(tokens) - position
        while len(drafted) < most:
            drafted.append(drafted[len(drafted) - period])
        return Draft(drafted, DraftSource(ProposerName.NGRAM, self._match(position)))

    def _match(self, position: int) -> int:
        """Return how many tokens before `position` equal the tokens at the end, at most MATCH_MAX."""
        tokens, length = self.tokens, 1
        while length < MATCH_MAX and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _note(self) -> None:
        """Index the n-grams before each token that was added since the last call."""
        tokens, start, end = self.tokens, self._noted, len(self.tokens)
        positions = self.positions
        x, y, z = tokens[start - NGRAM_MAX : start]
        for position in range(start, end):
            positions[x, y, z] = positions[y, z] = positions[z] = position
            x, y, z = y, z, tokens[position]
        self._noted = end
