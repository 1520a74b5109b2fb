"""Drafts of Medusa heads, from the hidden states that the engine's newest step left."""

import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.engine.speculation.heads.medusa import MedusaHeads
from tandem.engine.speculation.proposer import DRAFTS_MAX, BatchProposer, DraftSource, ProposerName, WantedDraft

_NEWEST_WEIGHT = 0.1
"""Weight of the newest duration in the mean time that computing a token of a draft takes."""


class HeadsProposer(BatchProposer):
    """Guesses from the hidden state that drew a request's newest token; it keeps no state of requests.

    Where another step or worker drew that token there is no hidden state, and the request's next step has no draft.
    """

    source = DraftSource(ProposerName.MEDUSA)

    def __init__(self, heads: MedusaHeads, drawn_hidden: Tensor, memory_bytes: int = 0) -> None:
        """`drawn_hidden`: see `HiddenStateModel`; `memory_bytes` is the memory of both."""
        self._heads = heads
        self._drawn_hidden = drawn_hidden
        self._token_s = 0.0
        self.longest = min(DRAFTS_MAX, len(heads))
        self.max_step_tokens = len(drawn_hidden)
        self.memory = {"weights": memory_bytes}

    @property
    def cost(self) -> StepCost:
        """See `BatchProposer`: the learned time of each head, whatever the rows."""
        return StepCost(CostParameters(base_s=self._token_s, token_s=0.0, pair_s=0.0, row_s=0.0, context_s=0.0))

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`."""

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""

    def missing_at_first(self, tokens: int) -> int:
        """See `BatchProposer`: no context is stored."""
        return min(tokens, 1)

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """See `BatchProposer`."""
        rows = [each.rows[-1] for each in wanted if self._has_hidden(each)]
        if not rows:
            return [()] * len(wanted)
        began, longest = time.perf_counter(), max(len(each.draws) for each in wanted)
        with torch.inference_mode():
            hidden = self._drawn_hidden[torch.tensor(rows, device=self._drawn_hidden.device)]
            guesses = iter(self._heads.guess(hidden, longest).tolist())
        token_s = (time.perf_counter() - began) / longest
        self._token_s += (_NEWEST_WEIGHT if self._token_s else 1.0) * (token_s - self._token_s)
        return [next(guesses)[: len(each.draws)] if self._has_hidden(each) else () for each in wanted]

    def _has_hidden(self, wanted: WantedDraft) -> bool:
        return bool(wanted.rows) and wanted.rows[-1] < len(self._drawn_hidden)
