"""Log probabilities of sampled tokens and of the most likely tokens, for the requests that want them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import TokenLogprobs

_LOW_HALF = (1 << 31) - 1


def score(logits: Tensor, draws: Sequence[SamplingInput], tokens: Tensor) -> list[TokenLogprobs | None]:
    """Return the log probabilities of the sampled `tokens` [rows] for the rows that want them; empty if none does.

    `logits` [rows, vocab] are the unchanged logits of the model.
    """
    asking = [row for row, sampling_input in enumerate(draws) if wants_logprobs(sampling_input)]
    if not asking:
        return []
    most = max(draws[row].sampling.logprobs or 0 for row in asking)
    values, ids = logprobs(logits[asking], tokens[asking], most)
    return scores_of(draws, values.tolist(), ids.tolist())


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of tokens [rows] int64, and the `top` most likely tokens of each row.

    They are computed from logits [rows, vocab]. The first result is [rows, 1 + top] float32: the log probability of the
    token itself, then those of the most likely tokens. The second is [rows, top] int64, the ids of the most likely
    tokens, by descending logit, then by ascending id.
    """
    # Adding 0 turns -0 into +0: they are equal, but have different bits.
    wide = logits.float() + 0.0
    bits = wide.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & _LOW_HALF)).long()
    # Sorts by logit and, among equal logits, puts the lower token id first.
    packed = (ordered << 32) | (_LOW_HALF - torch.arange(wide.shape[-1], device=wide.device))
    ids = packed.topk(min(top, wide.shape[-1]), dim=-1).indices
    # Rows without a token (-1) use token 0; their result is not read.
    places = torch.cat((tokens.clamp(min=0).unsqueeze(-1), ids), dim=-1)
    return wide.gather(-1, places) - wide.logsumexp(dim=-1, keepdim=True), ids


def scores_of(
    draws: Sequence[SamplingInput], values: Sequence[Sequence[float]], top_ids: Sequence[Sequence[int]]
) -> list[TokenLogprobs | None]:
    """Return the log probabilities of each row; None for a row that wants none.

    `values` and `top_ids` have one entry for each row that wants log probabilities, in order. An entry of `values` has
    the log probability of the sampled token, then those of the most likely tokens; an entry of `top_ids` has the ids of
    the most likely tokens. All entries have as many of these as the row that wants the most.
    """
    scores = iter(zip(values, top_ids, strict=True))
    return [
        _score(sampling_input.sampling.logprobs, *next(scores)) if wants_logprobs(sampling_input) else None
        for sampling_input in draws
    ]


def wants_logprobs(sampling_input: SamplingInput) -> bool:
    """Return True if the request of this sampling input wants log probabilities."""
    return sampling_input.sampling.logprobs is not None


def _score(top: int | None, values: Sequence[float], top_ids: Sequence[int]) -> TokenLogprobs:
    count = top or 0
    return TokenLogprobs(values[0], tuple(top_ids[:count]), tuple(values[1 : 1 + count]))
