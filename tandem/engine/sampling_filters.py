"""Penalties, which mean what they mean in vLLM, and seeded draws from what top_k, top_p and min_p keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.steps.sampling_metadata import History, SamplingInput, SamplingMetadata
from tandem.protocol.messages import SamplingParams

_CANDIDATES = (128, 1024)
"""Filters look at so many best tokens, then at more, and sort a vocabulary only where these do not settle them."""


def has_filters(sampling: SamplingParams) -> bool:
    """Return True if any filter is set."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def draw_filtered(
    probabilities: Tensor,
    params: Sequence[SamplingParams],
    numbers: Tensor,
    candidates: Sequence[int] = _CANDIDATES,
) -> Tensor:
    """A token for each row of probabilities [rows, vocab] from what its filters keep, at `numbers` → [rows] int64.

    The answer is the same for any `candidates`: they say how many best tokens are tried first.
    """
    rows, vocab = probabilities.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    open_rows = list(range(rows))
    for count in [*(each for each in candidates if each < vocab), vocab]:
        weights, ids, settled = keep_best(probabilities[open_rows], [params[row] for row in open_rows], count)
        places = invert(weights, numbers[open_rows]).unsqueeze(-1)
        tokens[open_rows] = ids.gather(-1, places).squeeze(-1)
        open_rows = [row for row, done in zip(open_rows, settled.tolist(), strict=True) if not done]
        if not open_rows:
            break
    return tokens


def keep_best(probabilities: Tensor, params: Sequence[SamplingParams], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` most likely tokens of each row of probabilities [rows, vocab], those that a filter drops weighing 0.

    → weights [rows, count] and ids [rows, count], most likely first, equal ones by id; settled [rows] bool, whether no
    token beyond these can be kept. With `count` the whole vocabulary every row is settled.
    """
    vocab = probabilities.shape[-1]
    best, ids = _rank(probabilities, count)
    top_k = column([min(each.top_k or vocab, vocab) for each in params], best).long()
    top_p = column([each.top_p for each in params], best)
    min_p = column([each.min_p for each in params], best)
    cumulative = best.cumsum(dim=-1, dtype=torch.float64)
    of_top_k = cumulative.gather(-1, top_k.clamp(max=count) - 1)
    total = torch.where(top_k < vocab, of_top_k, torch.ones_like(of_top_k))
    kept = (torch.arange(count, device=best.device) < top_k) & (best >= min_p * best[:, :1])
    # A token stays while those before it have not reached top_p; rounding must not cut a tail nobody asked to cut.
    kept &= (cumulative - best < top_p * total) | (top_p >= 1)
    kept[:, 0] = True
    lowest = best.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    # Beyond the candidates lie tokens as likely as the last of them.
    settled = (lowest > best[:, -1:]) & ((top_k <= count) | (top_k == vocab)) | (count == vocab)
    return best * kept, ids, settled.squeeze(-1)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row of weights [rows, n] ≥ 0, the first place whose cumulative weight exceeds number · total.

    numbers [rows, 1] float64 in [0, 1) → [rows] int64; a place of weight 0 is never chosen.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The product may round up to the total itself, which no cumulative weight exceeds.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """[rows, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _rank(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == probabilities.shape[-1]:
        whole = probabilities.sort(dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    best, ids = probabilities.topk(count, dim=-1)
    # topk leaves equal values in any order: order by id, then keep that order among equals.
    by_id = ids.sort(dim=-1)
    ranked = best.gather(-1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    return ranked.values, by_id.values.gather(-1, ranked.indices)


def penalize(logits: Tensor, draws: Sequence[SamplingInput]) -> Tensor:
    """Logits [rows, vocab] with the penalties of each row, then float32; the very same ones where no row has any.

    A token of the prompt or the answer has its logit divided (above 0) or multiplied (below) by the repetition
    penalty; one of the answer then loses the frequency penalty for each time, and the presence penalty once.
    """
    if not SamplingMetadata.of(draws).looks_back:
        return logits
    penalized = logits.to(torch.float32, copy=True)
    for row, draw in zip(penalized, draws, strict=True):
        if draw.history is not None and draw.sampling.penalized:
            _penalize_row(row, draw.sampling, draw.history)
    return penalized


def _penalize_row(logits: Tensor, sampling: SamplingParams, history: History) -> None:
    """Change the logits [vocab] float32 of one row in place."""
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
