"""Masks on logits: an answer that is shorter than its `min_tokens` does not end, as in vLLM, and grammars are followed.

Until then the model's end-of-sequence ids, even ignored ones, and the request's stop token ids have no probability. The
number of a draw is the number of its token in the answer, whichever worker drew those before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.grammar_masks import GrammarMasks
from engine.steps.draws import Draw, Draws


def ends_too_early(draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each pair of a row and a token that it may not draw now: rows and token ids, of the same length."""
    rows: list[int] = []
    token_ids: list[int] = []
    for row, draw in enumerate(draws):
        if draw.index < draw.sampling.min_tokens:
            ends = {*draw.sampling.stop_token_ids, *eos_token_ids}
            rows.extend([row] * len(ends))
            token_ids.extend(ends)
    return rows, token_ids


def without_early_ends(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> Tensor:
    """Return logits [rows, vocab] with -inf for masked tokens, unchanged where no row has any."""
    rows, token_ids = ends_too_early(draws, eos_token_ids)
    if not rows:
        return logits
    kept = logits.clone()
    kept[rows, token_ids] = -torch.inf
    return kept


def within_grammars(logits: Tensor, draws: Draws, masks: GrammarMasks) -> Tensor:
    """Return logits [rows, vocab] with -inf for tokens that the grammars of their rows forbid now."""
    rows, forbidden = masks.forbidden(draws, logits.shape[1], logits.device)
    kept = logits.clone()
    kept[rows] = kept[rows].masked_fill(forbidden, -torch.inf)
    return kept


class MaskedLogits:
    """Logits of a step on the device that are -inf at masked tokens while its tokens are drawn.

    `restore` makes them the model's own again, for log probabilities. No launch waits for the device.
    """

    def __init__(self, logits: Tensor, draws: Draws, eos_token_ids: Sequence[int], masks: GrammarMasks | None) -> None:
        """Mask logits [rows, vocab] in place until `restore`."""
        self._constrained: tuple[Tensor, Tensor] | None = None
        if draws.constrained and masks is not None:
            limited, forbidden = masks.forbidden(draws, logits.shape[1], logits.device)
            own = logits[limited]
            self._constrained = limited, own
            logits[limited] = own.masked_fill(forbidden, -torch.inf)
        pairs = torch.tensor(ends_too_early(draws, eos_token_ids), pin_memory=logits.device.type == "cuda")
        rows, token_ids = pairs.to(logits.device, torch.int64, non_blocking=True)
        self._logits, self._masked = logits, (rows, token_ids)
        self._were = logits[self._masked]
        logits.index_put_(self._masked, torch.full_like(self._were, -torch.inf))

    def restore(self) -> None:
        """Restore the model's own logits."""
        self._logits.index_put_(self._masked, self._were)
        if self._constrained is not None:
            rows, own = self._constrained
            self._logits[rows] = own
