"""CUDA graphs of prefill and mixed steps: as exact as the plain kernels, with any amount of padding.

Their tokens are drawn from the rows, by the draws and after the histories that the steps name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.logprobs import score
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampler import sample
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams

from .scheduled_steps import Request, Schedule, launch_ahead, logits_again

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
SHARE = 17
"""Pages of a row."""
PROMPTS = [5, 130, 17, 64, 90, 33, 103, 70, 70, 9, 15, 200]
SCHEDULE: Schedule = [
    [(number, PROMPTS[number]) for number in range(8)],
    [(8, 40), (9, 9), (10, 15)],
    [(number, 1) for number in (0, 1, 2, 3, 4, 5, 6, 7, 9, 10)],
    [(8, 30)],
    [(number, 1) for number in reversed(range(11))],
    [(number, 1) for number in range(11)],
    [(11, 72)],
    [(11, 128)],
    *[[(number, 1) for number in range(12)]] * 3,
]
"""Eight prompts that fill a graph of 512 tokens, then further steps.

Before their tokens are read, in another graph, a chunk and two prompts, whose tokens the step after finds on the
device; a chunk that ends between two decode steps, in a graph that it does not fill; a step that draws nothing.
"""
ASKED = [
    SamplingParams(1, temperature=0.0),
    SamplingParams(1, temperature=0.0, frequency_penalty=1.2, presence_penalty=0.4, logprobs=5),
    SamplingParams(1, temperature=0.9, top_k=40, top_p=0.95, seed=11, logprobs=0),
    SamplingParams(1, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9, seed=3),
    SamplingParams(1, temperature=1.0, seed=5, logprobs=20),
]


@pytest.fixture(scope="module")
def runners(model_folder: Path) -> dict[str, ModelRunner]:
    config = EngineConfig.of(
        model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 30, max_batch_requests=64
    )
    exact = replace(config, dtype="float32", page_tokens=128)
    return {
        "graphs": ModelRunner.load(config),
        "eager": ModelRunner.load(replace(config, cuda_graphs=False)),
        "plain": ModelRunner.load(replace(config, page_tokens=128), kernels=ReferenceKernels()),
        "exact": ModelRunner.load(exact, kernels=ReferenceKernels()),
    }


def prompt(tokens: int, salt: int) -> list[int]:
    return [(7 * i * i + 31 * salt + i) % 40_000 for i in range(tokens)]


def step(lengths: list[int], starts: list[int] | None = None, draw: SamplingInput | None = GREEDY) -> StepBatch:
    """Returns a step of one prompt per row, `lengths` tokens of each, after those in the cache."""
    return StepBatch(
        [
            StepRow(prompt(start + length, row)[start:], start, range(row * SHARE, (row + 1) * SHARE), draw)
            for row, (length, start) in enumerate(zip(lengths, starts or [0] * len(lengths), strict=True))
        ]
    )


LENGTHS = (
    [2],
    [63],
    [64],
    [65],
    [127, 2],
    [500],
    [512],
    [1025],
    [3, 200, 5],
    [2, 2, 2, 2, 2, 2, 2, 2],
    [300, 1, 299, 424],
)


def test_logits_are_as_right_as_the_plain_kernels(runners: dict[str, ModelRunner]) -> None:
    """All lengths are judged together: the errors of one row's logits come from few roundings."""
    errors: dict[str, list[torch.Tensor]] = {"graphs": [], "plain": []}
    for lengths in LENGTHS:
        batch = step(lengths)
        ours: Any = runners["graphs"].stepper
        assert ours.prompts.fitting(batch, ours._packer.sizes(batch)) is not None
        for runner in runners.values():
            runner.cache.tensor.fill_(float("nan"))
        exact = runners["exact"].logits(batch).float()
        for name, differences in errors.items():
            differences.append((runners[name].logits(batch).float() - exact).abs())
        assert errors["graphs"][-1].isfinite().all(), lengths
        pages = [row * SHARE + page for row, length in enumerate(lengths) for page in range(-(-length // 128))]
        untouched = sorted(set(range(len(lengths) * SHARE)) - set(pages))
        assert runners["graphs"].cache.tensor[untouched].isnan().all(), lengths
    graphs, plain = (torch.cat(differences) for differences in errors.values())
    print(f"error {graphs.max():.4f} at most, {graphs.mean():.4f} on average")
    print(f"plain {plain.max():.4f} at most, {plain.mean():.4f} on average")
    assert graphs.max() <= 2 * plain.max()
    assert graphs.mean() <= 2 * plain.mean()


def test_logits_of_a_chunk_after_stored_tokens(runners: dict[str, ModelRunner]) -> None:
    logits = {}
    for name, runner in runners.items():
        runner.cache.tensor.fill_(float("nan"))
        assert list(runner.run(step([300, 41], draw=None)).token_ids) == [None, None]
        logits[name] = runner.logits(step([400, 500], starts=[300, 41])).float()
    errors = {name: (logits[name] - logits["exact"]).abs() for name in ("graphs", "plain")}
    assert errors["graphs"].isfinite().all()
    assert errors["graphs"].max() <= 2 * errors["plain"].max()


def test_answers_decode_beside_prompts(runners: dict[str, ModelRunner]) -> None:
    held, logits = [300, 41, 129, 64, 2], {}
    for name, runner in runners.items():
        runner.cache.tensor.fill_(float("nan"))
        assert set(runner.run(step(held, draw=None)).token_ids) == {None}
        answers = [StepRow([7 + row], held[row], range(row * SHARE, (row + 1) * SHARE), GREEDY) for row in range(4)]
        chunks = [
            StepRow(prompt(length, row)[start:], start, range(row * SHARE, (row + 1) * SHARE), GREEDY)
            for row, start, length in ((4, 2, 130), (5, 0, 200))
        ]
        batch = StepBatch([*answers, *chunks])
        if name == "graphs":
            stepper: Any = runner.stepper
            assert stepper.prompts.fitting(batch, stepper._packer.sizes(batch)).chunks_at == 16
        logits[name] = runner.logits(batch).float()
    errors = {name: (logits[name] - logits["exact"]).abs() for name in ("graphs", "plain")}
    assert errors["graphs"].shape[0] == 6
    assert errors["graphs"].isfinite().all()
    assert errors["graphs"].max() <= 2 * errors["plain"].max()
    assert errors["graphs"].mean() <= 2 * errors["plain"].mean()


def test_logits_of_a_short_chunk_after_a_long_context(runners: dict[str, ModelRunner]) -> None:
    """Steps of decode rows and another chunk. All contexts are judged together, as the lengths above."""
    errors: dict[str, list[torch.Tensor]] = {"graphs": [], "plain": []}
    for context in (4095, 4096, 5000, 6000):
        for name, difference in errors_after_context(runners, context).items():
            errors[name].append(difference)
    graphs, plain = (torch.cat(errors[name]) for name in ("graphs", "plain"))
    assert graphs.isfinite().all()
    assert graphs.max() <= 2 * plain.max()
    assert graphs.mean() <= 2 * plain.mean()


def errors_after_context(runners: dict[str, ModelRunner], context: int) -> dict[str, torch.Tensor]:
    """Returns the errors of the logits of a step with a chunk behind `context` tokens, with and without graphs."""
    tokens, logits = 100, {}
    ours: Any = runners["graphs"].stepper
    batch = StepBatch(
        [
            StepRow([7], 300, range(60, 70), GREEDY),
            StepRow(prompt(context, 0)[-tokens:], context - tokens, range(60), GREEDY),
            StepRow(prompt(130, 2)[100:], 100, range(70, 80), GREEDY),
        ]
    )
    assert ours.prompts.fitting(batch, ours._packer.sizes(batch)) is not None
    for name in ("graphs", "plain", "exact"):
        runner = runners[name]
        runner.cache.tensor.fill_(float("nan"))
        for ids, pages in (
            (prompt(context, 0)[:-tokens], range(60)),
            (prompt(300, 1), range(60, 70)),
            (prompt(130, 2)[:100], range(70, 80)),
        ):
            for start in range(0, len(ids), 2000):
                runner.run(StepBatch([StepRow(ids[start : start + 2000], start, pages, None)]))
        logits[name] = runner.logits(batch).float()
    return {name: (logits[name] - logits["exact"]).abs() for name in ("graphs", "plain")}


@pytest.mark.parametrize("asked", [ASKED, ASKED[:1]], ids=["every kind of draw", "greedy alone"])
@pytest.mark.parametrize("name", ["graphs", "eager"])
def test_each_token_is_drawn_from_its_own_logits(
    runners: dict[str, ModelRunner], name: str, asked: list[SamplingParams]
) -> None:
    """Steps one ahead give the sampler's definition applied to the logits of the same steps one by one."""
    runner = runners[name]
    runner.cache.tensor.fill_(float("nan"))
    use: Any = runner.graph_use
    hits, misses = use.hits, use.misses
    requests = requests_that(asked)
    launch_ahead(runner, requests, SCHEDULE)
    assert (use.hits - hits, use.misses - misses) == ((len(SCHEDULE), 0) if name == "graphs" else (0, len(SCHEDULE)))
    runner.cache.tensor.fill_(float("nan"))
    for draw, number, logits in logits_again(runner, requests, SCHEDULE):
        request, where = requests[number], f"request {number}, token {draw.index}"
        drawn = sample(logits[None], [draw])
        assert request.answer[draw.index] == int(drawn), where
        (wanted,) = score(logits[None], [draw], drawn) or [None]
        scores = request.scores[draw.index]
        assert (scores is None) == (wanted is None), where
        if scores is not None and wanted is not None:
            assert scores.top_ids == wanted.top_ids, where
            assert (scores.chosen, *scores.top) == pytest.approx((wanted.chosen, *wanted.top), abs=1e-3), where


def test_what_is_drawn_from_is_as_right_as_without_graphs(runners: dict[str, ModelRunner]) -> None:
    """The whole schedule, decode steps after prompts included, every side fed with the same tokens."""
    requests = requests_that(ASKED)
    launch_ahead(runners["graphs"], requests, SCHEDULE)
    logprobs = {}
    for name in ("graphs", "eager", "exact"):
        runners[name].cache.tensor.fill_(float("nan"))
        again = logits_again(runners[name], requests, SCHEDULE)
        logprobs[name] = torch.stack([logits for _, _, logits in again]).log_softmax(dim=-1)
    errors = {name: (logprobs[name] - logprobs["exact"]).abs() for name in ("graphs", "eager")}
    assert errors["graphs"].isfinite().all()
    assert errors["graphs"].max() <= 2 * errors["eager"].max()
    assert errors["graphs"].mean() <= 2 * errors["eager"].mean()


def requests_that(asked: list[SamplingParams]) -> list[Request]:
    """Returns a request for each of `PROMPTS`, with these parameters in turn."""
    return [Request(prompt(length, row), asked[row % len(asked)]) for row, length in enumerate(PROMPTS)]


def test_steps_that_no_graph_takes(runners: dict[str, ModelRunner]) -> None:
    stepper: Any = runners["graphs"].stepper

    def fits(batch: StepBatch) -> bool:
        return stepper.prompts.fitting(batch, stepper._packer.sizes(batch)) is not None

    decoding = StepRow([7], 40, range(SHARE), GREEDY)
    assert fits(step([2040]))
    assert fits(step([1500, 548]))
    assert not fits(step([1500, 549]))
    assert not fits(step([2] * 9))
    assert fits(StepBatch([decoding, StepRow(prompt(64, 1), 0, range(SHARE, 2 * SHARE), GREEDY)]))
    assert not fits(StepBatch([decoding]))
