"""The same runner on a GPU: the CPU reference's greedy tokens, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Draw, StepBatch, StepRow
from engine.config import EngineConfig
from engine.kernels.reference import ReferenceKernels
from engine.model_runner import ModelRunner
from wire.messages import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NEW_TOKENS = 16
PROMPTS = [[(7 * i * i + 31 * s) % 40_000 for i in range(n)] for s, n in enumerate((5, 17, 64, 130))]


def greedy(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one step, then all together token by token."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    share = -(-(max(map(len, prompts)) + NEW_TOKENS) // runner.page_tokens)
    pages = [list(range(i * share, (i + 1) * share)) for i in range(len(prompts))]
    pieces, starts = prompts, [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for index in range(NEW_TOKENS):
        rows = [
            StepRow(piece, start, owned, Draw(sampling, index))
            for piece, start, owned in zip(pieces, starts, pages, strict=True)
        ]
        tokens = [token for token in runner.run(StepBatch(rows)).token_ids if token is not None]
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
        pieces = [[token] for token in tokens]
    return answers


@pytest.fixture(scope="module")
def on_gpu(model_folder: Path) -> ModelRunner:
    return ModelRunner.load(EngineConfig(model_folder, device="cuda", dtype="float32", page_tokens=16))


def test_same_tokens_as_on_the_cpu(on_gpu: ModelRunner, model_folder: Path) -> None:
    config = EngineConfig(model_folder, device="cpu", dtype="float32", page_tokens=16)
    assert greedy(on_gpu, PROMPTS) == greedy(ModelRunner.load(config, kernels=ReferenceKernels()), PROMPTS)


def test_alone_as_in_company(on_gpu: ModelRunner) -> None:
    together = greedy(on_gpu, PROMPTS)
    assert [greedy(on_gpu, [prompt])[0] for prompt in PROMPTS] == together
