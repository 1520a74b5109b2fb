"""Penalties, as in vLLM, and seeded sampling from the tokens that top_k, top_p and min_p keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.steps.sampling_metadata import History, SamplingInput, SamplingMetadata
from tandem.protocol.messages import SamplingParams

_CANDIDATES = (128, 1024)
"""The numbers of most likely tokens that filters try, in this order.

Filters sort all tokens only if these do not suffice.
"""


def has_filters(sampling: SamplingParams) -> bool:
    """Return True if top_k, top_p or min_p is set."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def draw_filtered(
    probabilities: Tensor,
    params: Sequence[SamplingParams],
    numbers: Tensor,
    candidates: Sequence[int] = _CANDIDATES,
) -> Tensor:
    """Sample a token for each row of probabilities [rows, vocab] from the tokens that its filters keep: [rows] int64.

    `numbers` [rows, 1] float64 are uniform random numbers. `candidates` are the numbers of most likely tokens that are
    tried first; the result does not depend on them.
    """
    rows, vocab = probabilities.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    open_rows = list(range(rows))
    for count in [*(size for size in candidates if size < vocab), vocab]:
        weights, ids, settled = keep_best(probabilities[open_rows], [params[row] for row in open_rows], count)
        places = invert(weights, numbers[open_rows]).unsqueeze(-1)
        tokens[open_rows] = ids.gather(-1, places).squeeze(-1)
        open_rows = [row for row, done in zip(open_rows, settled.tolist(), strict=True) if not done]
        if not open_rows:
            break
    return tokens


def keep_best(probabilities: Tensor, params: Sequence[SamplingParams], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` most likely tokens of each row of probabilities [rows, vocab], with weight 0 if filtered out.

    The results are weights [rows, count] and ids [rows, count], by descending probability, then by id; and settled
    [rows] bool, which is True if the filters can keep no token beyond these. If `count` is the whole vocabulary, every
    row is settled.
    """
    vocab = probabilities.shape[-1]
    best, ids = _rank(probabilities, count)
    top_k = column([min(sampling.top_k or vocab, vocab) for sampling in params], best).long()
    top_p = column([sampling.top_p for sampling in params], best)
    min_p = column([sampling.min_p for sampling in params], best)
    cumulative = best.cumsum(dim=-1, dtype=torch.float64)
    of_top_k = cumulative.gather(-1, top_k.clamp(max=count) - 1)
    total = torch.where(top_k < vocab, of_top_k, torch.ones_like(of_top_k))
    kept = (torch.arange(count, device=best.device) < top_k) & (best >= min_p * best[:, :1])
    # A token is kept while those before it have not reached top_p. If top_p is 1, rounding must not remove any token.
    kept &= (cumulative - best < top_p * total) | (top_p >= 1)
    kept[:, 0] = True
    lowest = best.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    # If the last kept token is as likely as the last candidate, tokens beyond the candidates may be equally likely.
    settled = (lowest > best[:, -1:]) & ((top_k <= count) | (top_k == vocab)) | (count == vocab)
    return best * kept, ids, settled.squeeze(-1)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Sample an index for each row of weights [rows, n] ≥ 0, by inverting the cumulative weights at `numbers`.

    The result [rows] int64 is the first index whose cumulative weight exceeds number · total; `numbers` is [rows, 1]
    float64 in [0, 1). An index of weight 0 is never chosen.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The product may round up to the total itself, which no cumulative weight exceeds.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return the values as a column vector [rows, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _rank(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == probabilities.shape[-1]:
        whole = probabilities.sort(dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    best, ids = probabilities.topk(count, dim=-1)
    # `topk` leaves equal values in any order: sort by id, then sort stably by value.
    by_id = ids.sort(dim=-1)
    ranked = best.gather(-1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    return ranked.values, by_id.values.gather(-1, ranked.indices)


def penalize(logits: Tensor, draws: Sequence[SamplingInput]) -> Tensor:
    """Return logits [rows, vocab] in float32 with each row's penalties applied; the same tensor if no row has any.

    The logit of a token in the prompt or the output is divided (if above 0) or multiplied (if below) by the repetition
    penalty; for a token of the output, the frequency penalty is then subtracted for each occurrence, and the presence
    penalty once.
    """
    if not SamplingMetadata.of(draws).looks_back:
        return logits
    penalized = logits.to(torch.float32, copy=True)
    for row, sampling_input in zip(penalized, draws, strict=True):
        if sampling_input.history is not None and sampling_input.sampling.penalized:
            _penalize_row(row, sampling_input.sampling, sampling_input.history)
    return penalized


def _penalize_row(logits: Tensor, sampling: SamplingParams, history: History) -> None:
    """Apply the penalties of one row to its logits [vocab] float32, in place."""
    times = torch.bincount(_ids(history.answer, logits), minlength=len(logits))
    if sampling.repetition_penalty != 1:
        seen = times > 0
        seen[_ids(history.prompt, logits)] = True
        repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits.copy_(torch.where(seen, repeated, logits))
    logits -= sampling.frequency_penalty * times
    logits -= sampling.presence_penalty * (times > 0)


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
