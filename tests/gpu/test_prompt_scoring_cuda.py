"""Scored prompts and biased draws on a GPU, in steps one ahead and beside graphs, as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.prompt_scoring import PIECE, PromptScores
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.factories import tiny_engine_config, write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPTS = [[(7 * i * i + 31 * s + 3) % 150 for i in range(n)] for s, n in enumerate((2 * PIECE + 21, 9, 70))]
TOP = (2, 0, 5)
NEW_TOKENS = 6
KV_CACHE_BYTES = 1 << 26
"""Enough for the pages of all prompts, whatever a device's page size is."""
BIASES = (((7, 30.0), (9, -100.0)), (), ((3, 2.5),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Dimensions that the GPU's kernels take.
    wide = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama3", **wide)


def run(runner: ModelRunner, chunk: int) -> tuple[list[PromptScores], list[list[int]]]:
    """Scores each prompt in chunks, then answers it, while the prompts before it decode in the same steps."""
    page_tokens = runner.page_tokens
    share = -(-(len(PROMPTS[0]) + NEW_TOKENS) // page_tokens)
    scores = [PromptScores(prompt, top) for prompt, top in zip(PROMPTS, TOP, strict=True)]
    answers: list[list[int]] = [[] for _ in PROMPTS]
    pending: list[tuple[list[int], PendingStep]] = []
    in_flight: list[int] = []

    def read() -> None:
        numbers, step = pending.pop(0)
        drawn = [token for token in step().token_ids if token is not None]
        for number, token in zip(numbers, drawn, strict=True):
            answers[number].append(token)

    def launch(chunk_row: tuple[int, StepRow] | None) -> None:
        nonlocal in_flight
        rows, numbers = [], []
        for number, prompt in enumerate(PROMPTS):
            index = len(answers[number]) + (number in in_flight)
            if not 0 < index < NEW_TOKENS:
                continue
            late = number in in_flight
            draw = SamplingInput(SamplingParams(NEW_TOKENS, logit_bias=BIASES[number]), index)
            pages = list(range(number * share, (number + 1) * share))
            token = 0 if late else answers[number][-1]
            source = in_flight.index(number) if late else None
            rows.append(StepRow([token], len(prompt) + index - 1, pages, draw, source))
            numbers.append(number)
        if chunk_row is not None:
            rows.append(chunk_row[1])
            numbers += [chunk_row[0]] * (chunk_row[1].draw is not None)
        if rows:
            pending.append((numbers, runner.launch(StepBatch(rows))))
        in_flight = numbers if runner.asynchronous else []
        while len(pending) > int(runner.asynchronous):
            read()

    for number, prompt in enumerate(PROMPTS):
        pages = list(range(number * share, (number + 1) * share))
        for start in range(0, len(prompt), chunk):
            last = start + chunk >= len(prompt)
            draw = SamplingInput(SamplingParams(NEW_TOKENS, logit_bias=BIASES[number]), 0) if last else None
            launch((number, StepRow(prompt[start : start + chunk], start, pages, draw, scores=scores[number])))
    for _ in range(NEW_TOKENS):
        launch(None)
    while pending:
        read()
    return scores, answers


@pytest.mark.parametrize("chunk", [512, PIECE, 37])
def test_as_on_the_cpu(folder: Path, chunk: int) -> None:
    wanted, tokens = run(ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=KV_CACHE_BYTES)), 512)
    runner = ModelRunner.load(tiny_engine_config(folder, device="cuda", dtype="float32", kv_cache_bytes=KV_CACHE_BYTES))
    actual, answers = run(runner, chunk)
    assert answers == tokens
    assert runner.graph_use.hits > 0
    for here, there in zip(actual, wanted, strict=True):
        assert here.top_ids == there.top_ids
        assert here.chosen == pytest.approx(there.chosen, abs=2e-3)
        assert here.top == pytest.approx(there.top, abs=2e-3)
