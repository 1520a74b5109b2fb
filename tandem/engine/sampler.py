"""Samples the next token of all rows at once: greedily, or from the filtered distribution with a seeded random number.

Biases and then penalties change the logits before everything else, as in vLLM. Filters run in the order of
transformers: temperature, top_k, top_p (of the tokens that top_k kept), min_p. Sampling inverts the cumulative
distribution at one uniform random number, which depends only on the request's seed and the index of the output token,
so the rest of the batch does not affect a row. Tokens are ordered by id or, if a filter is set, by descending
probability and then by id: a filter needs that order anyway, and keeps few tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.logits_mask import masked, within_grammars
from tandem.engine.sampling_filters import column, draw_filtered, has_filters, invert, penalize
from tandem.engine.steps.sampling_metadata import NO_TOKEN, SamplingInput, SamplingMetadata
from tandem.engine.steps.seeded import uniform


def sample(
    logits: Tensor, draws: Sequence[SamplingInput], eos_token_ids: Sequence[int] = (), masks: GrammarMasks | None = None
) -> Tensor:
    """Return one token id for each row of logits [rows, vocab]: [rows] int64.

    Greedy rows take the lowest id among equal logits. None of `eos_token_ids` is sampled where an output may not end
    yet, and no token that a grammar forbids according to `masks`. The id is NO_TOKEN in rows whose largest logit is not
    finite.
    """
    draws = SamplingMetadata.of(draws)
    if draws.masked:
        logits = masked(logits, draws, eos_token_ids)
    if draws.looks_back:
        logits = penalize(logits, draws)
    if draws.constrained and masks is not None:
        logits = within_grammars(logits, draws, masks)
    best = _argmax(logits)
    peaks = logits.gather(-1, best.unsqueeze(-1)).float()
    tokens = torch.where(peaks.squeeze(-1).isfinite(), best, NO_TOKEN)
    if draws.greedy:
        return tokens
    drawn = zip(tokens.tolist(), draws, strict=True)
    random = [
        row
        for row, (token, sampling_input) in enumerate(drawn)
        if sampling_input.sampling.temperature > 0 and token != NO_TOKEN
    ]
    plain = [row for row in random if not has_filters(draws[row].sampling)]
    filtered = [row for row in random if has_filters(draws[row].sampling)]
    if plain:
        probabilities, numbers = _soften(logits[plain], peaks[plain], [draws[row] for row in plain])
        tokens[plain] = invert(probabilities, numbers)
    if filtered:
        probabilities, numbers = _soften(logits[filtered], peaks[filtered], [draws[row] for row in filtered])
        tokens[filtered] = draw_filtered(probabilities, [draws[row].sampling for row in filtered], numbers)
    return tokens


def _soften(logits: Tensor, peaks: Tensor, draws: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
    """Return each row's probabilities at its temperature, [rows, vocab] float32, and random numbers [rows, 1] float64.

    `peaks` [rows, 1] float32 are the largest logits.
    """
    wide = logits.float()
    # The maximum is subtracted first, and the temperature is kept above zero, so that nothing overflows.
    temperature = (
        column([sampling_input.sampling.temperature for sampling_input in draws], wide).float().clamp(min=1e-30)
    )
    probabilities = torch.softmax((wide - peaks) / temperature, dim=-1)
    return probabilities, column(
        [uniform(sampling_input.sampling.seed, sampling_input.index) for sampling_input in draws], wide
    )


def _argmax(logits: Tensor) -> Tensor:
    # NumPy's argmax is fourteen times as fast on a host. Both take the first of equal values, and treat NaN as the
    # largest.
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
