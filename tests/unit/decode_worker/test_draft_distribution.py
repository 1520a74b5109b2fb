"""The distribution of answers with drafts is that of the model, by a chi-square test over many seeds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_worker.drafts import RowDrafts, StepDrafts
from engine.sampler import sample
from engine.sampling_filters import draw_filtered, has_filters
from engine.steps.draws import Draw
from wire.messages import SamplingParams

VOCAB, SEEDS = 32, 10_000
FILTERS = [
    SamplingParams(2, temperature=1.0),
    SamplingParams(2, temperature=0.8, top_p=0.9),
    SamplingParams(2, temperature=1.0, top_k=20, min_p=0.02),
]
Rule = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[list[int]]]
"""From the draws of the newest tokens' rows, the drafts and the draws of their rows: the tokens of each request."""


def matching(first: Sequence[int], drafts: Sequence[int], second: Sequence[int]) -> list[list[int]]:
    """The rule of the product."""
    rows = len(first)
    step = StepDrafts([RowDrafts(row, [draft], 1, rows + row) for row, draft in enumerate(drafts)])
    return [run for _, run in step.runs([*first, *second])]


def trusting(first: Sequence[int], drafts: Sequence[int], second: Sequence[int]) -> list[list[int]]:
    """A broken rule: it takes the draw behind a draft that was drawn almost, by the neighbouring token."""
    found = []
    for token, draft, following in zip(first, drafts, second, strict=True):
        found.append([token, following] if abs(token - draft) <= 1 else [token])
    return found


def draw(logits: Tensor, sampling: SamplingParams, seeds: Sequence[int], index: int) -> list[int]:
    """Draw number `index` of each seed's sequence."""
    tokens: list[int] = sample(logits, [Draw(replace(sampling, seed=seed), index) for seed in seeds]).tolist()
    return tokens


def statistic(rule: Rule, sampling: SamplingParams, probabilities: Callable[[Tensor], Tensor]) -> tuple[float, int]:
    """Chi-square of the joint of two tokens against the model's, and its degrees of freedom."""
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(VOCAB, generator=generator)
    tail = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
    seeds = list(range(SEEDS))
    drafts = [seed % VOCAB if seed % 3 else int(head.argmax()) for seed in seeds]
    first = draw(head.expand(SEEDS, -1), sampling, seeds, 0)
    runs = rule(first, drafts, draw(tail[drafts], sampling, seeds, 1))
    plain = draw(tail[first], sampling, seeds, 1)
    pairs = torch.tensor([(*run, token)[:2] for run, token in zip(runs, plain, strict=True)])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64).index_put_(
        (pairs[:, 0], pairs[:, 1]), torch.ones(SEEDS, dtype=torch.float64), accumulate=True
    )
    expected = SEEDS * (probabilities(head[None])[0][:, None] * probabilities(tail)).double()
    common = expected >= 5
    rare_counts, rare = counts[~common].sum(), expected[~common].sum()
    found = ((counts - expected)[common].square() / expected[common]).sum()
    if rare > 0:
        found += (rare_counts - rare) ** 2 / rare
    return float(found), int(common.sum()) - (0 if rare > 0 else 1)


def kept(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The probabilities of tokens after temperature and filters, by many evenly spread numbers."""
    soft = torch.softmax(logits / sampling.temperature, dim=-1)
    if not has_filters(sampling):
        return soft
    points = 4096
    numbers = ((torch.arange(points, dtype=torch.float64) + 0.5) / points)[:, None]
    found = []
    for row in soft:
        drawn = draw_filtered(row.expand(points, -1), [sampling] * points, numbers)
        found.append(torch.bincount(drawn, minlength=VOCAB) / points)
    return torch.stack(found)


def limit(degrees: int) -> float:
    """The chi-square value that chance exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.0902 * spread**0.5) ** 3)


@pytest.mark.parametrize("sampling", FILTERS, ids=["all tokens", "top-p", "top-k and min-p"])
def test_answers_follow_the_model(sampling: SamplingParams) -> None:
    found, degrees = statistic(matching, sampling, lambda logits: kept(logits, sampling))
    assert degrees > 100
    assert found < limit(degrees)


def test_a_broken_rule_is_detected() -> None:
    found, degrees = statistic(trusting, FILTERS[0], lambda logits: kept(logits, FILTERS[0]))
    assert found > limit(degrees)
