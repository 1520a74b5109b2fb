"""Whether rounding explains a token: a greedy choice or a seeded draw that nearly ties with another one.

The same tokens get slightly different logits in another step: in float32 on the CPU, those of SmolLM2-135M differ by up
to 4.4e-5 between a prompt and a decoded token, and none differ between decode steps. A seeded draw inverts the
cumulative probabilities in the order of token ids, and these differ by up to 2.3e-6. Both limits are wider than that,
and far too narrow for a wrong answer, each of whose tokens would have to lie within them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.logits_mask import masked
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling_filters import has_filters, keep_best, penalize
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.engine.steps.seeded import uniform
from tandem.protocol.messages import SamplingParams
from tests.e2e.reference import TIE

DRAW_TIE = 1e-5
"""The distance in cumulative probability at which a draw may be one of the neighbouring token."""


def near_ties(
    engine: ModelRunner, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams, adapter: int = 0
) -> int | None:
    """Return the number of tokens of an answer that rounding chose; None if it does not explain each of them.

    Each token is judged by the logits after those before it. Grammars are not known here: their answers are never
    explained.
    """
    if sampling.grammar:
        return None
    token_ids = [*prompt, *answer[:-1]]
    pages = list(range(engine.kv_pages.numbers(len(token_ids)) * engine.kv_pages.groups))
    row = StepRow(token_ids, 0, pages, SamplingInput(sampling, 0), adapter=adapter)
    logits = engine.logits(StepBatch([row]), every_token=True)[len(prompt) - 1 : len(token_ids)]
    ties = 0
    for index, (scores, token) in enumerate(zip(logits, answer, strict=True)):
        history = History(prompt, answer[:index]) if sampling.needs_history else None
        drawn = [SamplingInput(sampling, index, history)]
        distance, limit = _distance(
            penalize(masked(scores[None], drawn, engine.facts.eos_token_ids), drawn), drawn[0], token
        )
        if distance > limit:
            return None
        ties += distance > 0
    return ties


def _distance(logits: Tensor, drawn: SamplingInput, token: int) -> tuple[float, float]:
    """Return the distance of a token of logits [1, vocab] from being sampled, and its limit."""
    sampling, peak = drawn.sampling, logits.max()
    if sampling.temperature == 0:
        return float(peak - logits[0, token]), TIE
    weights = torch.softmax((logits.float() - peak) / sampling.temperature, dim=-1)
    ids = torch.arange(weights.shape[1])[None]
    if has_filters(sampling):
        weights, ids, _ = keep_best(weights, [sampling], weights.shape[1])
    place = int((ids[0] == token).nonzero())
    if not weights[0, place]:
        return float("inf"), DRAW_TIE
    ends = weights[0].cumsum(0, dtype=torch.float64) / weights.sum(dtype=torch.float64)
    number = uniform(sampling.seed, drawn.index)
    return max(0.0, float(ends[place - 1]) - number if place else 0.0, number - float(ends[place])), DRAW_TIE
