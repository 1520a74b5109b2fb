"""Proposers that know the answer: they show what a step gains for a given rate of acceptance.

Models of random weights have no text that a real proposer could guess. Every figure made with these names them.
"""

import random
from collections.abc import Callable, Hashable, Sequence

from tandem.engine.speculation.proposer import NO_DRAFT, Draft, DraftSource, ProposerName

ORACLE = DraftSource(ProposerName.NGRAM, 1)
"""The class of all guesses."""


class OracleProposer:
    """Proposes each token rightly with probability `alpha`, independently of the others; another token otherwise.

    With `alpha` 0 it is always wrong. Whether the guess for a place in an answer is right depends on the seed and the
    place only, not on the number of calls, so that runs repeat.
    """

    def __init__(self, answer_of: Callable[[Hashable], Sequence[int]], alpha: float, seed: int = 0) -> None:
        """`answer_of` a key returns the prompt and the whole answer of that request."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is a probability, not {alpha}")
        self._answer_of = answer_of
        self.alpha = alpha
        """The probability; may change."""
        self._seed = seed
        self._known: dict[Hashable, int] = {}
        """The tokens of each request, of its prompt and its answer so far."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`."""
        if key in self._known:
            raise ValueError(f"{key} is known already")
        self._known[key] = len(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        self._known[key] += len(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`; no draft after the end of the answer."""
        start = self._known[key]
        right = self._answer_of(key)[start : start + most]
        drafted = [self._guess(token, start + index) for index, token in enumerate(right)]
        return Draft(drafted, ORACLE) if drafted else NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""
        del self._known[key]

    def _guess(self, token: int, position: int) -> int:
        if random.Random(f"{self._seed} {position}").random() < self.alpha:
            return token
        return token - 1 if token else 1
