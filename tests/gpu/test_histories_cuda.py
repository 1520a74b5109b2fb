"""Penalties, grammars, minimum lengths and log probabilities on a GPU, with steps one ahead, as by plain kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.protocol.messages import SamplingParams, TokenLogprobs
from tandem.tokenizers.grammars import of_regex

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CACHE = 1 << 30
NEW_TOKENS = 24
PROMPTS = [[(7 * i * i + 31 * s) % 40_000 for i in range(n)] * 2 for s, n in enumerate((5, 17, 30, 64, 9, 23))]
SAMPLING = [
    SamplingParams(NEW_TOKENS, frequency_penalty=1.2, presence_penalty=0.4, logprobs=5),
    SamplingParams(NEW_TOKENS),
    SamplingParams(NEW_TOKENS, repetition_penalty=1.3, logprobs=0),
    SamplingParams(NEW_TOKENS, logprobs=20),
    SamplingParams(NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(NEW_TOKENS, min_tokens=NEW_TOKENS // 2, stop_token_ids=tuple(range(0, 40_000, 2)), logprobs=2),
]
WORDS = of_regex("([a-z]{2,9} ){60}")
"""No answer of NEW_TOKENS tokens reaches the end of this grammar."""
GRAMMARS = [
    SamplingParams(NEW_TOKENS, grammar=WORDS, frequency_penalty=0.8, logprobs=3),
    SamplingParams(NEW_TOKENS, grammar=WORDS),
    *SAMPLING[2:5],
    SamplingParams(NEW_TOKENS, grammar=WORDS, temperature=0.9, seed=5),
]

Answers = tuple[list[list[int]], list[list[TokenLogprobs | None]]]


def decode(runner: ModelRunner, samplings: Sequence[SamplingParams]) -> Answers:
    """Decodes all prompts in one step, then together token by token, each step launched before the last one is read."""
    share = -(-(max(map(len, PROMPTS)) + NEW_TOKENS) // runner.page_tokens)
    pages = [list(range(i * share, (i + 1) * share)) for i in range(len(PROMPTS))]
    answers: list[list[int]] = [[] for _ in PROMPTS]
    scores: list[list[TokenLogprobs | None]] = [[] for _ in PROMPTS]
    histories = [
        History(prompt, answer) if sampling.needs_history else None
        for prompt, answer, sampling in zip(PROMPTS, answers, samplings, strict=True)
    ]
    pending: list[PendingStep] = []

    def read() -> None:
        result = pending.pop(0)()
        for number, (token, score) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            assert token is not None
            history = histories[number]
            assert history is None or (not history.waiting and history.failure is None)
            answers[number].append(token)
            scores[number].append(score)

    for index in range(NEW_TOKENS):
        rows = []
        for number, prompt in enumerate(PROMPTS):
            draw = SamplingInput(samplings[number], index, histories[number])
            if index == 0:
                rows.append(StepRow(prompt, 0, pages[number], draw))
                continue
            late = runner.asynchronous
            token = 0 if late else answers[number][-1]
            rows.append(StepRow([token], len(prompt) + index - 1, pages[number], draw, number if late else None))
        pending.append(runner.launch(StepBatch(rows)))
        while len(pending) > int(runner.asynchronous):
            read()
        if pending:
            pending[-1].draw()
    while pending:
        read()
    return answers, scores


def load(folder: Path, rows: int, kernels: Kernels | None = None) -> ModelRunner:
    config = EngineConfig.of(
        folder, device="cuda", dtype="float32", page_tokens=16, kv_cache_bytes=CACHE, max_batch_requests=rows
    )
    return ModelRunner.load(config, kernels=kernels)


@pytest.mark.parametrize("samplings", [SAMPLING, GRAMMARS], ids=["", "grammars"])
@pytest.mark.parametrize("rows", [16, 2], ids=["graphs", "more rows than graphs and counts have room for"])
def test_as_the_plain_kernels_one_step_at_a_time(
    rows: int, samplings: Sequence[SamplingParams], model_folder: Path
) -> None:
    wanted = decode(load(model_folder, 64, ReferenceKernels()), samplings)
    answers, scores = decode(load(model_folder, rows), samplings)
    assert answers == wanted[0]
    for here, there in zip(scores, wanted[1], strict=True):
        for mine, plain in zip(here, there, strict=True):
            assert (mine is None) == (plain is None)
            if mine is not None and plain is not None:
                assert len(mine.top_ids) == len(plain.top_ids)
                assert (mine.chosen, *mine.top) == pytest.approx((plain.chosen, *plain.top), abs=2e-3)
