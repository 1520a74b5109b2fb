"""Drafts of Medusa heads, from the hidden states that the engine's newest step left."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.proposer import HEADS_CLASS, NO_DRAFT, Draft, WantedDraft


class HeadsProposer:
    """Guesses from the hidden state that drew a request's newest token; it keeps no state of requests.

    Where another step or worker drew that token there is no hidden state, and the request's next step has no draft.
    """

    def __init__(self, heads: MedusaHeads, drawn_hidden: Tensor) -> None:
        """`drawn_hidden`: see `HiddenStateModel`."""
        self._heads = heads
        self._drawn_hidden = drawn_hidden
        self._placeholders = Draft((0,) * len(heads), HEADS_CLASS)

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`."""

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `BatchProposer`."""
        if most >= len(self._heads):
            return self._placeholders
        return Draft(self._placeholders.token_ids[:most], HEADS_CLASS) if most > 0 else NO_DRAFT

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """See `BatchProposer`."""
        rows = [each.row for each in wanted if self._has_hidden(each.row)]
        if not rows:
            return [()] * len(wanted)
        with torch.inference_mode():
            hidden = self._drawn_hidden[torch.tensor(rows, device=self._drawn_hidden.device)]
            guesses = iter(self._heads.guess(hidden, max(each.drafts for each in wanted)).tolist())
        return [next(guesses)[: each.drafts] if self._has_hidden(each.row) else () for each in wanted]

    def _has_hidden(self, row: int | None) -> bool:
        return row is not None and row < len(self._drawn_hidden)
