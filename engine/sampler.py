"""Choosing the next token of every row at once: greedy, or a seeded draw from the filtered distribution.

Penalties change the logits before everything else; they mean what they mean in vLLM. The filters run in the order of
transformers: temperature, top_k, top_p (of what top_k left), min_p. A draw inverts the
cumulative distribution at one uniform number that depends on the request's seed and the draw's index alone, so the
batch a row travels in changes nothing. Tokens stand in the order of their ids, or where a filter is set, of falling
probability and then of their ids: a filter needs that order anyway, and keeps few.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.least_lengths import without_early_ends
from engine.steps.batch import Draw, History, scores_of, wants_logprobs
from engine.steps.seeded import uniform
from wire.messages import SamplingParams, TokenLogprobs

_LOW_HALF = (1 << 31) - 1
_CANDIDATES = (128, 1024)
"""Filters look at so many best tokens, then at more, and sort a vocabulary only where these do not settle them."""


def sample(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int] = ()) -> Tensor:
    """One token id for each row of logits [rows, vocab] → [rows] int64; greedy rows take the lowest of equal ids. None
    of `eos_token_ids` where an answer may not end yet.
    """
    logits = without_early_ends(penalize(logits, draws), draws, eos_token_ids)
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    tokens = (
        _argmax(logits) if len(random) < len(draws) else torch.empty(len(draws), dtype=torch.int64).to(logits.device)
    )
    plain = [row for row in random if not _filters(draws[row].sampling)]
    filtered = [row for row in random if _filters(draws[row].sampling)]
    if plain:
        probabilities, numbers = _soften(logits[plain], [draws[row] for row in plain])
        tokens[plain] = invert(probabilities, numbers)
    if filtered:
        probabilities, numbers = _soften(logits[filtered], [draws[row] for row in filtered])
        tokens[filtered] = draw_filtered(probabilities, [draws[row].sampling for row in filtered], numbers)
    return tokens


def penalize(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits [rows, vocab] with the penalties of each row, then float32; the very same ones where no row has any.

    A token of the prompt or the answer has its logit divided (above 0) or multiplied (below) by the repetition
    penalty; one of the answer then loses the frequency penalty for each time, and the presence penalty once.
    """
    if all(draw.history is None for draw in draws):
        return logits
    penalized = logits.to(torch.float32, copy=True)
    for row, draw in zip(penalized, draws, strict=True):
        if draw.history is not None:
            _penalize_row(row, draw.sampling, draw.history)
    return penalized


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
    places = torch.cat((tokens.unsqueeze(-1), ids), dim=-1)
    return wide.gather(-1, places) - wide.logsumexp(dim=-1, keepdim=True), ids


def score(logits: Tensor, draws: Sequence[Draw], tokens: Tensor) -> list[TokenLogprobs | None]:
    """The log probabilities that `draws` ask for beside their `tokens` [rows], one for each row of logits [rows, vocab]
    as the model gave them; empty if none asks.
    """
    asking = [row for row, draw in enumerate(draws) if wants_logprobs(draw)]
    if not asking:
        return []
    most = max(draws[row].sampling.logprobs or 0 for row in asking)
    values, ids = logprobs(logits[asking], tokens[asking], most)
    return scores_of(draws, values.tolist(), ids.tolist())


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row of weights [rows, n] ≥ 0, the first place whose cumulative weight exceeds number · total.

    numbers [rows, 1] float64 in [0, 1) → [rows] int64; a place of weight 0 is never chosen.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The product may round up to the total itself, which no cumulative weight exceeds.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


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
    top_k = _column([min(each.top_k or vocab, vocab) for each in params], best).long()
    top_p = _column([each.top_p for each in params], best)
    min_p = _column([each.min_p for each in params], best)
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


def _penalize_row(logits: Tensor, sampling: SamplingParams, history: History) -> None:
    """In place, logits [vocab] float32."""
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


def _rank(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == probabilities.shape[-1]:
        whole = probabilities.sort(dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    best, ids = probabilities.topk(count, dim=-1)
    # topk leaves equal values in any order: order by id, then keep that order among equals.
    by_id = ids.sort(dim=-1)
    ranked = best.gather(-1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    return ranked.values, by_id.values.gather(-1, ranked.indices)


def _soften(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Probabilities [rows, vocab] float32 at each row's temperature, and its uniform number [rows, 1] float64."""
    wide = logits.float()
    # The maximum is taken off first, and the temperature kept off zero: neither may overflow.
    temperature = _column([draw.sampling.temperature for draw in draws], wide).float().clamp(min=1e-30)
    probabilities = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    return probabilities, _column([uniform(draw.sampling.seed, draw.index) for draw in draws], wide)


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _argmax(logits: Tensor) -> Tensor:
    # NumPy's is fourteen times as fast on a host; both take the first of equals.
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[rows, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
