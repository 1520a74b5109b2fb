"""The proposer of Medusa heads, which predicts tokens from the hidden states of the engine's newest step."""

import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.engine.speculation.heads.medusa import MedusaHeads
from tandem.engine.speculation.proposer import BatchProposer, DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.draft_groups import DRAFTS_MAX

_NEWEST_WEIGHT = 0.1
"""The weight of the newest measurement in the moving average of the time per draft token."""


class HeadsProposer(BatchProposer):
    """A proposer that predicts tokens from the hidden state that a request's newest token was sampled from.

    It keeps no state of requests. If another step or worker sampled the newest token, its hidden state is missing, and
    the request gets no draft in the next step.
    """

    source = DraftSource(ProposerName.MEDUSA)

    def __init__(self, heads: MedusaHeads, drawn_hidden: Tensor, memory_bytes: int = 0) -> None:
        """Create a proposer that reads `drawn_hidden`, the buffer of `HiddenStateModel`.

        `memory_bytes` is the size of the heads and the buffer.
        """
        self._heads = heads
        self._drawn_hidden = drawn_hidden
        self._token_s = 0.0
        self.longest = min(DRAFTS_MAX, len(heads))
        self.max_step_tokens = len(drawn_hidden)
        self.memory = {"weights": memory_bytes}

    @property
    def cost(self) -> StepCost:
        """The cost model with the measured time of one head, which does not depend on the number of rows."""
        return StepCost(CostParameters(base_s=self._token_s, token_s=0.0, pair_s=0.0, row_s=0.0, context_s=0.0))

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Do nothing: the proposer keeps no state of requests."""

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Do nothing: the proposer keeps no state of requests."""

    def leave(self, key: Hashable) -> None:
        """Do nothing: the proposer keeps no state of requests."""

    def missing_at_first(self, tokens: int) -> int:
        """Return the number of missing tokens of a new request: at most one, as heads need no KV of the context."""
        return min(tokens, 1)

    def compute(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return the draft tokens of each request; none if the hidden state of its newest token is missing."""
        rows = [draft.rows[-1] for draft in wanted if self._has_hidden(draft)]
        if not rows:
            return [()] * len(wanted)
        began, longest = time.perf_counter(), max(len(draft.draws) for draft in wanted)
        with torch.inference_mode():
            hidden = self._drawn_hidden[torch.tensor(rows, device=self._drawn_hidden.device)]
            guesses = iter(self._heads.guess(hidden, longest).tolist())
        token_s = (time.perf_counter() - began) / longest
        self._token_s += (_NEWEST_WEIGHT if self._token_s else 1.0) * (token_s - self._token_s)
        return [next(guesses)[: len(draft.draws)] if self._has_hidden(draft) else () for draft in wanted]

    def _has_hidden(self, wanted: WantedDraft) -> bool:
        return bool(wanted.rows) and wanted.rows[-1] < len(self._drawn_hidden)
