"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens in the same request.

Lookup needs no computation by a model. It predicts well where an output repeats its prompt or itself, as in edits,
summaries and code (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Hashable, Sequence

from tandem.engine.speculation.ngram_history import NgramHistory
from tandem.engine.speculation.proposer import NO_DRAFT, Draft


class NgramProposer:
    """Proposes the tokens after the newest earlier occurrence of a request's last tokens, in its prompt or output."""

    def __init__(self) -> None:
        self._histories: dict[Hashable, NgramHistory] = {}

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Add a request, as `Proposer.begin` describes.

        Its n-grams are indexed only when the first draft is requested.
        """
        if key in self._histories:
            raise ValueError(f"{key} is known already")
        self._histories[key] = NgramHistory(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Append tokens to a request, as `Proposer.extend` describes."""
        self._histories[key].tokens.extend(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """Return at most `most` draft tokens, as `Proposer.propose` describes."""
        history = self._histories[key]
        positions = history.positions
        for ngram in history.last():
            if position := positions.get(ngram):
                return history.draft(position, most)
        return NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """Remove a request."""
        del self._histories[key]
