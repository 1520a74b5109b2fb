"""Changes of logits before penalties and temperature, as in vLLM: biases, minimum lengths, and grammars.

The request's `logit_bias` is added. Until an output has `min_tokens` tokens, the model's end-of-sequence ids, even
ignored ones, and the request's stop token ids get no probability. The index of a sampling input is the index of its
token in the output, no matter which worker sampled the tokens before.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.steps.sampling_metadata import SamplingInput, SamplingMetadata


def additions(draws: Sequence[SamplingInput], eos_token_ids: Sequence[int]) -> tuple[list[int], list[int], list[float]]:
    """Return the values to add to logits as three lists of equal length: rows, token ids and addends.

    Each pair of row and token occurs once. The addend of a token that would end an output too early is -inf.
    """
    addends: dict[tuple[int, int], float] = {}
    for row, sampling_input in enumerate(draws):
        addends.update({(row, token_id): bias for token_id, bias in sampling_input.sampling.logit_bias})
        if sampling_input.index < sampling_input.sampling.min_tokens:
            ends = (*sampling_input.sampling.stop_token_ids, *eos_token_ids)
            addends.update({(row, token_id): -math.inf for token_id in ends})
    return [row for row, _ in addends], [token_id for _, token_id in addends], list(addends.values())


def masked(logits: Tensor, draws: Sequence[SamplingInput], eos_token_ids: Sequence[int]) -> Tensor:
    """Return logits [rows, vocab] with all `additions`, in float32; the same tensor if there are none."""
    rows, token_ids, addends = additions(draws, eos_token_ids)
    if not rows:
        return logits
    changed = logits.to(torch.float32, copy=True)
    changed[rows, token_ids] += torch.tensor(addends, device=logits.device)
    return changed


def within_grammars(logits: Tensor, draws: SamplingMetadata, masks: GrammarMasks) -> Tensor:
    """Return logits [rows, vocab] in which the tokens that each row's grammar forbids are -inf."""
    rows, forbidden = masks.forbidden(draws, logits.shape[1], logits.device)
    kept = logits.clone()
    kept[rows] = kept[rows].masked_fill(forbidden, -torch.inf)
    return kept


class MaskedLogits:
    """The logits of a step on the device, changed in place while its tokens are sampled.

    `restore` undoes the change, so that log probabilities are those of the model. No method waits for the device.
    """

    def __init__(
        self, logits: Tensor, draws: SamplingMetadata, eos_token_ids: Sequence[int], masks: GrammarMasks | None
    ) -> None:
        """Change logits [rows, vocab] in place, until `restore`; biases are rounded to the dtype of the logits."""
        self._constrained: tuple[Tensor, Tensor] | None = None
        if draws.constrained and masks is not None:
            limited, forbidden = masks.forbidden(draws, logits.shape[1], logits.device)
            own = logits[limited]
            self._constrained = limited, own
            logits[limited] = own.masked_fill(forbidden, -torch.inf)
        # Sent in one transfer: float64 represents row numbers and token ids exactly.
        columns = torch.tensor(
            additions(draws, eos_token_ids), dtype=torch.float64, pin_memory=logits.device.type == "cuda"
        ).to(logits.device, non_blocking=True)
        rows, token_ids = columns[:2].long()
        self._logits, self._masked = logits, (rows, token_ids)
        self._were = logits[self._masked]
        logits.index_put_(self._masked, (self._were + columns[2]).to(logits.dtype))

    def restore(self) -> None:
        """Restore the model's own logits."""
        self._logits.index_put_(self._masked, self._were)
        if self._constrained is not None:
            rows, own = self._constrained
            self._logits[rows] = own
