"""What may not be drawn yet: an answer that is shorter than its `min_tokens` does not end, as in vLLM.

Until then the model's end-of-sequence ids, whether they are ignored or not, and the request's stop token ids have no
probability. The number of a draw is the number of its token in the answer, whichever worker drew those before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.steps.draws import Draw


def ends_too_early(draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Each pair of a row and a token that it may not draw now: rows and token ids, of the same length."""
    rows: list[int] = []
    token_ids: list[int] = []
    for row, draw in enumerate(draws):
        if draw.index < draw.sampling.min_tokens:
            ends = {*draw.sampling.stop_token_ids, *eos_token_ids}
            rows.extend([row] * len(ends))
            token_ids.extend(ends)
    return rows, token_ids


def without_early_ends(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> Tensor:
    """Logits [rows, vocab] with -inf for what may not be drawn yet; the very same ones where everything may."""
    rows, token_ids = ends_too_early(draws, eos_token_ids)
    if not rows:
        return logits
    kept = logits.clone()
    kept[rows, token_ids] = -torch.inf
    return kept


class HeldLogits:
    """Logits of a step on the device that are -inf while its tokens are drawn, and then what they were: log
    probabilities are the model's own. Launches that never wait for the device.
    """

    def __init__(self, logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> None:
        """Of logits [rows, vocab], changed in place until they are let go."""
        pairs = torch.tensor(ends_too_early(draws, eos_token_ids), pin_memory=logits.device.type == "cuda")
        rows, token_ids = pairs.to(logits.device, torch.int64, non_blocking=True)
        self._logits, self._places = logits, (rows, token_ids)
        self._were = logits[self._places]
        logits.index_put_(self._places, torch.full_like(self._were, -torch.inf))

    def let_go(self) -> None:
        """Bring back what they were."""
        self._logits.index_put_(self._places, self._were)
