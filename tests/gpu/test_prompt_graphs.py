"""Steps of prompts as CUDA graphs: as right as the plain kernels, whatever the step lacks of the graph's size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Draw, StepBatch, StepRow
from engine.config import EngineConfig
from engine.kernels.reference import ReferenceKernels
from engine.model_runner import ModelRunner
from wire.messages import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0)
SHARE = 17
"""Pages of a row."""


@pytest.fixture(scope="module")
def runners(model_folder: Path) -> dict[str, ModelRunner]:
    config = EngineConfig(model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 30)
    exact = replace(config, dtype="float32", page_tokens=128)
    return {
        "graphs": ModelRunner.load(config),
        "plain": ModelRunner.load(replace(config, page_tokens=128), kernels=ReferenceKernels()),
        "exact": ModelRunner.load(exact, kernels=ReferenceKernels()),
    }


def prompt(tokens: int, salt: int) -> list[int]:
    return [(7 * i * i + 31 * salt + i) % 40_000 for i in range(tokens)]


def step(lengths: list[int], starts: list[int] | None = None, draw: Draw | None = GREEDY) -> StepBatch:
    """A prompt a row, `lengths` tokens of each, behind those in the cache."""
    return StepBatch(
        [
            StepRow(prompt(start + length, row)[start:], start, range(row * SHARE, (row + 1) * SHARE), draw)
            for row, (length, start) in enumerate(zip(lengths, starts or [0] * len(lengths), strict=True))
        ]
    )


@pytest.mark.parametrize(
    "lengths",
    [[2], [63], [64], [65], [127, 2], [500], [512], [1025], [3, 200, 5], [2, 2, 2, 2, 2, 2, 2, 2], [300, 1, 299, 424]],
)
def test_logits_are_as_right_as_the_plain_kernels(runners: dict[str, ModelRunner], lengths: list[int]) -> None:
    batch = step(lengths)
    ours: Any = runners["graphs"].stepper
    assert ours.prompts.fitting(batch, ours._packer.sizes(batch)) is not None
    for runner in runners.values():
        runner.cache.tensor.fill_(float("nan"))
    exact = runners["exact"].logits(batch).float()
    errors = {name: (runners[name].logits(batch).float() - exact).abs() for name in ("graphs", "plain")}
    assert errors["graphs"].isfinite().all()
    assert errors["graphs"].max() <= 2 * errors["plain"].max()
    assert errors["graphs"].mean() <= 2 * errors["plain"].mean()
    pages = [row * SHARE + page for row, length in enumerate(lengths) for page in range(-(-length // 128))]
    untouched = sorted(set(range(len(lengths) * SHARE)) - set(pages))
    assert runners["graphs"].cache.tensor[untouched].isnan().all()


def test_a_chunk_behind_what_is_stored(runners: dict[str, ModelRunner]) -> None:
    found = {}
    for name, runner in runners.items():
        runner.cache.tensor.fill_(float("nan"))
        assert list(runner.run(step([300, 41], draw=None)).token_ids) == [None, None]
        found[name] = runner.logits(step([400, 500], starts=[300, 41])).float()
    errors = {name: (found[name] - found["exact"]).abs() for name in ("graphs", "plain")}
    assert errors["graphs"].isfinite().all()
    assert errors["graphs"].max() <= 2 * errors["plain"].max()


def test_steps_that_no_graph_takes(runners: dict[str, ModelRunner]) -> None:
    stepper: Any = runners["graphs"].stepper

    def fits(batch: StepBatch) -> bool:
        return stepper.prompts.fitting(batch, stepper._packer.sizes(batch)) is not None

    decoding = StepRow([7], 40, range(SHARE), GREEDY)
    assert fits(step([2040]))
    assert fits(step([1500, 548]))
    assert not fits(step([1500, 549]))
    assert not fits(step([2] * 9))
    assert not fits(StepBatch([decoding, StepRow(prompt(64, 1), 0, range(SHARE, 2 * SHARE), GREEDY)]))
    assert not fits(StepBatch([decoding]))
