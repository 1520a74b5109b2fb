"""Log probabilities of drawn tokens and of the most likely ones, for the draws that ask for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import TokenLogprobs

_LOW_HALF = (1 << 31) - 1


def score(logits: Tensor, draws: Sequence[SamplingInput], tokens: Tensor) -> list[TokenLogprobs | None]:
    """Return the log probabilities of `tokens` [rows] that `draws` ask for; empty if none asks.

    logits [rows, vocab] are the model's own.
    """
    asking = [row for row, draw in enumerate(draws) if wants_logprobs(draw)]
    if not asking:
        return []
    most = max(draws[row].sampling.logprobs or 0 for row in asking)
    values, ids = logprobs(logits[asking], tokens[asking], most)
    return scores_of(draws, values.tolist(), ids.tolist())


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Log softmax of logits [rows, vocab] at tokens [rows] int64, and the `top` largest of each row.

    → values [rows, 1 + top] float32, the token's own first, and ids of the largest [rows, top] int64, by falling logit
    and rising id.
    """
    # Adding 0 makes one zero of both, which are equal but have other bits.
    wide = logits.float() + 0.0
    bits = wide.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & _LOW_HALF)).long()
    # Greater for a greater logit, and for the lower token among equal ones.
    packed = (ordered << 32) | (_LOW_HALF - torch.arange(wide.shape[-1], device=wide.device))
    ids = packed.topk(min(top, wide.shape[-1]), dim=-1).indices
    # Of a row without a token nobody reads the result.
    places = torch.cat((tokens.clamp(min=0).unsqueeze(-1), ids), dim=-1)
    return wide.gather(-1, places) - wide.logsumexp(dim=-1, keepdim=True), ids


def scores_of(
    draws: Sequence[SamplingInput], values: Sequence[Sequence[float]], top_ids: Sequence[Sequence[int]]
) -> list[TokenLogprobs | None]:
    """One entry for each draw, None where it asks for no log probabilities.

    For those that ask, in their order: `values`, of the drawn token and then of the most likely ones, and the most
    likely tokens' `top_ids`; as many as any of them asks for.
    """
    scores = iter(zip(values, top_ids, strict=True))
    return [_score(each.sampling.logprobs, *next(scores)) if wants_logprobs(each) else None for each in draws]


def wants_logprobs(draw: SamplingInput) -> bool:
    """Return True if log probabilities go with this draw's token."""
    return draw.sampling.logprobs is not None


def _score(top: int | None, values: Sequence[float], top_ids: Sequence[int]) -> TokenLogprobs:
    count = top or 0
    return TokenLogprobs(values[0], tuple(top_ids[:count]), tuple(values[1 : 1 + count]))
