"""Models of every family on the GPU: the tokens of the plain kernels on the CPU, through CUDA graphs and chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tests.factories import FAMILIES, draw, write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = 2e-4
PROMPT, CHUNK, DECODED = 150, 64, 4
_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_LATENT = {"hidden_size": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
"""Dimensions that the GPU's kernels take."""
_OWN: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 4},
    "gemma4": {"global_head_dim": 128},
    "gemma4_experts": {"global_head_dim": 128},
    "gemma4_e2b": {"global_head_dim": 512},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128},
    "deepseek_v32": {"index_head_dim": 64},
    "glm_moe_dsa": {"index_head_dim": 64},
    "cohere2": {"num_attention_heads": 2, "head_dim": None},
    "phi3_longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [3.0] * 32}},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_of_the_plain_kernels(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = _LATENT if "kv_lora_rank" in FAMILIES[family] else _WIDE
    folder = write_tiny_model(tmp_path / family, family, **(changes | _OWN.get(family, {})))
    config = EngineConfig.of(
        folder, device="cuda", dtype="float32", kv_cache_bytes=1 << 26, page_tokens=16, max_batch_requests=64
    )
    ours = ModelRunner.load(config)
    exact = ModelRunner.load(
        EngineConfig.of(folder, dtype="float32", kv_cache_bytes=1 << 26, page_tokens=16, threads=4),
        kernels=ReferenceKernels(),
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 160) for _ in range(PROMPT)] for _ in range(3)]
    share = ours.kv_pages.numbers(PROMPT + DECODED) * ours.kv_pages.groups
    pages = [list(range(number * share, (number + 1) * share)) for number in range(3)]
    for start in range(0, PROMPT, CHUNK):
        end = min(start + CHUNK, PROMPT)
        rows = [StepRow(ids[start:end], start, held, draw()) for ids, held in zip(prompts, pages, strict=True)]
        check(ours, exact, StepBatch(rows))
    for at in range(PROMPT, PROMPT + DECODED):
        rows = [StepRow([7 * at % 150 + number], at, held, draw()) for number, held in enumerate(pages)]
        check(ours, exact, StepBatch(rows))


def check(ours: ModelRunner, exact: ModelRunner, step: StepBatch) -> None:
    wanted = exact.logits(step)
    torch.testing.assert_close(ours.logits(step).cpu(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert list(ours.run(step).token_ids) == list(exact.run(step).token_ids)
