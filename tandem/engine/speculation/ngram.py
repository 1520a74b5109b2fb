"""Prompt look-up: what followed the last tokens when they occurred before in the same request.

It costs no computation of the model, and answers that repeat their prompt, or themselves, are guessed well: edits,
summaries, code (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Hashable, Sequence

from tandem.engine.speculation.ngram_history import NgramHistory
from tandem.engine.speculation.proposer import NO_DRAFT, Draft


class NgramProposer:
    """Proposes what followed the newest occurrence of the request's last tokens, in its prompt or its answer."""

    def __init__(self) -> None:
        self._histories: dict[Hashable, NgramHistory] = {}

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`; the n-grams are noted when a draft is first asked for."""
        if key in self._histories:
            raise ValueError(f"{key} is known already")
        self._histories[key] = NgramHistory(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        self._histories[key].tokens.extend(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`."""
        history = self._histories[key]
        positions = history.positions
        for ngram in history.last():
            if position := positions.get(ngram):
                return history.draft(position, most)
        return NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""
        del self._histories[key]
