"""Models with state layers in bfloat16 on the GPU: no launch waits, and graphs compute what single launches do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tests.factories import draw, write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 128, "head_dim": 64},
    "nemotron_h": {"hidden_size": 128, "head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 64},
    "lfm2": {"hidden_size": 128, "num_attention_heads": 2},
    "kimi_linear": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        # Without experts, of which bfloat16 chooses others than float32 does.
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 64,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
    },
}
PROMPTS = (150, 33, 70)
TOLERANCE = 0.08
"""Tolerated difference of a logit in bfloat16 from the same one in float32; PyTorch on a CPU reaches 0.068."""


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_launches_ahead_have_the_logits_of_float32(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, **(FAMILIES[family] | {"num_key_value_heads": 2}))

    def load(dtype: str, *, graphs: bool) -> ModelRunner:
        return ModelRunner.load(
            EngineConfig.of(
                folder, device="cuda", dtype=dtype, kv_cache_bytes=1 << 27, max_batch_requests=8, cuda_graphs=graphs
            )
        )

    graphs, launches, exact = (
        load("bfloat16", graphs=True),
        load("bfloat16", graphs=False),
        load("float32", graphs=False),
    )
    # The number of tokens in a page depends on the dtype.
    kinds = [runner.kv_pages for runner in (graphs, launches, exact)]
    share = max(kv.numbers(160) * kv.groups for kv in kinds)
    pages = [list(range(number * share, (number + 1) * share)) for number in range(len(PROMPTS))]
    ids = [[(7 * position + 31 * number) % 150 for position in range(160)] for number in range(len(PROMPTS))]
    parts = [(0, 64), (64, 66), (66, 150), (150, 151), (151, 152)]
    for start, end in parts:
        rows = []
        for number, length in enumerate(PROMPTS):
            first, last = (min(bound, length) if end <= 150 else bound - 150 + length for bound in (start, end))
            if last > first:
                rows.append(StepRow(ids[number][first:last], first, pages[number], draw()))
        step = StepBatch(sorted(rows, key=lambda row: len(row.token_ids) > 1))
        # Each runner computes each step twice, with states that the first time has advanced.
        graphs.run(step)
        exact.run(step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = launches.launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pending()
        wanted = exact.logits(step)
        for runner in (graphs, launches):
            torch.testing.assert_close(runner.logits(step).float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
