"""Proposers that know the answer, to show what a step gains at a given acceptance rate.

No real proposer could predict the text of a model with random weights. Every figure made with these proposers names
them.
"""

import random
from collections.abc import Callable, Hashable, Sequence

from tandem.engine.speculation.proposer import NO_DRAFT, Draft, DraftSource, ProposerName

ORACLE = DraftSource(ProposerName.NGRAM, 1)
"""The source of all drafts of the oracle."""


class OracleProposer:
    """Proposes each token correctly with probability `alpha`, independently of the others, and a wrong token otherwise.

    With `alpha` 0 every token is wrong. Whether the draft token for a position is right depends only on the
    seed and the position, not on the number of calls, so that runs are reproducible.
    """

    def __init__(self, answer_of: Callable[[Hashable], Sequence[int]], alpha: float, seed: int = 0) -> None:
        """`answer_of` returns the prompt and the whole answer of the request with the given key."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is a probability, not {alpha}")
        self._answer_of = answer_of
        self.alpha = alpha
        """The probability of a correct token; may change."""
        self._seed = seed
        self._known: dict[Hashable, int] = {}
        """The number of known tokens of each request: its prompt and its answer so far."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Implement `Proposer.begin`."""
        if key in self._known:
            raise ValueError(f"{key} is known already")
        self._known[key] = len(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Implement `Proposer.extend`."""
        self._known[key] += len(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return a draft of up to `most` tokens, empty after the end of the answer; see `Proposer`."""
        start = self._known[key]
        right = self._answer_of(key)[start : start + most]
        drafted = [self._guess(token, start + index) for index, token in enumerate(right)]
        return Draft(drafted, ORACLE) if drafted else NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """Implement `Proposer.leave`."""
        del self._known[key]

    def _guess(self, token: int, position: int) -> int:
        if random.Random(f"{self._seed} {position}").random() < self.alpha:
            return token
        return token - 1 if token else 1
