"""Rows without a finite logit on the GPU, in steps that are launched before the host knows of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import NO_TOKEN, History, SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.adapters import TinyAdapter
from tests.factories import draw, write_tiny_model
from tests.gpu.test_lora import PAGE_TOKENS, WIDE, config_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GOOD = TinyAdapter(seed=1, changes=WIDE)
OVERFLOWING = replace(GOOD, alpha=1e30)
"""Its update is finite, and what attention makes of it is not."""
PROMPT, STEPS = 40, 4
SAMPLINGS = {
    "greedy": draw(temperature=0.0).sampling,
    "drawn": draw(temperature=1.0, top_p=0.9, seed=5).sampling,
    "penalized": draw(temperature=0.8, presence_penalty=1.0, logprobs=2, seed=6).sampling,
}


def answers(runner: ModelRunner, adapters: list[int], sampling: SamplingParams) -> list[list[int]]:
    """Returns what rows with these adapters draw: at the end of a prompt, then in decode steps, each one ahead."""
    prompts = [[3 + (7 * row + place) % 150 for place in range(PROMPT)] for row in range(len(adapters))]
    token_ids: list[list[int]] = [[] for _ in adapters]
    histories = [
        History(prompt, answer) if sampling.needs_history else None
        for prompt, answer in zip(prompts, token_ids, strict=True)
    ]
    pages = [[row] for row in range(len(adapters))]
    assert PROMPT + STEPS <= PAGE_TOKENS
    pending: list[PendingStep] = []

    def read() -> None:
        for answer, token in zip(token_ids, pending.pop(0)().token_ids, strict=True):
            assert token is not None
            answer.append(token)

    for step in range(STEPS):
        rows = [
            StepRow(
                [0] if step else prompts[row],
                PROMPT + step - 1 if step else 0,
                pages[row],
                SamplingInput(sampling, step, histories[row]),
                row if step else None,
                adapter=adapter,
            )
            for row, adapter in enumerate(adapters)
        ]
        pending.append(runner.launch(StepBatch(rows)))
        if step:
            read()
    read()
    return token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_row_without_a_finite_logit_has_no_token_and_others_have_theirs(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model", **WIDE)
    paths = [adapter.write(tmp_path / name) for name, adapter in (("good", GOOD), ("overflowing", OVERFLOWING))]
    runner = ModelRunner.load(config_of(folder, paths))
    whole = answers(runner, [0, 0, 1], sampling)
    broken = answers(runner, [2, 0, 1], sampling)
    assert broken[0] == [NO_TOKEN] * STEPS
    assert broken[1:] == whole[1:]
    assert answers(runner, [0, 0, 1], sampling) == whole, "its pages and counts are used again"
