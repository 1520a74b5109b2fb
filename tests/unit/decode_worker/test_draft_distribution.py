"""The distribution of answers with drafts is that of the model, by a chi-square test over many seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.sampler import sample
from tandem.engine.sampling_filters import draw_filtered, has_filters, invert
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.seeded import start_of, uniforms
from tandem.protocol.messages import SamplingParams
from tests.soak import soak

VOCAB, SEEDS = 32, 100_000
FILTERS = {
    "all tokens": SamplingParams(2, temperature=1.0),
    "temperature": SamplingParams(2, temperature=0.8),
    "top-p": SamplingParams(2, temperature=0.8, top_p=0.9),
    "top-k": SamplingParams(2, temperature=1.0, top_k=20),
    "min-p": SamplingParams(2, temperature=1.0, min_p=0.02),
    "all filters": SamplingParams(2, temperature=1.2, top_k=24, top_p=0.95, min_p=0.01),
}
LARGE_SAMPLES = [
    pytest.param(sampling, id=name, marks=() if name.startswith("all") else soak) for name, sampling in FILTERS.items()
]
"""`make test` draws with no filter and with all of them, `make soak` also with each one alone."""
STARTS = np.array([start_of(seed) for seed in range(SEEDS)], dtype=np.uint64)
Rule = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[list[int]]]
"""From the draws of the newest tokens' rows, the drafts and the draws of their rows: the tokens of each request."""


def matching(first: Sequence[int], drafts: Sequence[int], second: Sequence[int]) -> list[list[int]]:
    """The rule of the product."""
    rows = len(first)
    step = StepDrafts([RowDrafts(row, [draft], 1, rows + row) for row, draft in enumerate(drafts)])
    return [run for _, run in step.runs([*first, *second])]


def trusting(first: Sequence[int], drafts: Sequence[int], second: Sequence[int]) -> list[list[int]]:
    """A broken rule: it takes the draw behind a draft that was drawn almost, by the neighbouring token."""
    outputs = []
    for token, draft, following in zip(first, drafts, second, strict=True):
        outputs.append([token, following] if abs(token - draft) <= 1 else [token])
    return outputs


def draw(logits: Tensor, sampling: SamplingParams, index: int) -> list[int]:
    """Draw number `index` of each seed's sequence, as `sample` does for each seed by itself."""
    probabilities = soft(logits, sampling)
    numbers = torch.from_numpy(uniforms(STARTS[: len(logits)], np.full(len(logits), index)))[:, None]
    filtered = has_filters(sampling)
    tokens = draw_filtered(probabilities, [sampling] * len(logits), numbers) if filtered else None
    drawn: list[int] = (invert(probabilities, numbers) if tokens is None else tokens).tolist()
    return drawn


def soft(logits: Tensor, sampling: SamplingParams) -> Tensor:
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / sampling.temperature, dim=-1)


def kept(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The probabilities [rows, VOCAB] float64 that temperature and filters leave, one token after the other."""
    distribution = torch.zeros(logits.shape, dtype=torch.float64)
    for row, probabilities in zip(distribution, soft(logits.double(), sampling), strict=True):
        ranked = sorted(range(VOCAB), key=lambda token: (-float(probabilities[token]), token))
        best = ranked[: sampling.top_k or VOCAB]
        total, before = float(probabilities[best].sum()), 0.0
        for token in best:
            weight = float(probabilities[token])
            if weight >= sampling.min_p * float(probabilities[best[0]]) and before < sampling.top_p * total:
                row[token] = weight
            before += weight
    return distribution / distribution.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Draws:
    """Of each seed: a draft, the first token, and the second one behind the draft and behind the first token."""

    drafts: Sequence[int]
    first: Sequence[int]
    second: Sequence[int]
    plain: Sequence[int]


GENERATOR = torch.Generator().manual_seed(3)
HEAD, TAIL = torch.randn(VOCAB, generator=GENERATOR), 2 * torch.randn(VOCAB, VOCAB, generator=GENERATOR)


@lru_cache
def draws_of(sampling: SamplingParams) -> Draws:
    drafts = [seed % VOCAB if seed % 3 else int(HEAD.argmax()) for seed in range(SEEDS)]
    first = draw(HEAD.expand(SEEDS, -1), sampling, 0)
    return Draws(drafts, first, draw(TAIL[drafts], sampling, 1), draw(TAIL[first], sampling, 1))


def statistic(rule: Rule, sampling: SamplingParams) -> tuple[float, int, int]:
    """Chi-square of the joint of two tokens against the model's, its degrees of freedom, and dropped pairs."""
    draws = draws_of(sampling)
    runs, plain = rule(draws.first, draws.drafts, draws.second), draws.plain
    pairs = torch.tensor([(*run, token)[:2] for run, token in zip(runs, plain, strict=True)])
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB).double()
    expected = SEEDS * kept(HEAD[None], sampling)[0][:, None] * kept(TAIL, sampling)
    common = expected >= 5
    rare_counts, rare = counts[~common].sum(), expected[~common].sum()
    chi_square = ((counts - expected)[common].square() / expected[common]).sum()
    if rare > 0:
        chi_square += (rare_counts - rare) ** 2 / rare
    return float(chi_square), int(common.sum()) - (0 if rare > 0 else 1), int(counts[expected == 0].sum())


def limit(degrees: int) -> float:
    """The chi-square value that chance exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.0902 * spread**0.5) ** 3)


@pytest.mark.parametrize("sampling", LARGE_SAMPLES)
def test_answers_follow_the_model(sampling: SamplingParams) -> None:
    chi_square, degrees, dropped = statistic(matching, sampling)
    assert not dropped
    assert degrees > 100
    assert chi_square < limit(degrees)


@pytest.mark.parametrize("sampling", LARGE_SAMPLES)
def test_a_broken_rule_is_detected(sampling: SamplingParams) -> None:
    chi_square, degrees, _ = statistic(trusting, sampling)
    assert chi_square > 2 * limit(degrees)


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_draws_are_those_of_the_sampler(sampling: SamplingParams) -> None:
    logits = 2 * torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(5))
    for index in (0, 1):
        draws = [SamplingInput(replace(sampling, seed=seed), index) for seed in range(len(logits))]
        assert draw(logits, sampling, index) == sample(logits, draws).tolist()
