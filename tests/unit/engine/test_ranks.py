"""Models that are divided among ranks compute what one rank computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch
from tests.factories import FAMILIES, row, tiny_engine_config, write_tiny_model
from tests.ranks import group_runner

TOLERANCE = 2e-5
IDS = [(7 * position + 3) % 157 for position in range(60)]
THREE: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}


def steps(pages: list[int]) -> list[StepBatch]:
    """Returns a chunk without a draw, one with, and two steps of one token beside another prompt."""
    mine, other = pages[: len(pages) // 2], pages[len(pages) // 2 :]
    return [
        StepBatch([row(IDS[:21], 0, mine, drawn=False)]),
        StepBatch([row(IDS[21:40], 21, mine)]),
        StepBatch([row(IDS[40:41], 40, mine), row(IDS[::-1][:17], 0, other)]),
        StepBatch([row(IDS[41:42], 41, mine), row(IDS[::-1][17:18], 17, other)]),
    ]


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    kv = runner.cache.kv_pages
    pages = list(range(2 * kv.numbers(len(IDS)) * kv.groups))
    return [runner.logits(batch).clone() for batch in steps(pages)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_one_rank(family: str, ranks: int, tmp_path: Path) -> None:
    changes = {key: value for key, value in THREE.items() if key in FAMILIES[family]} if ranks == 3 else {}
    config = tiny_engine_config(write_tiny_model(tmp_path, family, **changes), kv_cache_bytes=8 << 20)
    wanted = logits_of(ModelRunner.load(config, kernels=ReferenceKernels()))
    with group_runner(config, ranks) as (runner, _):
        found = logits_of(runner)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
